"""The GPU suite: it covers every part and slot, its cases hold on a CPU, and a case that fails stops
no other.
"""

from __future__ import annotations

import os
from dataclasses import fields

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined

import pytest
import torch
from gpu.cases import all_cases, counted, difference
from gpu.compiled_cases import COMPILED, STEP_SLOTS
from gpu.suite import NO_GPU, main, run_case

from remanence.core.slots import Part
from remanence.methods import METHODS, PARTS
from remanence.testing.toy_task import as_method, fast_config

CASES = {case.name: case for case in all_cases()}
# One of each kind, the quick ones; the others are slow.
QUICK = (
    "part fedavg, captured",
    "part median, eager",
    "state under another name, compiled",
    "tensors are read before they are overwritten",
    "compiled lenet, scaffold+wsm",
    "drift, hast, captured",
    "four runs in one stack, captured",
    "out of memory by the engine's seam, captured",
    "resume, captured",
    "batch norm, channels last, training",
    "convolutions by streams, float64",
    "wide layers of a network with view, compiled",
    "kernels that fail outside the steps",
    "evaluation of a network with view, a padded last piece, eager",
)
# Fields of registered parts that no local step reads.
OUTSIDE_STEPS = {
    *("client_weights", "aggregate", "server_update", "server_train", "update_server_state"),
    *("server_state", "on_client_start", "on_client_end", "payload", "peers", "personalize"),
    *("model_assignment", "privatize_stats", "validate", "centralized", "name", "arguments"),
    *("static", "hyper", "discloses", "mechanisms", "addresses", "payload_description"),
    *("reads_label_counts", "needs_two_classes", "reads_inputs", "needs_public_data"),
    *("equal_weights", "counts_validation_labels"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CASES],
)
def test_cases_hold_on_a_cpu(name: str) -> None:
    if name.startswith(("Triton", "kernels")):
        pytest.importorskip("triton", reason="Triton is not installed")
    answer = run_case(CASES[name], "cpu")
    if "skipped" in answer:
        pytest.skip(answer["skipped"])
    assert "error" not in answer, answer["trace"]


def test_names_are_unique() -> None:
    assert len(all_cases()) == len(CASES)
    assert set(QUICK) <= CASES.keys()


@pytest.mark.parametrize("execution", ["eager", "captured"])
def test_every_part_has_a_case(execution: str) -> None:
    assert {f"part {name}, {execution}" for name in PARTS} <= CASES.keys()
    assert METHODS.keys() <= PARTS.keys()


def test_compiled_methods_fill_every_slot_that_steps_read() -> None:
    """And no registered part fills a slot of local steps that the list does not know."""

    def filled(parts: tuple[Part, ...]) -> set[str]:
        return {slot.name for part in parts for slot in fields(part) if getattr(part, slot.name)}

    compiled = {
        slot
        for methods in COMPILED.values()
        for method in methods
        for slot in filled(as_method(method).parts)
    }
    registered = {slot for name in PARTS for slot in filled(as_method(fast_config(name)).parts)}
    assert set(STEP_SLOTS) <= compiled
    assert registered - OUTSIDE_STEPS <= set(STEP_SLOTS)
    assert all(len(methods) == 6 for methods in COMPILED.values())


def test_a_difference_is_found() -> None:
    one, other = {"w": torch.tensor([1.0, 4.0])}, {"w": torch.tensor([1.0, 5.0])}
    assert difference(one, other, 0.2) == pytest.approx(0.2)
    with pytest.raises(AssertionError, match=r"the state differs .* by 2\.0e-01 at w, and 1e-09"):
        difference(one, other, what="the state")


def test_calls_are_counted() -> None:
    class Owner:
        @staticmethod
        def double(x: int) -> int:
            return 2 * x

    with counted(Owner, "double", lambda x: x + 1) as calls:
        assert Owner.double(3) == 6
    assert Owner.double(1) == 2
    assert calls == [4]


@pytest.mark.slow
def test_a_case_that_fails_stops_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(
        ["--device", "cpu", "--cases", "gpu.failing_cases", "--jobs", "1", "--limit", "10"]
    )
    lines = capsys.readouterr().out.splitlines()
    assert status == 1
    assert [line.split(" s ")[0].split()[0] for line in lines[:6]] == [
        "FAIL",
        "FAIL",
        "FAIL",
        "skip",
        "ok",
        "ok",
    ]
    assert lines[0].endswith("wrong: AssertionError: it differs from the reference")
    assert lines[1].endswith("dies: its process ended with code 7: a fault of the driver")
    assert lines[2].endswith("hangs: its process was ended after 10 s")
    assert lines[3].endswith("needs a GPU: it is about a GPU")
    assert lines[4].endswith("1.5e-11  prints")
    assert lines[-1].startswith("2 passed, 3 failed, 1 skipped in ")
    assert lines[-1].endswith("largest difference in float64 1.5e-11")


def test_cases_that_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--only", "read before they are"]) == 0
    line, _, last = capsys.readouterr().out.splitlines()
    assert line.startswith("ok")
    assert line.endswith("0.0e+00  tensors are read before they are overwritten")
    assert last.startswith("1 passed, 0 failed, 0 skipped in ")


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    written = capsys.readouterr()
    assert (written.out, written.err) == ("", f"{NO_GPU}\n")


def test_a_text_that_no_case_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--only", "no such case"]) == 2
    assert "no case has 'no such case' in its name" in capsys.readouterr().err


def test_names_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == list(CASES)
