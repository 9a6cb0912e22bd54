"""Capturing a CUDA graph, with CUDA's functions replaced: the order of what happens around it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from remanence.kernels.capture import capture, garbage_collection_off


class FakeStream:
    def wait_stream(self, other: Any) -> None: ...


class FakeGraph:
    replays = 0

    def replay(self) -> None:
        FakeGraph.replays += 1


@contextlib.contextmanager
def nothing(*_: Any, **__: Any) -> Iterator[None]:
    yield


def test_nothing_is_collected_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph freed while another is captured would end the capture with an error."""
    for name, fake in (
        ("current_stream", FakeStream),
        ("Stream", FakeStream),
        ("stream", nothing),
        ("CUDAGraph", FakeGraph),
        ("graph", nothing),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    enabled: list[tuple[str, bool]] = []
    replay = capture(
        lambda: enabled.append(("warmup", gc.isenabled())),
        lambda: enabled.append(("capture", gc.isenabled())),
    )
    assert enabled == [("warmup", True), ("warmup", True), ("capture", False)]
    assert gc.isenabled()
    replay()
    assert FakeGraph.replays == 1


def test_the_collector_is_as_before_also_after_an_error() -> None:
    def fail() -> None:
        with garbage_collection_off():
            raise RuntimeError("capture failed")

    with pytest.raises(RuntimeError, match="capture failed"):
        fail()
    assert gc.isenabled()
    gc.disable()
    try:
        with garbage_collection_off():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
