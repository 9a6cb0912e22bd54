"""Sites that decline, disconnect, come back, send tampered replies or lose their state; a
coordinator that is interrupted. Within one process, where every moment can be chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from in_process import SHORT_TIMEOUTS, InProcessTransport, make_site, run_in_process, small_config
from run_states import assert_equals_sequential, last_state

from remanence.core.errors import InputError, RunFailed
from remanence.core.slots import Part
from remanence.flower.policy import release
from remanence.flower.site import Site
from remanence.flower.transport import Response
from remanence.flower.wire import WireMessage
from remanence.methods import PARTS
from remanence.results.run import Run

ALL_CLIENTS = {"clients.sample": 6, "record.validation": False}


def three_sites(folder: Path, **policies: Any) -> dict[int, Site]:
    return {
        10 + n: make_site(folder, f"site-{n}", (2 * n, 2 * n + 1), policies.get(f"site_{n}"))
        for n in range(3)
    }


def log_of(run: Run) -> str:
    return (run.folder / "federation.log").read_text()


def codes(line: dict[str, Any]) -> list[tuple[int, str]]:
    return [(rejection["client"], rejection["code"]) for rejection in line["rejected"]]


class FaultPlan:
    """A fault for each message, chosen by node, kind and how many of that kind the node got."""

    def __init__(self, decide: Callable[[int, str, int], str]):
        self.decide, self.seen = decide, {}  # type: ignore[var-annotated]

    def __call__(self, node: int, message: WireMessage) -> str:
        kind = message.header["kind"]
        self.seen[node, kind] = self.seen.get((node, kind), 0) + 1
        return self.decide(node, kind, self.seen[node, kind])


def test_a_site_that_declines_is_logged_with_a_code_and_the_others_continue(tmp_path: Path) -> None:
    sites = three_sites(tmp_path, site_1={"code": True, "label_counts": False})
    config = small_config("flashback", **ALL_CLIENTS, **{"data.public": 8})
    run = run_in_process(config, InProcessTransport(sites), tmp_path / "run")
    for line in run.metrics:
        assert line["replies"] == 4
        assert codes(line) == [(2, "policy"), (3, "policy")]
        assert "does not send them (policy.label_counts)" in line["rejected"][0]["reason"]
    assert "site site-1 declines (policy)" in log_of(run)


def messages_by_kind(transport: InProcessTransport, node: int) -> dict[str, WireMessage]:
    return {message.header["kind"]: message for to, message in transport.sent if to == node}


def test_a_method_that_the_policy_excludes_gets_no_answer_to_any_message(tmp_path: Path) -> None:
    transport = InProcessTransport(three_sites(tmp_path))
    run_in_process(small_config("fedbn+wsm", rounds=1, **ALL_CLIENTS), transport, tmp_path / "run")
    messages = messages_by_kind(transport, 10)
    assert set(messages) == {"ping", "train", "personal"}
    policy = {"code": True, "methods": ["fedavg", "wsm"]}
    strict = make_site(tmp_path, "strict", (0, 1), policy)
    for message in messages.values():
        header = strict.answer(message).header
        assert header["code"] == "policy"
        assert "accepts only fedavg, wsm (policy.methods)" in header["reason"]


def test_an_undeclared_payload_gets_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same messages, to a site that allows label counts and to one that forbids them."""
    part = Part(
        "noisy",
        payload=lambda start, info: {"total": torch.zeros((), dtype=info.dtype)},
        on_client_end=lambda ctx, trained, ops: ({}, {"total": ctx.stats.size}),
    )
    monkeypatch.setitem(PARTS, "noisy", lambda: part)
    transport = InProcessTransport(three_sites(tmp_path))
    run = run_in_process(
        small_config("fedavg+noisy", rounds=1, **ALL_CLIENTS), transport, tmp_path / "run"
    )
    assert run.metrics[0]["replies"] == 6
    strict = make_site(tmp_path, "strict", (0, 1), {"code": True, "label_counts": False})
    for message in messages_by_kind(transport, 10).values():
        header = strict.answer(message).header
        assert header["code"] == "policy"
        assert "noisy sends total, which it does not declare" in header["reason"]


