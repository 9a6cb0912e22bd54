"""Readers read a file or an expression, or reject it with an error message, within bounded memory
and time, whatever it contains.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from trust.bad_replies import expect_small, spoil_reply
from trust.faults import SCALE, record_trial
from trust.good_files import FILES, TEXTS
from trust.mutations import bounded, spoil, spoil_text

from remanence.core import pytree
from remanence.core.errors import RemanenceError
from remanence.training.gate import UNKNOWN_CLIENT, validate_replies

SHARE = SCALE.inputs // SCALE.parts
WORDY = {
    "metrics.jsonl",
    "experiment.toml and compare.toml of a folder",
    "experiment TOML",
    "drift tables",
    "LEAF JSON",
}  # spoiled as text half of the time


def assert_one_sentence(error: RemanenceError) -> None:
    text = str(error)
    assert text, f"{type(error).__name__} says nothing"
    assert len(text) < 5000
    assert isinstance(error, RemanenceError)


@pytest.mark.parametrize("part", range(SCALE.parts))
@pytest.mark.parametrize("reader", FILES)
def test_spoiled_files(tmp_path: Path, reader: str, part: int) -> None:
    case = FILES[reader]
    paths = case.write(tmp_path)
    good = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    case.read(tmp_path, -1)  # good files are read
    refused = 0
    with bounded() as limit:
        for number in range(part * SHARE, (part + 1) * SHARE):
            path = paths[number % len(paths)]
            as_text = reader in WORDY and path.name != "manifest.json" and number % 2
            spoiled = (
                spoil_text(good[path].decode(), number).encode("utf-8", "surrogatepass")
                if as_text
                else spoil(good[path], number)
            )
            path.write_bytes(spoiled)
            case.mend(path)
            limit()
            try:
                case.read(tmp_path, number)
            except RemanenceError as error:
                assert_one_sentence(error)
                refused += 1
            except Exception as crash:
                raise AssertionError(
                    f"{reader}: input {number}, spoiled {path.name}, ended in"
                    f" {type(crash).__name__}: {crash}"
                ) from crash
            for other, content in good.items():  # changed by mending
                if other == path or other.name == "manifest.json":
                    other.write_bytes(content)
    assert refused > SHARE / 20
    record_trial(reader, "no crash", SHARE)


@pytest.mark.parametrize("reader", TEXTS)
def test_spoiled_expressions(reader: str) -> None:
    cases, refused = TEXTS[reader], 0
    for text, read in cases:
        read(text)  # the good ones are read
    with bounded() as limit:
        for number in range(SCALE.inputs):
            text, read = cases[number % len(cases)]
            spoiled = spoil_text(text, number)
            limit()
            try:
                read(spoiled)
            except RemanenceError as error:
                assert_one_sentence(error)
                refused += 1
            except Exception as crash:
                raise AssertionError(
                    f"{reader}: input {number}, {spoiled!r:.200}, ended in"
                    f" {type(crash).__name__}: {crash}"
                ) from crash
    assert refused > SCALE.inputs / 4
    record_trial(reader, "no crash", SCALE.inputs)


def test_spoiled_replies() -> None:
    """The gate rejects a reply or accepts it; accepted replies are finite, have the right format
    and are in the order of the cohort.
    """
    expected, refused = expect_small(), 0
    with bounded() as limit:
        for number in range(SCALE.inputs):
            limit()
            chunks = spoil_reply(number)
            replies, refusals = validate_replies(chunks, expected)
            refused += len(refusals)
            assert all(
                refusal.code and refusal.reason and isinstance(refusal.client, int)
                for refusal in refusals
            )
            assert all(refusal.client >= UNKNOWN_CLIENT or refusal.code for refusal in refusals)
            if replies is None:
                continue
            clients = replies.client.tolist()
            assert clients == sorted(set(clients))
            assert set(clients) <= set(expected.clients)
            assert list(replies.params) == list(expected.params) or set(replies.params) == set(
                expected.params
            )
            for tree, form in (
                (replies.params, expected.params),
                (replies.buffers, expected.buffers),
                (replies.payload, expected.payload),
            ):
                flat, wanted = pytree.flatten(tree), pytree.flatten(form)
                assert {name: (tuple(x.shape[1:]), x.dtype) for name, x in flat.items()} == {
                    name: (tuple(x.shape), x.dtype) for name, x in wanted.items()
                }
                assert all(
                    bool(torch.isfinite(x).all()) for x in flat.values() if x.is_floating_point()
                )
            assert bool(((replies.weight > 0) & (replies.weight <= expected.weight_cap)).all())
    assert refused > SCALE.inputs / 2
    record_trial(
        "replies at the gate",
        "no crash; what passed was finite and of the right form",
        SCALE.inputs,
    )
