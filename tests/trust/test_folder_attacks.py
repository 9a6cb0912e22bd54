"""A run folder after random attacks: every command ends with the unbroken run's numbers, or refuses
with a sentence that names a file. It never hangs, shows a traceback or touches a file outside.
"""

from __future__ import annotations

import os
import shutil
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from trust.faults import SCALE, record_trial
from trust.folder_attacks import ATTACKS, COMMANDS, Lab, Step, check, files_of, play, run_command

FAULT = "a run folder is attacked at random"
EACH = 2000 // SCALE.parts if SCALE.parts > 1 else 100  # sequences in a test

numbers = st.integers(0, 2**16)
# a kill takes half a second, everything else milliseconds
names = st.sampled_from([name for name in ATTACKS if name != "kill" for _ in range(3)] + ["kill"])
# the last number chooses a command; most steps have none, but the last one of a sequence has
steps = st.tuples(names, numbers, numbers, st.integers(0, 4 * len(COMMANDS) - 1))


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here depends on what a disk keeps when the power fails."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("lab"))


@pytest.mark.parametrize("part", range(SCALE.parts))
def test_a_run_folder_after_random_attacks(lab: Lab, part: int) -> None:
    @seed(part)
    @settings(
        max_examples=EACH,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 1), st.lists(steps, min_size=1, max_size=4))
    def attacked(base: int, sequence: list[Step]) -> None:
        history = []
        try:
            for event in play(lab, base, sequence):
                history.append(event)
        except AssertionError as failure:
            raise AssertionError(f"{failure}, after: {'; '.join(history)}") from failure

    attacked()
    record_trial(FAULT, "the unbroken run's numbers, or refused", EACH)


def test_without_an_attack_every_command_ends_with_the_unbroken_numbers(lab: Lab) -> None:
    """The property is not empty: nothing is refused, and all results are compared."""
    for base, folder in enumerate(lab.bases):
        size = files_of(folder)[0].stat().st_size
        for command in range(len(COMMANDS)):
            events = list(play(lab, base, [("truncate", 0, size, command)]))
            assert events[-1] == "the unbroken run's result", (base, events)


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_results_are_found(lab: Lab, command: str) -> None:
    """The numbers of a complete run with another seed are not those of the unbroken one."""
    run = lab.home / "wrong" / command
    shutil.copytree(lab.outside, run)
    outcome = run_command(command, run)
    assert outcome.code == 0
    own = mock.patch.object(Lab, "expected", lambda self, config: self.unbroken)
    with own, pytest.raises(AssertionError):
        check(outcome, run, lab)