def test_a_field_of_a_response_that_is_not_declared_is_not_sent() -> None:
    fine = WireMessage({"kind": "trained"}, {"params/w": np.zeros(1)})
    assert release(fine, exactly=True) is fine
    for response in (
        fine._replace(header={"kind": "trained", "diagnoses": ["a"]}),
        fine._replace(site_arrays={"label_counts": np.zeros(4)}),
        fine._replace(shared_arrays={"examples/x": np.zeros(4)}),
    ):
        refused = release(response, exactly=True)
        assert refused.header["kind"] == "declined"
        assert not refused.arrays


def test_work_lost_by_a_restart_is_sent_again(tmp_path: Path) -> None:
    """The first training message to a node is lost, as in a SuperNode that is killed; the ping
    after it is answered, so the site is back.
    """
    config = small_config("scaffold", **ALL_CLIENTS)
    transport = InProcessTransport(
        three_sites(tmp_path),
        FaultPlan(
            lambda node, kind, count: "lost" if (node, kind, count) == (11, "train", 1) else ""
        ),
    )
    run = run_in_process(
        config, transport, tmp_path / "run", SHORT_TIMEOUTS._replace(reply_timeout=20.0)
    )
    assert "site site-1 lost its work in a restart; it is sent again" in log_of(run)
    assert_equals_sequential(run, config, tmp_path, 1e-10)


def test_a_reply_that_got_lost_is_sent_again_and_trained_once(tmp_path: Path) -> None:
    """The site trained and its reply was lost: a repeated request gets the stored reply. The state
    was updated once, or scaffold would differ.
    """
    config = small_config("scaffold", **ALL_CLIENTS)
    transport = InProcessTransport(
        three_sites(tmp_path),
        FaultPlan(
            lambda node, kind, count: "silent" if (node, kind, count) == (11, "train", 2) else ""
        ),
    )
    run = run_in_process(
        config, transport, tmp_path / "run", SHORT_TIMEOUTS._replace(reply_timeout=20.0)
    )
    assert_equals_sequential(run, config, tmp_path, 1e-10)


def test_a_silent_site_gets_no_work_until_it_responds(tmp_path: Path) -> None:
    """It responds neither to the training of round 2 nor to the first ping after it; later it does,
    and takes part in the rounds that follow.
    """
    mute = {("train", 2), ("ping", 2)}
    transport = InProcessTransport(
        three_sites(tmp_path),
        FaultPlan(lambda node, kind, count: "lost" if node == 11 and (kind, count) in mute else ""),
    )
    config = small_config("fedavg", **ALL_CLIENTS, rounds=4, **{"round.deadline": "0.4"})
    with_late_response = LateResponse(transport, 11)
    run = run_in_process(
        config, with_late_response, tmp_path / "run", SHORT_TIMEOUTS._replace(ping_after=9.0)
    )
    assert [line["replies"] for line in run.metrics] == [6, 4, 4, 6]
    assert codes(run.metrics[1]) == [(2, "no-answer"), (3, "no-answer")]
    assert "did not respond in 0.4 s: it gets no work until it responds again" in log_of(run)
    assert "site site-1 is back with clients 2, 3" in log_of(run)


class LateResponse(InProcessTransport):
    """After round 3 has begun, the response to a ping that was lost before arrives."""

    def __init__(self, inner: InProcessTransport, node: int):
        super().__init__(inner.sites, inner.fault)
        self.node, self.late = node, ""

    def send(self, node: int, message: WireMessage, kind: str, group: str) -> str:
        message_id = super().send(node, message, kind, group)
        if node == self.node and message.header["kind"] == "ping":
            self.late = message_id
        if message.header.get("round") == 3 and self.late:
            reply = self.sites[self.node].answer(
                WireMessage({**message.header, "kind": "ping"}, {})
            )
            self.ready[self.late], self.late = Response(self.late, reply), ""
        return message_id


