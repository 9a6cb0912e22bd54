from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from diagnosis.small_runs import write_small_run
from reports.rich_runs import write_peers_run, write_server_run

from remanence.cli.main import app
from remanence.core import declarations
from remanence.diagnosis import diagnose, render_text
from remanence.diagnosis.recommendations import parts_addressing, parts_of
from remanence.diagnosis.wording import Finding
from remanence.results.run import Run


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    def make(name: str = "run", **options: Any) -> Run:
        return write_small_run(tmp_path / name, **options)

    return make


def find(topic: str, *runs: Run) -> Finding:
    return next(finding for finding in diagnose(runs)[0].findings if finding.topic == topic)


def test_local_training_loses_classes_that_clients_lack(make_run: Callable[..., Run]) -> None:
    """Before 0.8, 0.4; the clients' mean is (1.0 + 0.2) / 2 = 0.6 and (0.0 + 0.8) / 2 = 0.4; merged
    0.7, 0.6.

    Local: (0.2 + 0) / 2 = 0.1 lost; merging: (-0.1 - 0.2) / 2, so 0.15 gained. Client 0 lacks dogs
    and loses 0.4 of them, client 1 lacks cats and loses 0.6: 0.5 on average; of what they hold they
    gain 0.2 and 0.4: 0.3 on average.
    """
    run = make_run()
    lost = find("where it was lost", run)
    assert "local training loses 10.0 and aggregation gains 15.0" in lost.sentence
    assert "Most is lost in local training, above all of cat (20.0)" in lost.sentence
    assert "One seed is not enough to distinguish this from noise" in lost.sentence
    assert lost.evidence["worst_phase"] == "local"
    assert lost.evidence["phases"]["aggregation"]["mean"] == pytest.approx(-0.15)
    absent = find("absent classes", run)
    assert "loses 50.0 points; of one that it has, nothing: it gains 30.0." in absent.sentence
    assert absent.evidence["pairs_of_model_and_class"] == {"absent": 2, "present": 2}
    assert [recommendation.action for recommendation in absent.recommendations] == [
        "fedavg+wsm or fedavg+tce",
        "fedntd",
    ]
    assert "50.0 points" in absent.recommendations[0].reason


def test_what_a_run_already_uses_is_not_proposed(make_run: Callable[..., Run]) -> None:
    run = make_run(method="fedntd+wsm")
    assert find("absent classes", run).recommendations == ()


def test_without_absent_classes_nothing_is_said_about_them(make_run: Callable[..., Run]) -> None:
    """Both hold both classes, so absent and held cannot be compared, and the recommendation states that."""
    run = make_run(local={0: (4, 2), 1: (4, 2)}, merged=(8, 4), label_counts=((4, 4), (4, 4)))
    assert [finding.topic for finding in diagnose([run])[0].findings] == [
        "forgetting",
        "where it was lost",
        "clients",
    ]
    (recommendation,) = find("where it was lost", run).recommendations
    assert "which these runs do not show" in recommendation.reason


def test_clients_that_lose_what_they_hold(make_run: Callable[..., Run]) -> None:
    """Client 0 lacks dogs: it loses 0.6 of cats, which it holds, and 0.1 of dogs; client 1
    holds both and loses 0.4 and 0.1. Held: 1.1 / 3, absent: 0.1.
    """
    run = make_run(local={0: (2, 3), 1: (4, 3)}, merged=(8, 4), label_counts=((8, 0), (4, 4)))
    absent = find("absent classes", run)
    assert "loses 10.0 points; of one that it has, 36.7." in absent.sentence
    assert [recommendation.action for recommendation in absent.recommendations] == [
        "fedprox",
        "scaffold",
    ]


def test_merging_loses(make_run: Callable[..., Run]) -> None:
    """Before 0.4, 0.4; clients 0.8, 0.4 and 0.4, 0.8, so their mean gains 0.2; merged 0.3, 0.3:
    merging loses 0.3.
    """
    run = make_run(
        before=(4, 4),
        local={0: (8, 4), 1: (4, 8)},
        merged=(3, 3),
        clients={"count": 2, "sample": 1},
    )
    lost = find("where it was lost", run)
    assert "local training gains 20.0 and aggregation loses 30.0" in lost.sentence
    assert [recommendation.action for recommendation in lost.recommendations] == [
        "more clients a round (clients.sample)",
        "flashback",
        "fedwavg",
        "fednova",
    ]
    assert "50 % of the clients take part" in lost.recommendations[0].reason


