"""A trained model leaves the house: as an nn.Module, as files, as numbers on other data."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy

from remanence.core.errors import InputError
from remanence.data.dataset import ArrayDataset
from remanence.experiment.data_setup import load_data
from remanence.results.run import Run
from remanence.results.summary import summarize
from remanence.results.trained_model import load_model

FORMATS = ("safetensors", "torchscript", "onnx")


def normalization_stats(run: Run, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Mean and deviation of the training data, in raw units, shaped for one example; None where
    inputs are used as they are.
    """
    if not run.metadata["mean"]:
        return None
    shape = (-1, *(1,) * (len(run.metadata["shape"]) - 1))
    return torch.tensor(run.metadata["mean"], dtype=dtype).reshape(shape), torch.tensor(
        run.metadata["std"], dtype=dtype
    ).reshape(shape)


@torch.no_grad()
def evaluate(
    run: Run,
    source: ArrayDataset | None = None,
    module: nn.Module | None = None,
    client: int | None = None,
) -> dict[str, Any]:
    """The run's model on a test set: its own, or another with the same classes; inputs are
    normalized as in training.
    """
    if source is None:
        source = load_data(run.config)
    if list(source.shape) != run.metadata["shape"] or len(source.classes) != len(
        run.metadata["class_names"]
    ):
        raise InputError(
            f"the model of {run.folder} was trained on examples of shape"
            f" {run.metadata['shape']} with {len(run.metadata['class_names'])} classes,"
            f" but {source.name} has shape {list(source.shape)} and {len(source.classes)}"
            " classes: evaluate on data of the same kind"
        )
    model = load_model(run, module, client)
    dtype = next(model.parameters()).dtype
    scaling = normalization_stats(run, dtype)
    classes, loss = len(source.classes), 0.0
    confusion = np.zeros((classes, classes), dtype=np.int64)
    for first in range(0, len(source.test), 500):
        x = torch.from_numpy(np.array(source.test.x[first : first + 500]))
        y = torch.from_numpy(np.array(source.test.y[first : first + 500]))
        x = (
            (x.to(dtype) - scaling[0]) / scaling[1]
            if scaling
            else (x if x.dtype == torch.int64 else x.to(dtype))
        )
        logits = model(x)
        loss += float(cross_entropy(logits, y, reduction="sum"))
        np.add.at(confusion, (y.numpy(), logits.argmax(dim=1).numpy()), 1)
    whose = "global model" if client is None else f"model of client {client}"
    evaluated = (
        f"{whose} after round {run.metrics[-1]['round']} on the {len(source.test)} test"
        f" examples of {source.name}"
    )
    return {"evaluated": evaluated, **summarize(confusion, loss)}


def export(
    run: Run,
    out: Path,
    kind: str = "safetensors",
    module: nn.Module | None = None,
    client: int | None = None,
) -> list[Path]:
    """Write the model, and beside it a JSON file with what a user of it must know."""
    if kind not in FORMATS:
        raise InputError(f"unknown format {kind!r}: known: {', '.join(FORMATS)}")
    model = load_model(run, module, client)
    out.mkdir(parents=True, exist_ok=True)
    suffix = {"safetensors": "safetensors", "torchscript": "pt", "onnx": "onnx"}[kind]
    path = out / f"model.{suffix}"
    about = {
        name: run.metadata[name]
        for name in ("class_names", "shape", "mean", "std", "remanence", "parameters")
    }
    about |= {
        "model": run.config.model,
        "method": run.config.method,
        "inputs": "(raw - mean) / std, a channel or column at a time; raw pixels are 0 to 255",
    }
    dtype = next(model.parameters()).dtype
    example = torch.zeros(
        2, *run.metadata["shape"], dtype=torch.int64 if run.metadata["kind"] == "tokens" else dtype
    )
    try:
        if kind == "safetensors":
            save_file(
                {name: value.contiguous().clone() for name, value in model.state_dict().items()},
                path,
            )
        elif kind == "torchscript":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                traced = torch.jit.trace(model, example)  # type: ignore[no-untyped-call]
                torch.jit.save(traced, str(path))
        else:
            _export_onnx(model, example, path)
    except InputError:
        raise
    except Exception as error:
        path.unlink(missing_ok=True)
        raise InputError(
            f"this model cannot be written as {kind} ({type(error).__name__}:"
            f" {str(error).splitlines()[0]}): use safetensors"
        ) from error
    described = out / "model.json"
    described.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return [path, described]


def _export_onnx(model: nn.Module, example: torch.Tensor, path: Path) -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise InputError(
            "writing ONNX needs two more packages: pip install 'remanence[onnx]'"
        ) from None
    batch = torch.export.Dim("batch")
    torch.onnx.export(
        model,
        (example,),
        str(path),
        dynamo=True,
        dynamic_shapes=({0: batch},),
        input_names=["x"],
        output_names=["logits"],
        verbose=False,
    )