def test_a_site_comes_back_under_another_node_id(tmp_path: Path) -> None:
    """Scaffold's control variates are on the site's disk under its clients' numbers, so the new
    node continues with them.
    """
    config = small_config("scaffold", **ALL_CLIENTS)
    transport = InProcessTransport(three_sites(tmp_path))

    def move(node: int, message: WireMessage) -> str:
        if message.header.get("round") == 2 and 11 in transport.sites:
            del transport.sites[11]
            transport.sites[77] = make_site(tmp_path, "site-1", (2, 3))
        return "" if node in transport.sites else "lost"

    transport.fault = move
    run = run_in_process(
        config,
        transport,
        tmp_path / "run",
        SHORT_TIMEOUTS._replace(reply_timeout=20.0, gone_after=10.0),
    )
    assert "site site-1 disconnected (node 11)" in log_of(run)
    assert "site site-1 joined with clients 2, 3 (node 77)" in log_of(run)
    assert_equals_sequential(run, config, tmp_path, 1e-10)


def test_a_site_that_stays_away_costs_its_clients_the_round(tmp_path: Path) -> None:
    transport = InProcessTransport(three_sites(tmp_path))

    def leave(node: int, message: WireMessage) -> str:
        if message.header.get("round") == 2:
            transport.sites.pop(11, None)
        return ""

    transport.fault = leave
    run = run_in_process(
        small_config("fedavg", **ALL_CLIENTS),
        transport,
        tmp_path / "run",
        SHORT_TIMEOUTS._replace(reply_timeout=20.0),
    )
    assert [line["replies"] for line in run.metrics] == [6, 4]
    assert codes(run.metrics[1]) == [(2, "away"), (3, "away")]


def test_no_site_takes_over_clients_of_another(tmp_path: Path) -> None:
    sites = three_sites(tmp_path)
    sites[99] = make_site(tmp_path, "stranger", (0, 5))
    run = run_in_process(
        small_config("fedavg", **ALL_CLIENTS), InProcessTransport(sites), tmp_path / "run"
    )
    assert "site stranger lists client 0, which belongs to site site-0: this is ignored" in log_of(
        run
    )
    assert [line["replies"] for line in run.metrics] == [6, 6]


def test_a_name_is_no_proof(tmp_path: Path) -> None:
    """A foreign site with the name of the site it wants to replace is ignored too, while that one
    is connected.
    """
    sites = three_sites(tmp_path)
    sites[99] = make_site(tmp_path / "elsewhere", "site-0", (0, 1))
    transport = InProcessTransport(sites)
    run = run_in_process(small_config("fedavg", **ALL_CLIENTS), transport, tmp_path / "run")
    assert "site site-0 lists client 0, which belongs to site site-0: this is ignored" in log_of(
        run
    )
    assert {node for node, message in transport.sent if message.header["kind"] == "train"} == {
        10,
        11,
        12,
    }


def test_a_client_moves_when_its_site_is_silent(tmp_path: Path) -> None:
    """Two nodes have the same site file, as after a restart that Flower has not noticed: the second
    gets the work when the first does not respond.
    """
    sites = three_sites(tmp_path)
    sites[99] = sites[11]
    transport = InProcessTransport(
        sites,
        FaultPlan(
            lambda node, kind, count: "lost" if node == 11 and (kind, count) != ("ping", 1) else ""
        ),
    )
    run = run_in_process(
        small_config("scaffold", **ALL_CLIENTS, rounds=3, **{"round.deadline": "0.4"}),
        transport,
        tmp_path / "run",
        SHORT_TIMEOUTS._replace(ping_after=9.0),
    )
    assert [line["replies"] for line in run.metrics] == [4, 6, 6]
    assert "client 2 belongs to site site-1 now (node 99)" in log_of(run)


