"""Random attacks on the messages between coordinator and sites: a site never raises, trains nothing
twice and keeps its clients' states; a coordinator uses only what a correct site sends for this
message, and its final model is that of the honest replies.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import TIMEOUTS, Harness, count_lines, lean, wait_until
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from message_attacks import (
    REPLY_ATTACKS,
    ROUNDS,
    SITE_ATTACKS,
    CoordinatorLab,
    SiteLab,
    Step,
    attack_site,
    check_response,
    federation_config,
)
from run_states import assert_equals_sequential, last_state
from trust.faults import SCALE, record_trial
from trust.mutations import spoil

from remanence.engines.sequential import SequentialEngine
from remanence.experiment.build import build
from remanence.flower.daemon_client import call_daemon
from remanence.flower.settings import read_site
from remanence.flower.wire import WireError, from_bytes, to_bytes
from remanence.results.run import Run
from remanence.testing.toy_task import max_rel_diff, run_rounds

TO_SITE = "messages to a site are attacked at random"
TO_COORDINATOR = "responses to a coordinator are attacked at random"
REAL = "messages to the sites of a real federation are attacked"
EACH = 2000 // SCALE.parts if SCALE.parts > 1 else 100  # sequences in a test
steps = st.lists(
    st.tuples(st.integers(0, 2**10), st.integers(0, 2**16)), min_size=1, max_size=2 * ROUNDS
)


def many(part: int) -> Any:
    """Run a test with sequences of its own, the same in every run."""

    def decorate(function: Any) -> Any:
        limits = settings(
            max_examples=EACH,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        return seed(part)(limits(given(steps)(function)))

    return decorate


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here depends on what a disk keeps when the power fails."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def site_lab(tmp_path_factory: pytest.TempPathFactory) -> SiteLab:
    return SiteLab(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def coordinator_lab(tmp_path_factory: pytest.TempPathFactory) -> CoordinatorLab:
    return CoordinatorLab(tmp_path_factory.mktemp("coordinator"))


@pytest.mark.parametrize("part", range(SCALE.parts))
def test_a_site_after_random_messages(site_lab: SiteLab, part: int) -> None:
    @many(part)
    def attacked(sequence: list[Step]) -> None:
        log: list[str] = []
        try:
            attack_site(site_lab, sequence, log)
        except AssertionError as failure:
            raise AssertionError(f"{failure}, after: {'; '.join(log)}") from failure

    attacked()
    record_trial(TO_SITE, "declined or answered as declared; honest replies unchanged", EACH)


@pytest.mark.parametrize("attack", SITE_ATTACKS, ids=lambda attack: attack.__name__)
def test_every_attack_on_a_site_by_itself(site_lab: SiteLab, attack: Any) -> None:
    """After each honest message."""
    number = SITE_ATTACKS.index(attack)
    for trial in range(10):
        attack_site(site_lab, [(number, trial * 100 + k) for k in range(5)], [])


def test_a_damaged_message_is_no_message(site_lab: SiteLab) -> None:
    """Flipped and cut bytes, and another version of the protocol, end in a WireError."""
    for number, message in enumerate(site_lab.sent):
        content = to_bytes(message)
        for trial in range(50):
            try:
                from_bytes(spoil(content, 1000 * number + trial))
            except WireError:
                continue
        other = content.replace(b'\\"remanence\\": 1', b'\\"remanence\\": 2')
        assert other != content
        with pytest.raises(WireError, match="uses protocol version 2 and this one 1"):
            from_bytes(other)


def without_attacked(run: Run) -> tuple[bool, ...]:
    """By round: whether the replies of the attacked site were used."""
    lines = [line for line in run.metrics if line["split"] == "test"]
    assert [line["round"] for line in lines] == list(range(1, ROUNDS + 1))
    used = []
    for line in lines:
        rejected = {entry["client"] for entry in line["rejected"]}
        assert rejected <= {2, 3}, f"honest clients are rejected: {line['rejected']}"
        assert all(entry["code"] and entry["reason"] for entry in line["rejected"])
        assert line["replies"] + len(rejected) in (4, 6)
        assert rejected in (set(), {2, 3}), "one of the two clients of a response is rejected"
        used.append(line["replies"] == 6)
    return tuple(used)


def honest_model(lab: CoordinatorLab, used: tuple[bool, ...]) -> Any:
    """The model and server state where the site was away in the rounds of its bad replies."""
    if used not in lab.models:
        experiment = build(federation_config().model_copy(update={"engine": "sequential"}))
        away = np.array([True, True, False, False, True, True])
        reference = replace(
            experiment,
            availability=lambda clients, total, round, key: (away | used[round - 1])[clients],
        )
        state, _ = run_rounds(reference, SequentialEngine(reference.task), ROUNDS)
        lab.models[used] = state.server
    return lab.models[used]


def check_coordinator(lab: CoordinatorLab, sequence: list[Step]) -> None:
    run, transport = lab.run(sequence)
    used = without_attacked(run)
    accepted = [round for round in transport.hit if used[round - 1]]
    assert not accepted, f"round {accepted[0]}: {transport.hit[accepted[0]]} is accepted"
    honest = [r for r in range(1, ROUNDS + 1) if r not in transport.hit and not used[r - 1]]
    assert not honest, f"round {honest}: an honest reply is rejected"
    model, wanted = last_state(run).server, honest_model(lab, used)
    for own, other in (
        (model.model._asdict(), wanted.model._asdict()),
        (model.state, wanted.state),
    ):
        place, distance = max_rel_diff(own, other)
        assert distance <= 1e-10, f"{place} differs by {distance:.1e}"


@pytest.mark.parametrize("part", range(SCALE.parts))
def test_a_coordinator_after_random_responses(coordinator_lab: CoordinatorLab, part: int) -> None:
    @many(part)
    def attacked(sequence: list[Step]) -> None:
        check_coordinator(coordinator_lab, sequence)

    attacked()
    record_trial(TO_COORDINATOR, "rejected with a code; the model of the honest replies", EACH)


@pytest.mark.parametrize("attack", REPLY_ATTACKS, ids=lambda attack: attack.__name__)
def test_every_attack_on_a_coordinator_by_itself(
    coordinator_lab: CoordinatorLab, attack: Any
) -> None:
    """In every response of the site."""
    number = REPLY_ATTACKS.index(attack)
    while number % 3 == 0:
        number += len(REPLY_ATTACKS)
    for trial in range(3):
        check_coordinator(coordinator_lab, [(number, trial * 100 + k) for k in range(2 * ROUNDS)])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.xdist_group("flower")
def test_a_real_federation_under_attack(
    harness: Harness, site_lab: SiteLab, tmp_path: Path
) -> None:
    """Attacks reach the daemons of the sites between the coordinator's messages."""
    config = lean("scaffold", 5, **{"clients.sample": 6})
    app = harness.prepare({"experiment": config})
    running = harness.federation.run(app, TIMEOUTS, name="attacked")
    out = harness.out(app)
    sites = [read_site(path) for path in harness.sites.values()]
    attacks = 0
    for round in (1, 2, 3):
        wait_until(lambda round=round: count_lines(out / "metrics.jsonl") >= round, 200, "a round")
        name = Run(out).metadata["federation"]
        for number in range(20):
            draw = random.Random(100 * round + number)
            function = SITE_ATTACKS[number % len(SITE_ATTACKS)]
            site = sites[number % len(sites)]
            message = function(draw.choice(site_lab.sent), draw, site_lab)
            header = dict(message.header)
            if header.get("kind") == "train" and "experiment" in header:  # with this run's name
                header |= {"run": name, "experiment": header["experiment"] | {"seed": 9}}
            message = message._replace(header=header)
            check_response(message, call_daemon(site, message))
            attacks += 1
    running.wait(300)
    assert_equals_sequential(Run(out), config, tmp_path, 1e-10)
    record_trial(REAL, "declined; the model of one machine", attacks)
