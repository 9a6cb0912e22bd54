"""Use of a trained model after the run: evaluation on other data, and export to files."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save
from torch import nn
from torch.nn.functional import cross_entropy

from remanence.core.errors import InputError, SkippedCheckpoint
from remanence.core.files import make_folder, translate_disk_errors, write_atomically
from remanence.core.model_outputs import logits_of
from remanence.core.safe_path import SafePath
from remanence.data.dataset import ArrayDataset, statistics_shape
from remanence.experiment.data_setup import load_data
from remanence.reports.trackers import TRACKERS, export_scalars
from remanence.results.manifest import LoadedCheckpoint
from remanence.results.run import Comparison, Run
from remanence.results.summary import summarize
from remanence.results.trained_model import load_model

SUFFIXES = {"safetensors": "safetensors", "torchscript": "pt", "onnx": "onnx"}
FORMATS = tuple(SUFFIXES)  # of models; TRACKERS are the formats of metrics
BATCH = 500  # examples


class ModelEvaluation(dict[str, Any]):
    """The numbers of an evaluation, by name; shown as text.

    Args:
        numbers: What `evaluate` lists.
        classes: Names of the classes.
        warnings: Why the numbers are not what they seem.
    """

    def __init__(self, numbers: Mapping[str, Any], classes: Sequence[str], warnings: Sequence[str]):
        super().__init__(numbers)
        self.classes, self.warnings = list(classes), list(warnings)

    def __str__(self) -> str:
        lines = [f"Warning: the run {text}" for text in self.warnings]
        lines.append(
            f"{self['evaluated']}: accuracy {_percent(self['accuracy'])}, loss"
            f" {_loss(self['loss'])}, macro F1 {_percent(self['macro_f1'])}"
        )
        shares = zip(self.classes, self["per_class"], strict=True)
        return "\n".join([*lines, *(f"  {name:20s} {_percent(share)}" for name, share in shares)])

    __repr__ = __str__


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}%"


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def normalization_stats(run: Run, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the mean and standard deviation of the training data in raw units, in a shape that
    broadcasts over one example; None where inputs are not normalized.
    """
    if not run.metadata["mean"]:
        return None
    shape = statistics_shape(tuple(run.metadata["shape"]))
    return torch.tensor(run.metadata["mean"], dtype=dtype).reshape(shape), torch.tensor(
        run.metadata["std"], dtype=dtype
    ).reshape(shape)


def load_test_data(
    run: Run | Comparison, name: str | None = None, directory: str | None = None
) -> ArrayDataset:
    """Load a dataset to evaluate a run on.

    Args:
        run: The run.
        name: The dataset, as written in `data.name`. Default: that of the run.
        directory: The folder of the datasets. Default: that of the run.
    """
    single = _single_run(run)
    config = single.config
    changes = {
        key: value for key, value in (("name", name), ("dir", directory)) if value is not None
    }
    changed = config.model_copy(update={"data": config.data.model_copy(update=changes)})
    if name is not None:
        return load_data(changed)
    with single.settings_named():
        return load_data(changed)


@torch.no_grad()
def evaluate(
    run: Run | Comparison,
    source: ArrayDataset | None = None,
    module: nn.Module | None = None,
    client: int | None = None,
) -> ModelEvaluation:
    """Evaluate the model of a run on a test set, with inputs normalized as in training.

    Args:
        run: The run.
        source: A dataset with the same classes. Default: that of the run.
        module: The network, where the run was trained with a module object.
        client: Evaluate the personal model of this client, not the global model.

    Returns:
        `evaluated`, a description of the model and the data; `round` and `skipped`: the checkpoint
        that was read, and a sentence for each newer one that cannot be used; and the values of
        `results.summary.summarize`: accuracy, loss, macro F1 and accuracy by class.
    """
    run = _single_run(run)
    if source is None:
        source = load_test_data(run)
    _check_same_kind(run, source)
    model, checkpoint = load_model(run, module, client)
    dtype = next(model.parameters()).dtype
    stats = normalization_stats(run, dtype)
    classes, loss = len(source.classes), 0.0
    confusion = np.zeros((classes, classes), dtype=np.int64)
    for first in range(0, len(source.test), BATCH):
        x = torch.from_numpy(np.array(source.test.x[first : first + BATCH]))
        y = torch.from_numpy(np.array(source.test.y[first : first + BATCH]))
        if stats:
            x = (x.to(dtype) - stats[0]) / stats[1]
        elif x.dtype != torch.int64:  # tokens stay integers
            x = x.to(dtype)
        logits = logits_of(model(x))
        loss += float(cross_entropy(logits, y, reduction="sum"))
        np.add.at(confusion, (y.numpy(), logits.argmax(dim=1).numpy()), 1)
    evaluated = (
        f"{'global model' if client is None else f'model of client {client}'} after round"
        f" {checkpoint.round} on the {len(source.test)} test examples of {source.name}"
    )
    numbers = describe_checkpoint(checkpoint) | summarize(confusion, loss)
    return ModelEvaluation({"evaluated": evaluated} | numbers, source.classes, run.warnings)