def test_training_at_the_server_loses(make_run: Callable[..., Run]) -> None:
    """Merged 0.8, 0.8 and refined 0.6, 0.7: (0.2 + 0.1) / 2."""
    lost = find(
        "where it was lost",
        make_run(
            before=(4, 4), local={0: (4, 4)}, merged=(8, 8), refined=(6, 7), label_counts=((4, 4),)
        ),
    )
    assert "server training loses 15.0" in lost.sentence
    assert "data.public" in lost.recommendations[0].action


def test_seeds_that_disagree_get_no_cure(make_run: Callable[..., Run]) -> None:
    """Local losses of 0.3 and -0.1: mean 0.1, deviation 0.28."""
    one = make_run(
        "one", seed=0, before=(5, 5), local={0: (2, 2)}, merged=(5, 5), label_counts=((8, 0),)
    )
    two = make_run(
        "two", seed=1, before=(5, 5), local={0: (6, 6)}, merged=(5, 5), label_counts=((8, 0),)
    )
    lost = find("where it was lost", one, two)
    assert "10.00 ± 28.28 points" in lost.sentence
    assert "within the noise of the seeds" in lost.sentence
    assert all(not finding.recommendations for finding in diagnose([one, two])[0].findings)


def test_seeds_that_agree_are_clear(make_run: Callable[..., Run]) -> None:
    """Losses of 0.3, 0.4 and 0.35: deviation 0.05, and 4.303 * 0.05 / sqrt 3 = 0.124 on both
    sides of 0.35.
    """
    ends = [(2, 2), (1, 1), (1, 2)]
    runs = [
        make_run(
            f"{seed}",
            seed=seed,
            before=(5, 5),
            local={0: end},
            merged=(5, 5),
            label_counts=((8, 0),),
        )
        for seed, end in enumerate(ends)
    ]
    lost = find("where it was lost", *runs)
    assert (
        "Over 3 seeds that is 35.00 ± 5.00 points (95 % interval of the mean 22.58 to"
        " 47.42): more than the noise of the seeds." in lost.sentence
    )
    assert lost.evidence["phases"]["local"]["verdict"] == "clear"


def test_what_was_not_recorded_is_not_guessed(make_run: Callable[..., Run]) -> None:
    lost = find("where it was lost", make_run(record_local=False))
    assert "the phase in which it was lost is unknown" in lost.sentence
    assert [recommendation.action for recommendation in lost.recommendations] == ["--record-local"]


def test_nothing_lost_needs_no_cure(make_run: Callable[..., Run]) -> None:
    run = make_run(before=(4, 4), local={0: (6, 6), 1: (6, 6)}, merged=(8, 8))
    assert "No phase loses enough for a recommendation" in find("where it was lost", run).sentence
    assert all(not finding.recommendations for finding in diagnose([run])[0].findings)


def test_forgetting_of_the_global_model(make_run: Callable[..., Run]) -> None:
    """From 0.8, 0.4 to 0.7, 0.6: the drop is (0.1 + 0) / 2, the net change since the best (0.1
    - 0.2) / 2.
    """
    sentence = find("forgetting", make_run()).sentence
    assert "the test accuracy is 65.0 %" in sentence
    assert "on average (gains count as 0): 5.00 points, most in cat (10.0)" in sentence
    assert "on average 5.0 points above their best earlier round" in sentence


def test_clients_are_named_with_what_they_hold(make_run: Callable[..., Run]) -> None:
    """Client 0 loses (-0.2 + 0.4) / 2, client 1 (0.6 - 0.4) / 2: 0.1 each."""
    sentence = find("clients", make_run()).sentence
    assert (
        "client 0 (10.0 points, 8 examples of 1 class) and client 1 (10.0 points, 8 examples"
        " of 1 class)"
    ) in sentence


