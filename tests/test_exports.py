"""Evaluation of a trained model, and export: the same numbers in every format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import remanence as rem
from remanence.exports import evaluate, export

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("export") / "run"
    return rem.run(
        data="digits", model="cnn", rounds=2, clients=4, engine="sequential", quiet=True, out=folder
    )


def test_evaluate_gives_the_number_of_the_run(run: rem.RunResult) -> None:
    result = evaluate(run)
    # the line before the last is the test split
    assert result["accuracy"] == pytest.approx(run.metrics[-2]["accuracy"], abs=1e-9)
    assert run.metrics[-2]["split"] == "test"
    assert result["loss"] == pytest.approx(run.metrics[-2]["loss"], rel=1e-5)
    assert "round 2" in result["evaluated"]
    assert "359 test examples of digits" in result["evaluated"]


def test_evaluate_on_data_of_another_shape_is_refused(run: rem.RunResult) -> None:
    from remanence.data import load_dataset

    with pytest.raises(rem.InputError, match="same kind"):
        evaluate(run, load_dataset("synthetic", {"samples": 100}, None))


def test_safetensors_with_a_description(run: rem.RunResult, tmp_path: Path) -> None:
    path, about = export(run, tmp_path)
    tensors = load_file(path)
    assert {name: tuple(value.shape) for name, value in tensors.items()} == {
        name: tuple(p.shape) for name, p in run.model().named_parameters()
    }
    description = json.loads(about.read_text())
    assert description["class_names"] == [str(digit) for digit in range(10)]
    assert len(description["mean"]) == len(description["std"]) == 1


def test_torchscript_gives_the_same_logits(run: rem.RunResult, tmp_path: Path) -> None:
    path, _ = export(run, tmp_path, "torchscript")
    x = torch.linspace(-1, 1, 5 * 64).reshape(5, 1, 8, 8)
    torch.testing.assert_close(torch.jit.load(str(path))(x), run.model()(x))


def test_onnx_gives_the_same_logits(run: rem.RunResult, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="the extra onnx is not installed")
    reference = pytest.importorskip("onnx.reference", reason="the extra onnx is not installed")
    path, _ = export(run, tmp_path, "onnx")
    x = torch.linspace(-1, 1, 5 * 64).reshape(5, 1, 8, 8)
    (logits,) = reference.ReferenceEvaluator(str(path)).run(None, {"x": x.numpy()})
    torch.testing.assert_close(
        torch.from_numpy(logits), run.model()(x).detach(), atol=1e-4, rtol=1e-4
    )


def test_an_unknown_format_is_refused(run: rem.RunResult, tmp_path: Path) -> None:
    with pytest.raises(rem.InputError, match="known: safetensors, torchscript, onnx"):
        export(run, tmp_path / "x", "pickle")
    assert not (tmp_path / "x").exists()


def test_the_round_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    run = rem.run(
        data="synthetic(samples=200, classes=2, features=3)",
        model="mlp(hidden=4)",
        clients=2,
        rounds=2,
        engine="sequential",
        set={"checkpoint.seconds": 0},
        out=tmp_path / "run",
        quiet=True,
    )
    assert "after round 2 on" in evaluate(run)["evaluated"]
    shutil.rmtree(run.checkpoints / "round-0000002")
    assert "after round 1 on" in evaluate(rem.load(run.folder))["evaluated"]
