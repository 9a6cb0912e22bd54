"""A run leaves the settings of the user's process as they were, however it ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import remanence as rem
from remanence.core import process_state
from remanence.core.errors import Stopped
from remanence.core.process_state import ProcessState, preserve_process_state
from remanence.engines.sequential import SequentialEngine

FLAGS: dict[str, Any] = {
    "data": "synthetic(samples=200, classes=3, features=4)",
    "clients": 4,
    "rounds": 2,
    "engine": "sequential",
    "model": "mlp(hidden=4)",
    "quiet": True,
}
MODEL = """
from torch import nn

def build(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0], classes))
"""


def settings() -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "matmul": torch.get_float32_matmul_precision(),
        "matmul_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "environment": dict(os.environ),
        "path": list(sys.path),
        "handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "generator": torch.get_rng_state().tolist(),
    }


def user_handler(number: int, frame: Any) -> None:
    raise AssertionError("the test sends no SIGTERM")


@pytest.fixture(autouse=True)
def unusual_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every setting differs from what the runs below ask for."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with preserve_process_state():
        torch.set_num_threads(2)
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
        torch.use_deterministic_algorithms(True, warn_only=True)
        signal.signal(signal.SIGTERM, user_handler)
        # the fixture's own context is the outermost one: runs must restore without it
        monkeypatch.setattr(process_state, "_nesting", process_state._Nesting(threading.Lock()))
        yield
        monkeypatch.undo()


def run_with_settings(out: Path, **flags: Any) -> rem.RunResult:
    changed = {"precision": "fp32", "deterministic": True, "threads": 1}
    return rem.run(out=out, set=changed, **(FLAGS | flags))


def test_after_a_run(tmp_path: Path) -> None:
    before = settings()
    run = run_with_settings(tmp_path / "run")
    assert run.config.threads == 1
    assert run.config.deterministic
    assert settings() == before


def test_the_run_itself_uses_its_own_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    train = SequentialEngine.train

    def watched(self: SequentialEngine, *arguments: Any) -> Any:
        seen.append(
            {
                "threads": torch.get_num_threads(),
                "matmul_tf32": torch.backends.cuda.matmul.allow_tf32,
                "cudnn_tf32": torch.backends.cudnn.allow_tf32,
                "benchmark": torch.backends.cudnn.benchmark,
                "deterministic": torch.are_deterministic_algorithms_enabled(),
                "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
                "cublas": os.environ["CUBLAS_WORKSPACE_CONFIG"],
                "sigterm": signal.getsignal(signal.SIGTERM),
            }
        )
        return train(self, *arguments)

    monkeypatch.setattr(SequentialEngine, "train", watched)
    run_with_settings(tmp_path / "run")
    assert len(seen) == FLAGS["rounds"]
    for inside in seen:
        assert (inside["threads"], inside["matmul_tf32"], inside["cudnn_tf32"]) == (1, False, False)
        assert (inside["deterministic"], inside["warn_only"]) == (True, False)
        assert (inside["benchmark"], inside["cublas"]) == (False, ":4096:8")
        assert inside["sigterm"] is not user_handler


@pytest.mark.parametrize("failure", [RuntimeError("broken"), KeyboardInterrupt()])
def test_after_an_error_or_an_interrupt_inside_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    def fail(self: SequentialEngine, *arguments: Any) -> Any:
        raise failure

    before = settings()
    with monkeypatch.context() as patched:
        patched.setattr(SequentialEngine, "train", fail)
        wanted = Stopped if isinstance(failure, KeyboardInterrupt) else RuntimeError
        with pytest.raises(wanted):
            run_with_settings(tmp_path / "run")
    assert settings() == before
    rem.resume(tmp_path / "run", quiet=True)
    assert settings() == before


def test_after_an_error_before_the_first_round(tmp_path: Path) -> None:
    before = settings()
    with pytest.raises(rem.InputError):
        run_with_settings(tmp_path / "run", model="nowhere.module:Class")
    assert settings() == before


def test_after_a_comparison_and_its_resumption(tmp_path: Path) -> None:
    before = settings()
    changed = {"deterministic": True, "threads": 1}
    comparison = rem.compare("fedavg; fedprox(mu=0.1)", out=tmp_path / "c", set=changed, **FLAGS)
    assert len(comparison.runs) == 2
    assert settings() == before
    rem.resume(tmp_path / "c", quiet=True)
    assert settings() == before


def test_a_model_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_network.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", ".")])
    before = settings()
    run = run_with_settings(tmp_path / "run", model="users_network:build")
    assert settings() == before
    sys.modules.pop("users_network")
    run.model()
    assert settings() == before


def test_precision_set_through_the_newer_interface_of_torch(tmp_path: Path) -> None:
    backends: Any = torch.backends
    backends.cuda.matmul.fp32_precision = "tf32"
    # torch now refuses to report cudnn.allow_tf32
    backends.cudnn.conv.fp32_precision, backends.cudnn.rnn.fp32_precision = "ieee", "tf32"
    before = ProcessState.capture()
    assert before.cudnn_tf32 is None
    run_with_settings(tmp_path / "run")
    assert ProcessState.capture() == before


def test_runs_of_several_threads_share_one_restoration() -> None:
    before, both, first_left = settings(), threading.Barrier(2), threading.Event()

    def change(name: str, leave: Callable[[], Any]) -> None:
        with preserve_process_state():
            os.environ[name] = "1"
            both.wait()
            leave()

    first = threading.Thread(target=change, args=("REMANENCE_TEST_A", lambda: None))
    second = threading.Thread(target=change, args=("REMANENCE_TEST_B", first_left.wait))
    first.start()
    second.start()
    first.join()
    assert os.environ["REMANENCE_TEST_B"] == "1"  # the other run still uses it
    first_left.set()
    second.join()
    assert settings() == before