def test_many_clients_show_what_they_have_in_common(make_run: Callable[..., Run]) -> None:
    """Client k of eleven has k + 6 examples and ends with k of 10 cats right, where the global
    model had 10: the larger, the less lost, without exception.

    All hold both classes, so the number of classes explains nothing and is not mentioned. With nine
    clients there is no sentence at all.
    """
    counts = [(client + 1, 5) for client in range(11)]
    local = {client: (client, 5) for client in range(11)}
    finding = find(
        "clients", make_run(before=(10, 5), local=local, merged=(9, 5), label_counts=counts)
    )
    assert finding.evidence["rank_correlation_with_examples"]["value"] == pytest.approx(-1)
    assert "rank_correlation_with_classes" not in finding.evidence
    assert (
        "Clients with few examples lose more (rank correlation -1.00); this does not prove a cause."
    ) in finding.sentence
    few = {client: local[client] for client in range(9)}
    assert (
        "rank correlation"
        not in find(
            "clients",
            make_run("few", before=(10, 5), local=few, merged=(9, 5), label_counts=counts),
        ).sentence
    )


def test_drift_without_a_server(tmp_path: Path) -> None:
    runs = [write_peers_run(tmp_path / f"{seed}", method="gossip", seed=seed) for seed in range(2)]
    drift = find("drift", *runs)
    assert "After a drift clients fall by" in drift.sentence
    assert (
        "of their peer selections are within their own cluster, where randomly drawn peers give 40 %"
        in drift.sentence
    )  # two of five others, six clients in two halves
    assert {recommendation.action for recommendation in drift.recommendations} == {"hast", "dac"}
    # it already chooses its peers
    assert find("drift", write_peers_run(tmp_path / "hast", method="hast")).recommendations == ()


def test_methods_are_compared_seed_by_seed(make_run: Callable[..., Run]) -> None:
    """Forgotten a round: 0.05 for the first, 0.2 for the second ((0.4 + 0) / 2), on both seeds:
    a difference of 15 points that does not vary.
    """
    runs = [make_run(f"a{seed}", seed=seed) for seed in (0, 1)]
    runs += [make_run(f"b{seed}", seed=seed, method="fedprox", merged=(4, 6)) for seed in (0, 1)]
    last = diagnose(runs)[-1]
    assert last.label == ""
    (finding,) = last.findings
    assert (
        "fedavg forgets least from one recorded round to the next (5.00 points), next is fedprox (20.00)"
        in finding.sentence
    )
    assert "Seed by seed the difference is 15.00 ± 0.00 points" in finding.sentence
    assert finding.evidence["seeds"] == [0, 1]


def test_trouble_is_told(make_run: Callable[..., Run]) -> None:
    run = make_run(rounds=9, rejected=[{"client": 1, "code": "not_finite"}])
    sentence = find("warning", run).sentence
    assert "1 of 1 run is unfinished" in sentence
    assert "2 replies were rejected" in sentence


def test_text_cannot_steer_a_terminal_and_json_is_whole(
    make_run: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(class_names=("\x1b[2Jcat\x07", "dog"))
    assert "\x1b" not in render_text(diagnose([run]))
    assert "\x07" not in render_text(diagnose([run]))
    app(["diagnose", str(run.folder)], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "What may help:" in shown
    assert max(map(len, shown.splitlines())) <= 100
    app(["diagnose", str(run.folder), "--json"], standalone_mode=False)
    printed = json.loads(capsys.readouterr().out)
    assert printed[0]["label"] == "fedavg"
    json.dumps([asdict(diagnosis) for diagnosis in diagnose([run])], allow_nan=False)


def test_rich_runs_are_diagnosed(tmp_path: Path) -> None:
    """Clients keep 40 % of what they do not hold: local training loses, and absent classes lose
    it.
    """
    run = write_server_run(tmp_path / "run", rounds=8)
    absent = find("absent classes", run)
    assert absent.evidence["absent"]["mean"] > 0 > absent.evidence["present"]["mean"]
    assert "mean F_k" in find("clients", run).sentence
    assert "right after local training and wrong after merging" in find("examples", run).sentence


def test_proposed_methods_exist() -> None:
    kinds = ("ABSENT_CLASSES", "HELD_CLASSES", "AGGREGATION", "MIXING", "DRIFT", "PEER_DRIFT")
    for kind in kinds:
        found = parts_addressing(getattr(declarations, kind))
        assert [p.name for p, remedy in found if remedy.reason], kind
    assert parts_of(type("Run", (), {"method": "made of objects"})()) == set()  # type: ignore[arg-type]
