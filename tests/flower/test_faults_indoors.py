"""Sites that decline, vanish, come back, lie or forget; a coordinator that is cut off. Within
one process, where every moment can be chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from indoors import QUICK, Indoors, make_site, play_indoors, small_spec
from states import assert_equals_loop, last_state

from remanence.core.errors import InputError, RunFailed
from remanence.flower.site import Site
from remanence.flower.transport import Answer
from remanence.flower.wire import WireMessage
from remanence.results.run import Run

WHOLE = {"clients.sample": 6, "record.validation": False}


def three_sites(folder: Path, **policies: Any) -> dict[int, Site]:
    return {
        10 + n: make_site(folder, f"site-{n}", (2 * n, 2 * n + 1), policies.get(f"site_{n}"))
        for n in range(3)
    }


def log_of(run: Run) -> str:
    return (run.folder / "federation.log").read_text()


def codes(line: dict[str, Any]) -> list[tuple[int, str]]:
    return [(refused["client"], refused["code"]) for refused in line["rejected"]]


class Script:
    """Decides the fate of messages: a function of how many of that kind have gone to that node."""

    def __init__(self, decide: Callable[[int, str, int], str]):
        self.decide, self.seen = decide, {}  # type: ignore[var-annotated]

    def __call__(self, node: int, parcel: WireMessage) -> str:
        kind = parcel.header["kind"]
        self.seen[node, kind] = self.seen.get((node, kind), 0) + 1
        return self.decide(node, kind, self.seen[node, kind])


def test_a_site_that_declines_is_named_with_a_code_and_the_others_go_on(tmp_path: Path) -> None:
    sites = three_sites(tmp_path, site_1={"code": True, "label_counts": False})
    spec = small_spec("flashback", **WHOLE, **{"data.public": 8})
    run = play_indoors(spec, Indoors(sites), tmp_path / "run")
    for line in run.metrics:
        assert line["replies"] == 4
        assert codes(line) == [(2, "policy"), (3, "policy")]
        assert "does not give them (policy.label_counts)" in line["rejected"][0]["reason"]
    assert "site site-1 declines (policy)" in log_of(run)


def test_work_lost_by_a_restart_is_sent_again(tmp_path: Path) -> None:
    """The first training message to a node is swallowed, as by a SuperNode that dies with it;
    the greeting after it is answered, so it is back.
    """
    spec = small_spec("scaffold", **WHOLE)
    carrier = Indoors(
        three_sites(tmp_path),
        Script(lambda node, kind, count: "lost" if (node, kind, count) == (11, "train", 1) else ""),
    )
    run = play_indoors(spec, carrier, tmp_path / "run", QUICK._replace(reply_timeout=20.0))
    assert "site site-1 has lost its work by a restart, and gets it again" in log_of(run)
    assert_equals_loop(run, spec, tmp_path, 1e-10)


def test_a_reply_that_got_lost_is_sent_again_and_trained_once(tmp_path: Path) -> None:
    """The site trained, and its answer never came: asked again, it gives the answer it gave.
    Its state moved on once, or scaffold would differ.
    """
    spec = small_spec("scaffold", **WHOLE)
    carrier = Indoors(
        three_sites(tmp_path),
        Script(
            lambda node, kind, count: "silent" if (node, kind, count) == (11, "train", 2) else ""
        ),
    )
    run = play_indoors(spec, carrier, tmp_path / "run", QUICK._replace(reply_timeout=20.0))
    assert_equals_loop(run, spec, tmp_path, 1e-10)


def test_a_silent_site_is_left_alone_until_it_answers(tmp_path: Path) -> None:
    """It answers neither the training of round 2 nor the first greeting after it; then it does,
    and takes part in the rounds that follow.
    """
    mute = {("train", 2), ("hello", 2)}
    carrier = Indoors(
        three_sites(tmp_path),
        Script(lambda node, kind, count: "lost" if node == 11 and (kind, count) in mute else ""),
    )
    spec = small_spec("fedavg", **WHOLE, rounds=4, **{"round.deadline": "0.4"})
    woken = Waking(carrier, 11)
    run = play_indoors(spec, woken, tmp_path / "run", QUICK._replace(ping_after=9.0))
    assert [line["replies"] for line in run.metrics] == [6, 4, 4, 6]
    assert codes(run.metrics[1]) == [(2, "no-answer"), (3, "no-answer")]
    assert "did not answer in 0.4 s: it is left alone until it answers again" in log_of(run)
    assert "site site-1 is back with clients 2, 3" in log_of(run)


class Waking(Indoors):
    """After round 3 has been asked for, the greeting that a node did not answer is answered
    after all.
    """

    def __init__(self, inner: Indoors, node: int):
        super().__init__(inner.sites, inner.fate)
        self.node, self.late = node, ""

    def send(self, node: int, parcel: WireMessage, kind: str, group: str) -> str:
        number = super().send(node, parcel, kind, group)
        if node == self.node and parcel.header["kind"] == "hello":
            self.late = number
        if parcel.header.get("round") == 3 and self.late:
            reply = self.sites[self.node].answer(
                WireMessage({**parcel.header, "kind": "hello"}, {})
            )
            self.ready[self.late], self.late = Answer(self.late, reply), ""
        return number


def test_a_site_comes_back_under_another_node_id(tmp_path: Path) -> None:
    """Scaffold's control variates are on the site's disk under its clients' numbers, so the new
    node goes on where the old one was.
    """
    spec = small_spec("scaffold", **WHOLE)
    carrier = Indoors(three_sites(tmp_path))

    def move(node: int, parcel: WireMessage) -> str:
        if parcel.header.get("round") == 2 and 11 in carrier.sites:
            del carrier.sites[11]
            carrier.sites[77] = make_site(tmp_path, "site-1", (2, 3))
        return "" if node in carrier.sites else "lost"

    carrier.fate = move
    run = play_indoors(
        spec, carrier, tmp_path / "run", QUICK._replace(reply_timeout=20.0, gone_after=10.0)
    )
    assert "site site-1 went away (node 11)" in log_of(run)
    assert "site site-1 is here with clients 2, 3 (node 77)" in log_of(run)
    assert_equals_loop(run, spec, tmp_path, 1e-10)


def test_a_site_that_stays_away_costs_its_clients_the_round(tmp_path: Path) -> None:
    carrier = Indoors(three_sites(tmp_path))

    def leave(node: int, parcel: WireMessage) -> str:
        if parcel.header.get("round") == 2:
            carrier.sites.pop(11, None)
        return ""

    carrier.fate = leave
    run = play_indoors(
        small_spec("fedavg", **WHOLE), carrier, tmp_path / "run", QUICK._replace(reply_timeout=20.0)
    )
    assert [line["replies"] for line in run.metrics] == [6, 4]
    assert codes(run.metrics[1]) == [(2, "away"), (3, "away")]


def test_nobody_takes_over_clients_of_another_site(tmp_path: Path) -> None:
    sites = three_sites(tmp_path)
    sites[99] = make_site(tmp_path, "stranger", (0, 5))
    run = play_indoors(small_spec("fedavg", **WHOLE), Indoors(sites), tmp_path / "run")
    assert (
        "site stranger claims client 0, which lives at site site-0: it is not believed"
        in log_of(run)
    )
    assert [line["replies"] for line in run.metrics] == [6, 6]


def test_a_name_is_no_proof(tmp_path: Path) -> None:
    """A stranger that calls itself like the site it wants to replace is not believed either,
    while that one is there.
    """
    sites = three_sites(tmp_path)
    sites[99] = make_site(tmp_path / "elsewhere", "site-0", (0, 1))
    carrier = Indoors(sites)
    run = play_indoors(small_spec("fedavg", **WHOLE), carrier, tmp_path / "run")
    assert "site site-0 claims client 0, which lives at site site-0: it is not believed" in log_of(
        run
    )
    assert {node for node, parcel in carrier.sent if parcel.header["kind"] == "train"} == {
        10,
        11,
        12,
    }


def test_a_client_moves_when_its_site_is_silent(tmp_path: Path) -> None:
    """Two nodes have the same site file, as after a restart that Flower has not noticed: the
    second gets the work when the first does not answer.
    """
    sites = three_sites(tmp_path)
    sites[99] = sites[11]
    carrier = Indoors(
        sites,
        Script(
            lambda node, kind, count: "lost" if node == 11 and (kind, count) != ("hello", 1) else ""
        ),
    )
    run = play_indoors(
        small_spec("scaffold", **WHOLE, rounds=3, **{"round.deadline": "0.4"}),
        carrier,
        tmp_path / "run",
        QUICK._replace(ping_after=9.0),
    )
    assert [line["replies"] for line in run.metrics] == [4, 6, 6]
    assert "client 2 lives at site site-1 now (node 99)" in log_of(run)


def test_a_coordinator_cannot_make_a_site_read_its_files(tmp_path: Path) -> None:
    np.savez(tmp_path / "private.npz", x=np.zeros((40, 5), dtype=np.float32), y=np.arange(40) % 4)
    spec = small_spec("fedavg", **{"data.name": f"npz(path='{tmp_path / 'private.npz'}')"})
    with pytest.raises(RunFailed, match="this site has shares of published data"):
        play_indoors(spec, Indoors(three_sites(tmp_path)), tmp_path / "run")


class Lying(Site):
    """Answers training with a tampered reply."""

    lie: Callable[[WireMessage], WireMessage]

    def answer(self, request: WireMessage) -> WireMessage:
        reply = super().answer(request)
        return self.lie(reply) if reply.header["kind"] == "trained" else reply


@pytest.mark.parametrize(
    ("lie", "code"),
    [
        (lambda reply: reply._replace(header=reply.header | {"clients": [0, 1]}), "unknown-client"),
        (lambda reply: reply._replace(header=reply.header | {"round": 7}), "wrong-round"),
        (
            lambda reply: reply._replace(
                site_arrays=reply.site_arrays | {"weight": np.array([1.0, np.inf])}
            ),
            "weight",
        ),
        (
            lambda reply: reply._replace(
                site_arrays={n: a for n, a in reply.site_arrays.items() if n != "loss"}
            ),
            "malformed",
        ),
        (
            lambda reply: reply._replace(
                site_arrays=reply.site_arrays | {"params/head.bias": np.full((2, 4), np.nan)}
            ),
            "not-finite",
        ),
        (
            lambda reply: reply._replace(
                site_arrays=reply.site_arrays | {"params/head.bias": np.zeros((2, 1))}
            ),
            "shape",
        ),
        (
            lambda reply: reply._replace(
                site_arrays=reply.site_arrays | {"payload/fedavg/labels": np.zeros((2, 4))}
            ),
            "names",
        ),
    ],
)
def test_a_lying_site_is_refused(
    lie: Callable[[WireMessage], WireMessage], code: str, tmp_path: Path
) -> None:
    sites = three_sites(tmp_path)
    liar = Lying(sites[11].file)
    liar.lie = lie
    sites[11] = liar
    run = play_indoors(small_spec("fedavg", **WHOLE, rounds=1), Indoors(sites), tmp_path / "run")
    assert set(codes(run.metrics[0])) <= {(2, code), (3, code)}
    assert (3, code) in codes(run.metrics[0])


@pytest.mark.parametrize(
    "lie",
    [
        # fewer rows than clients
        lambda reply: reply._replace(
            site_arrays=reply.site_arrays | {"params/head.bias": np.zeros((1, 4))}
        ),
        lambda reply: reply._replace(
            site_arrays=reply.site_arrays | {"params/head.bias": np.zeros(())}
        ),
        lambda reply: reply._replace(
            site_arrays=reply.site_arrays | {"params/head.bias/deeper": np.zeros((2, 4))}
        ),
        lambda reply: reply._replace(
            site_arrays=reply.site_arrays | {"valid/confusion": np.full((2, 4, 4), -1)}
        ),
        lambda reply: reply._replace(
            site_arrays=reply.site_arrays | {"valid/loss": np.full(2, np.nan)}
        ),
        lambda reply: reply._replace(site_arrays=reply.site_arrays | {"weight": np.zeros(7)}),
        lambda reply: reply._replace(header=reply.header | {"round": 10**30}),
        lambda reply: reply._replace(
            header=reply.header | {"round": None, "seconds": "long", "clients_here": "all"}
        ),
        lambda reply: reply._replace(header=reply.header | {"clients": None}),
        lambda reply: WireMessage({}, {}),
        lambda reply: WireMessage({"kind": "declined", "code": 7, "reason": ["?"]}, {}),
    ],
)
def test_no_lie_ends_the_run(lie: Callable[[WireMessage], WireMessage], tmp_path: Path) -> None:
    """Without a server, where counts come with the models and are used before anything else."""
    sites = three_sites(tmp_path)
    liar = Lying(sites[11].file)
    liar.lie = lie
    sites[11] = liar
    run = play_indoors(
        small_spec("random(peers=2)", rounds=1, **WHOLE), Indoors(sites), tmp_path / "run"
    )
    assert run.metrics[0]["replies"] >= 4


class CutOff(Exception):
    """The coordinator is killed."""


@pytest.mark.parametrize(
    "method", ["scaffold+wsm", "fedwavg", "hast(peers=2, depth=2, finetune_epochs=1)"]
)
@pytest.mark.parametrize("moment", [2, 5, 7])
def test_a_coordinator_that_was_cut_off_goes_on(method: str, moment: int, tmp_path: Path) -> None:
    """Cut off when so many messages are out, at a hello, in a round or between two; the same
    call again ends with the model of `sequential`.
    """
    spec = small_spec(method, **WHOLE)
    sites = three_sites(tmp_path)
    carrier = Indoors(sites)

    def cut(node: int, parcel: WireMessage) -> str:
        if len(carrier.sent) > moment:
            raise CutOff
        return ""

    carrier.fate = cut
    with pytest.raises(CutOff):
        play_indoors(spec, carrier, tmp_path / "run")
    run = play_indoors(spec, Indoors(sites), tmp_path / "run")
    assert "going on with run" in log_of(run)
    assert_equals_loop(run, spec, tmp_path, 1e-10)


def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    spec, sites = small_spec("fedavg", **WHOLE), three_sites(tmp_path)
    before = play_indoors(spec, Indoors(sites), tmp_path / "run").metrics
    assert play_indoors(spec, Indoors(sites), tmp_path / "run").metrics == before
    longer = play_indoors(spec.model_copy(update={"rounds": 3}), Indoors(sites), tmp_path / "run")
    assert [line["round"] for line in longer.metrics] == [1, 2, 3]
    with pytest.raises(InputError, match="holds another experiment"):
        play_indoors(small_spec("fedprox", **WHOLE), Indoors(sites), tmp_path / "run")


def test_a_lost_state_is_told_and_can_be_begun_anew(tmp_path: Path) -> None:
    spec = small_spec("scaffold", **WHOLE)
    sites = three_sites(tmp_path)
    carrier = Indoors(sites)

    def burn(node: int, parcel: WireMessage) -> str:
        for file in (
            (tmp_path / "site-1" / "state").rglob("round-*.safetensors")
            if parcel.header.get("round") == 2
            else ()
        ):
            file.unlink()
        return ""

    carrier.fate = burn
    run = play_indoors(spec, carrier, tmp_path / "run")
    assert codes(run.metrics[1]) == [(2, "state-lost"), (3, "state-lost")]
    assert "set restart = true in site.toml" in run.metrics[1]["rejected"][0]["reason"]
    sites[11] = make_site(tmp_path, "site-1", (2, 3), restart=True)
    again = play_indoors(spec, carrier, tmp_path / "again")
    assert [line["replies"] for line in again.metrics] == [6, 6]


def test_over_selection_takes_the_first_to_answer(tmp_path: Path) -> None:
    """Two of three sites answer; four answers are wanted, so nobody waits for the third."""
    carrier = Indoors(
        three_sites(tmp_path),
        Script(lambda node, kind, count: "lost" if (node, kind) == (12, "train") else ""),
    )
    spec = small_spec(
        "fedavg",
        rounds=1,
        **{"clients.sample": 4, "round.over_selection": 1.5, "record.validation": False},
    )
    run = play_indoors(
        spec, carrier, tmp_path / "run", QUICK._replace(reply_timeout=60.0, ping_after=60.0)
    )
    assert run.metrics[0]["replies"] == 4
    assert codes(run.metrics[0]) == [(4, "late"), (5, "late")]


def test_a_round_with_too_few_answers_is_abandoned(tmp_path: Path) -> None:
    carrier = Indoors(
        three_sites(tmp_path),
        Script(lambda node, kind, count: "lost" if kind == "train" and node > 10 else ""),
    )
    spec = small_spec("fedavg", rounds=1, **WHOLE, **{"round.min_replies": 3})
    run = play_indoors(spec, carrier, tmp_path / "run", QUICK._replace(ping_after=9.0))
    assert run.metrics[0]["abandoned"]
    assert last_state(run).round == 1


def test_where_nobody_comes_the_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(
        RunFailed,
        match="no site can work on this experiment after 1 s: check that the SuperNodes run",
    ):
        play_indoors(small_spec("fedavg"), Indoors({}), tmp_path / "run")
    sites = {1: make_site(tmp_path, "strict", range(6), {"code": False})}
    with pytest.raises(
        RunFailed,
        match=r"those that came declined \(policy: the experiment imports and runs Python code",
    ):
        play_indoors(small_spec("fedavg"), Indoors(sites), tmp_path / "run")


def test_when_too_few_are_left_the_run_stops_and_goes_on_later(tmp_path: Path) -> None:
    sites = three_sites(tmp_path)
    carrier = Indoors(dict(sites))

    def leave(node: int, parcel: WireMessage) -> str:
        if parcel.header.get("round") == 2:
            carrier.sites.clear()
        return ""

    carrier.fate = leave
    spec = small_spec("scaffold", **WHOLE, rounds=3)
    with pytest.raises(RunFailed, match="all rounds before are saved"):
        play_indoors(spec, carrier, tmp_path / "run")
    run = play_indoors(spec, Indoors(sites), tmp_path / "run")
    assert [line["replies"] for line in run.metrics] == [6, 0, 6]