def test_a_coordinator_cannot_make_a_site_read_its_files(tmp_path: Path) -> None:
    np.savez(tmp_path / "private.npz", x=np.zeros((40, 5), dtype=np.float32), y=np.arange(40) % 4)
    config = small_config("fedavg", **{"data.name": f"npz(path='{tmp_path / 'private.npz'}')"})
    with pytest.raises(RunFailed, match="this site has shares of published data"):
        run_in_process(config, InProcessTransport(three_sites(tmp_path)), tmp_path / "run")


class TamperingSite(Site):
    """Responds to training with a tampered reply."""

    tamper: Callable[[WireMessage], WireMessage]

    def answer(self, request: WireMessage) -> WireMessage:
        reply = super().answer(request)
        return self.tamper(reply) if reply.header["kind"] == "trained" else reply


@pytest.mark.parametrize(
    ("tamper", "code"),
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
        (  # a loss is missing only where the site says that it withholds it
            lambda reply: reply._replace(
                header=reply.header | {"withheld": "loss"},
                site_arrays={n: a for n, a in reply.site_arrays.items() if n != "loss"},
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
def test_a_tampered_reply_is_rejected(
    tamper: Callable[[WireMessage], WireMessage], code: str, tmp_path: Path
) -> None:
    sites = three_sites(tmp_path)
    tampering = TamperingSite(sites[11].file)
    tampering.tamper = tamper
    sites[11] = tampering
    run = run_in_process(
        small_config("fedavg", **ALL_CLIENTS, rounds=1), InProcessTransport(sites), tmp_path / "run"
    )
    assert set(codes(run.metrics[0])) <= {(2, code), (3, code)}
    assert (3, code) in codes(run.metrics[0])


@pytest.mark.parametrize(
    "tamper",
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
def test_no_tampered_reply_ends_the_run(
    tamper: Callable[[WireMessage], WireMessage], tmp_path: Path
) -> None:
    """Without a server, where counts come with the models and are used first."""
    sites = three_sites(tmp_path)
    tampering = TamperingSite(sites[11].file)
    tampering.tamper = tamper
    sites[11] = tampering
    run = run_in_process(
        small_config("random(peers=2)", rounds=1, **ALL_CLIENTS),
        InProcessTransport(sites),
        tmp_path / "run",
    )
    assert run.metrics[0]["replies"] >= 4


class Interrupted(Exception):
    """The coordinator is killed."""


@pytest.mark.parametrize(
    "method", ["scaffold+wsm", "fedwavg", "hast(peers=2, depth=2, finetune_epochs=1)"]
)
@pytest.mark.parametrize("moment", [2, 5, 7])
def test_an_interrupted_coordinator_resumes(method: str, moment: int, tmp_path: Path) -> None:
    """Interrupted after some messages: at a ping, in a round or between two. The same call again
    ends with the model of `sequential`.
    """
    config = small_config(method, **ALL_CLIENTS)
    sites = three_sites(tmp_path)
    transport = InProcessTransport(sites)

    def interrupt(node: int, message: WireMessage) -> str:
        if len(transport.sent) > moment:
            raise Interrupted
        return ""

    transport.fault = interrupt
    with pytest.raises(Interrupted):
        run_in_process(config, transport, tmp_path / "run")
    run = run_in_process(config, InProcessTransport(sites), tmp_path / "run")
    assert "resuming run" in log_of(run)
    assert_equals_sequential(run, config, tmp_path, 1e-10)


def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    config, sites = small_config("fedavg", **ALL_CLIENTS), three_sites(tmp_path)
    before = run_in_process(config, InProcessTransport(sites), tmp_path / "run").metrics
    assert run_in_process(config, InProcessTransport(sites), tmp_path / "run").metrics == before
    longer = run_in_process(
        config.model_copy(update={"rounds": 3}), InProcessTransport(sites), tmp_path / "run"
    )
    assert [line["round"] for line in longer.metrics] == [1, 2, 3]
    with pytest.raises(InputError, match="holds another experiment"):
        run_in_process(
            small_config("fedprox", **ALL_CLIENTS), InProcessTransport(sites), tmp_path / "run"
        )


def test_a_lost_state_is_reported_and_can_start_again(tmp_path: Path) -> None:
    config = small_config("scaffold", **ALL_CLIENTS)
    sites = three_sites(tmp_path)
    transport = InProcessTransport(sites)

    def delete(node: int, message: WireMessage) -> str:
        for file in (
            (tmp_path / "site-1" / "state").rglob("round-*.safetensors")
            if message.header.get("round") == 2
            else ()
        ):
            file.unlink()
        return ""

    transport.fault = delete
    run = run_in_process(config, transport, tmp_path / "run")
    assert codes(run.metrics[1]) == [(2, "state-lost"), (3, "state-lost")]
    assert "set restart = true in site.toml" in run.metrics[1]["rejected"][0]["reason"]
    sites[11] = make_site(tmp_path, "site-1", (2, 3), restart=True)
    again = run_in_process(config, transport, tmp_path / "again")
    assert [line["replies"] for line in again.metrics] == [6, 6]


def test_over_selection_takes_the_first_to_reply(tmp_path: Path) -> None:
    """Two of three sites reply; four replies are needed, so the round does not wait for the third."""
    transport = InProcessTransport(
        three_sites(tmp_path),
        FaultPlan(lambda node, kind, count: "lost" if (node, kind) == (12, "train") else ""),
    )
    config = small_config(
        "fedavg",
        rounds=1,
        **{"clients.sample": 4, "round.over_selection": 1.5, "record.validation": False},
    )
    run = run_in_process(
        config,
        transport,
        tmp_path / "run",
        SHORT_TIMEOUTS._replace(reply_timeout=60.0, ping_after=60.0),
    )
    assert run.metrics[0]["replies"] == 4
    assert codes(run.metrics[0]) == [(4, "late"), (5, "late")]


def test_a_round_with_too_few_replies_is_abandoned(tmp_path: Path) -> None:
    transport = InProcessTransport(
        three_sites(tmp_path),
        FaultPlan(lambda node, kind, count: "lost" if kind == "train" and node > 10 else ""),
    )
    config = small_config("fedavg", rounds=1, **ALL_CLIENTS, **{"round.min_replies": 3})
    run = run_in_process(
        config, transport, tmp_path / "run", SHORT_TIMEOUTS._replace(ping_after=9.0)
    )
    assert run.metrics[0]["abandoned"]
    assert last_state(run).round == 1


def test_a_run_without_sites_explains_why(tmp_path: Path) -> None:
    with pytest.raises(
        RunFailed,
        match="no site can work on this experiment after 1 s: check that the SuperNodes run",
    ):
        run_in_process(small_config("fedavg"), InProcessTransport({}), tmp_path / "run")
    sites = {1: make_site(tmp_path, "strict", range(6), {"code": False})}
    with pytest.raises(
        RunFailed,
        match=r"the connected ones declined \(policy: the experiment imports and runs Python code",
    ):
        run_in_process(small_config("fedavg"), InProcessTransport(sites), tmp_path / "run")


def test_a_run_with_too_few_sites_stops_and_can_resume(tmp_path: Path) -> None:
    sites = three_sites(tmp_path)
    transport = InProcessTransport(dict(sites))

    def leave(node: int, message: WireMessage) -> str:
        if message.header.get("round") == 2:
            transport.sites.clear()
        return ""

    transport.fault = leave
    config = small_config("scaffold", **ALL_CLIENTS, rounds=3)
    with pytest.raises(RunFailed, match="all rounds before are saved"):
        run_in_process(config, transport, tmp_path / "run")
    run = run_in_process(config, InProcessTransport(sites), tmp_path / "run")
    assert [line["replies"] for line in run.metrics] == [6, 0, 6]