def describe_checkpoint(checkpoint: LoadedCheckpoint) -> dict[str, Any]:
    """The checkpoint that was read, as entries of a result."""
    return {"round": checkpoint.round, "skipped": list(checkpoint.skipped)}


def export(
    run: Run | Comparison,
    out: Path | None = None,
    kind: str = "safetensors",
    module: nn.Module | None = None,
    client: int | None = None,
) -> list[Path]:
    """Write the model of a run with a JSON file that describes its inputs, or the metrics of a run
    or a comparison for a tracker.

    Args:
        run: The run; for a tracker it may be a comparison.
        out: The output folder. Default: `export` in the folder of the run.
        kind: `safetensors`, `torchscript` or `onnx` for the model, `tensorboard` or `mlflow` for
            the metrics.
        module: The network, where the run was trained with a module object.
        client: Export the personal model of this client, not the global model.

    Returns:
        The files that were written.
    """
    if kind in TRACKERS:
        return export_scalars([run], out or run.files / "export" / kind, kind)
    exported = export_model(run, out, kind, module, client)
    exported.warn(stacklevel=3)
    return exported.files


class ExportedModel(NamedTuple):
    """Files that were written, and the checkpoint that the model was read from, if any."""

    files: list[Path]
    checkpoint: LoadedCheckpoint | None

    def warn(self, stacklevel: int) -> None:
        """Warn where the model is not from the newest checkpoint."""
        if self.checkpoint is not None and self.checkpoint.skipped:
            warnings.warn(self.checkpoint.describe(), SkippedCheckpoint, stacklevel=stacklevel)


def export_model(
    run: Run | Comparison,
    out: Path | None = None,
    kind: str = "safetensors",
    module: nn.Module | None = None,
    client: int | None = None,
) -> ExportedModel:
    """Write the model of a run; the arguments are those of `export`."""
    if kind not in FORMATS:
        raise InputError(f"unknown format {kind!r}: known: {', '.join((*FORMATS, *TRACKERS))}")
    run = _single_run(run)
    folder = run.files / "export" if out is None else SafePath(out)
    model, checkpoint = load_model(run, module, client)
    make_folder(folder)
    try:
        files = _render_model(model, _example(run, model), kind)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"this model cannot be written as {kind} ({type(error).__name__}:"
            f" {str(error).splitlines()[0]}): use safetensors"
        ) from error
    description = _describe_model(run) | describe_checkpoint(checkpoint)
    files["model.json"] = (json.dumps(description, indent=2) + "\n").encode()
    with translate_disk_errors(folder):
        for name, content in files.items():
            write_atomically(folder / name, content)
    model_file = f"model.{SUFFIXES[kind]}"
    return ExportedModel([(folder / name).path for name in (model_file, "model.json")], checkpoint)


def _single_run(run: Run | Comparison) -> Run:
    if isinstance(run, Run):
        return run
    example = run.runs[0].folder if run.runs else run.folder / "runs"
    raise InputError(f"{run.folder} is a comparison: give one of its runs, such as {example}")


def _check_same_kind(run: Run, source: ArrayDataset) -> None:
    shape, classes = run.metadata["shape"], len(run.metadata["class_names"])
    if list(source.shape) != shape or len(source.classes) != classes:
        raise InputError(
            f"the model of {run.folder} was trained on examples of shape {shape} with {classes}"
            f" classes, but {source.name} has shape {list(source.shape)} and"
            f" {len(source.classes)} classes: evaluate on data of the same kind"
        )


def _example(run: Run, model: nn.Module) -> torch.Tensor:
    """Two inputs of zeros, to trace the model with."""
    tokens = run.metadata["kind"] == "tokens"
    dtype = torch.int64 if tokens else next(model.parameters()).dtype
    return torch.zeros(2, *run.metadata["shape"], dtype=dtype)


def _describe_model(run: Run) -> dict[str, Any]:
    names = ("class_names", "shape", "mean", "std", "remanence", "parameters")
    return {name: run.metadata[name] for name in names} | {
        "model": run.config.model,
        "method": run.config.method,
        "inputs": "(raw - mean) / std, by channel or column; raw pixels are 0 to 255",
    }


def _render_model(model: nn.Module, example: torch.Tensor, kind: str) -> dict[str, bytes]:
    """The files of a model, by name."""
    name = f"model.{SUFFIXES[kind]}"
    if kind == "safetensors":
        tensors = model.state_dict()
        return {name: save({key: value.contiguous().clone() for key, value in tensors.items()})}
    with tempfile.TemporaryDirectory(prefix="remanence-") as folder:
        # these writers take paths, and may write more than one file
        if kind == "torchscript":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                traced = torch.jit.trace(model, example)  # type: ignore[no-untyped-call]
                torch.jit.save(traced, f"{folder}/{name}")
        else:
            _write_onnx(model, example, Path(folder) / name)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def _write_onnx(model: nn.Module, example: torch.Tensor, path: Path) -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise InputError(
            "writing ONNX needs two more packages: pip install 'remanence-fl[onnx]'"
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


__all__ = ["FORMATS", "TRACKERS", "evaluate", "export", "load_test_data", "normalization_stats"]
