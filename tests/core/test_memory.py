from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from remanence.core import memory
from remanence.core.errors import InputError
from remanence.core.memory import check_memory, json_bytes, limit_memory, memory_limit

GIB = 1 << 30


@pytest.fixture(autouse=True)
def machine_of_8_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "machine_memory", lambda: 8 * GIB)
    monkeypatch.delenv("REMANENCE_MAX_BYTES", raising=False)


def test_the_setting_wins_then_the_variable_then_a_share_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert memory_limit() == 6 * GIB
    monkeypatch.setenv("REMANENCE_MAX_BYTES", "2e9")
    assert memory_limit() == 2_000_000_000
    with limit_memory(5e8):
        assert memory_limit() == 500_000_000
    with limit_memory(0):
        assert memory_limit() == 2_000_000_000


def test_no_setting_allows_more_than_the_machine_has() -> None:
    with limit_memory(1e30):
        assert memory_limit() == 8 * GIB
        with pytest.raises(
            InputError, match=r"takes 9\.0 GiB .* this machine allows 8\.0 GiB: use a"
        ):
            check_memory("big.npz", {"the arrays": 9 * GIB})


def test_the_message_names_the_thing_the_largest_part_the_limit_and_the_cure() -> None:
    with limit_memory(2e9), pytest.raises(InputError) as raised:
        check_memory("a.npz", {"the arrays": GIB, "a copy": 2 * GIB}, "give less")
    assert str(raised.value) == (
        "reading a.npz takes 3.0 GiB of memory, 2.0 GiB of it for a copy, and data.max_bytes allows"
        " 1.9 GiB: give less or raise data.max_bytes, such as data.max_bytes=3.3e+09"
    )
    with pytest.raises(InputError, match=r"three quarters of memory, is 6\.0 GiB: raise REMAN"):
        check_memory("ledger.bin", {"its content": 7 * GIB})


def test_a_sum_at_the_limit_is_accepted() -> None:
    check_memory("a.npz", {"one half": 3 * GIB, "the other": 3 * GIB})


@pytest.mark.parametrize("text", ["many", "-1", "nan", "inf"])
def test_a_variable_that_is_no_number_of_bytes_is_named(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("REMANENCE_MAX_BYTES", text)
    with pytest.raises(InputError, match=r"REMANENCE_MAX_BYTES is .* write a number of bytes"):
        memory_limit()


def test_the_memory_of_a_container_is_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "memory.max"
    meminfo.write_text("MemTotal:  4096 kB\nMemFree:  1 kB\nSwapTotal:  1024 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", str(meminfo))
    monkeypatch.setattr(memory, "_CGROUPS", (str(cgroup), str(tmp_path / "absent")))
    measure = memory._installed_memory.__wrapped__
    cgroup.write_text("max\n")
    assert measure() == 5120 << 10
    cgroup.write_text("1000000\n")
    assert measure() == 1_000_000


@pytest.mark.parametrize(
    "value",
    ["[]", "{}", '{"a":1}', '{"a":{}}', "[0]", "0.125", '"ab"', "[[],[]]", "1234567890", '"é"'],
)
def test_json_takes_at_most_what_is_stated(value: str) -> None:
    text = "[" + ",".join([value] * 20_000) + "]"
    tracemalloc.start()
    try:
        parsed = json.loads(text)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(parsed) == 20_000
    assert taken <= json_bytes(text)
