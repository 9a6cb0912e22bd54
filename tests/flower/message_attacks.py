"""Messages between a coordinator and a site as a network or a stranger may deliver them: repeated,
late, early, to another site, of another run or experiment, damaged, too large.

A message that is valid in every respect and new is no attack: only the coordinator can send it,
because nodes are authenticated.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from in_process import (
    SHORT_TIMEOUTS,
    InProcessTransport,
    make_site,
    run_in_process,
    small_config,
)

from remanence.config import Experiment
from remanence.core import pytree
from remanence.core.declarations import REPLY, RESPONSE_HEADER
from remanence.flower import site as site_module
from remanence.flower.site import Site
from remanence.flower.transport import Response
from remanence.flower.wire import WireMessage, digest_of, from_bytes, to_bytes
from remanence.results.run import Run

ROUNDS, ATTACKED = 3, 11  # the node whose messages are attacked
OTHER_RUNS = ("another-run-1", "another-run-2", "another-run-3")
ODD = (None, "text", [], {}, -1, 1.5, "9" * 400, [[0]], {"a": 1})
Step = tuple[int, int]  # which attack, and a number to draw its details from


def federation_config(**changes: Any) -> Experiment:
    return small_config("scaffold", rounds=ROUNDS, **{"clients.sample": 6} | changes)


def three_sites(folder: Path) -> dict[int, Site]:
    return {10 + n: make_site(folder, f"site-{n}", (2 * n, 2 * n + 1)) for n in range(3)}


# ------------------------------------------------------------------------------- attacks on a site


def replay(message: WireMessage, draw: random.Random, lab: SiteLab) -> WireMessage:
    return draw.choice(lab.sent)


def for_another_site(message: WireMessage, draw: random.Random, lab: SiteLab) -> WireMessage:
    return draw.choice(lab.foreign)


def other_clients(message: WireMessage, draw: random.Random, lab: SiteLab) -> WireMessage:
    own, foreign = [0, 1], [4, 5]
    clients: Any = draw.choice(
        (
            [0, 4],
            foreign,
            [0, 0],
            [],
            ["0"],
            [None],
            own * 5000,
            -1,
            [-1],
            [2**70],
            {"0": 1},
            [True],
        )
    )
    count = len(clients) if isinstance(clients, list) else 1
    rounds = [-1] * count
    return message._replace(
        header=message.header | {"clients": clients, "state_rounds": rounds, "owners": clients}
    )


def odd_round(message: WireMessage, draw: random.Random, lab: SiteLab) -> WireMessage:
    round = draw.choice((-1, 10**30, "2", None, True, 2.0, [1], 1 << 40))
    return message._replace(header=message.header | {"round": round})


def damaged_header(message: WireMessage, draw: random.Random, lab: SiteLab) -> WireMessage:
    header = dict(message.header)
    names = set(header) - {"run", "experiment", "examples"}
    name = draw.choice(sorted(names))
    if draw.random() < 0.3 and name != "validate":
        del header[name]
    else:
        header[name] = draw.choice(ODD)
    return message._replace(header=header)


def damaged_arrays(message: WireMessage, draw: random.Random, lab: SiteLab) -> WireMessage:
    arrays = dict(message.arrays)
    if not arrays:
        return other_kind(message, draw, lab)
    name = draw.choice(sorted(arrays))
    old = arrays.pop(name)
    damage = draw.randrange(7)
    broken = np.array(old)
    if damage == 0:
        pass  # missing
    elif damage == 1:
        arrays |= {name: old, f"start/params/more-{draw.random()}": np.zeros(3)}
    elif damage == 2:
        arrays[name] = np.full_like(old, np.nan)
    elif damage == 3:
        broken.reshape(-1)[:1] = np.inf
        arrays[name] = broken
    elif damage == 4:
        arrays[f"{name}/deeper"] = old
    elif damage == 5:
        arrays[name] = np.zeros((*old.shape, 2))
    else:
        arrays[name] = np.zeros(7, dtype=draw.choice((np.float32, np.int64, np.bool_)))
    return WireMessage(message.header, arrays)


def oversized(message: WireMessage, draw: random.Random, lab: SiteLab) -> WireMessage:
    if draw.random() < 0.5:
        return message._replace(header=message.header | {"run": "x" * 10**6})
    more = {"start/params/large": np.zeros(10**6)}
    return WireMessage(message.header, dict(message.arrays) | more)


def other_experiment(message: WireMessage, draw: random.Random, lab: SiteLab) -> WireMessage:
    """With the name of this run, once the site has files of it."""
    changes: Any = draw.choice(
        (
            {"method": "fedavg"},
            {"method": "scaffold(option=1)"},
            {"seed": 5},
            {"local": {"optimizer": "sgd(lr=1000)"}},
            {"method": "scaffold+"},
            {"drift": {"schedule": "table(path='/etc/passwd')"}},
            {"model": "os:system(command='true')"},
            {"rounds": 3},
            {"unknown": 1},
        )
    )
    header = message.header | {"experiment": message.header["experiment"] | changes}
    if not lab.folder_of_run.exists():
        header["run"] = draw.choice(OTHER_RUNS)
    return message._replace(header=header)


def other_run(message: WireMessage, draw: random.Random, lab: SiteLab) -> WireMessage:
    odd = ("../../elsewhere", "", None, 5, "A" * 10, ".", "a/b/c/d/e", "..%2f..%2fetc")
    run = draw.choice((*OTHER_RUNS, *odd))
    return message._replace(header=message.header | {"run": run})


def other_kind(message: WireMessage, draw: random.Random, lab: SiteLab) -> WireMessage:
    kind: Any = draw.choice((None, "declined", "trained", "", 3, ["train"], {"train": 1}, "Train"))
    return message._replace(header=message.header | {"kind": kind})


def empty(message: WireMessage, draw: random.Random, lab: SiteLab) -> WireMessage:
    return WireMessage({"kind": draw.choice(("ping", "train", "score", "personal"))}, {})


SITE_ATTACKS: tuple[Callable[[WireMessage, random.Random, SiteLab], WireMessage], ...] = (
    replay,
    for_another_site,
    other_clients,
    odd_round,
    damaged_header,
    damaged_arrays,
    oversized,
    other_experiment,
    other_run,
    other_kind,
    empty,
)


@dataclass
class SiteLab:
    """One site, and the messages that an honest coordinator sends to it and to another one."""

    home: Path
    trained: Counter[str] = field(default_factory=Counter)  # by hash of the request

    @cached_property
    def site(self) -> Site:
        return make_site(self.home / "attacked", "site-0", (0, 1))

    @cached_property
    def transport(self) -> InProcessTransport:
        transport = InProcessTransport(three_sites(self.home / "honest"))
        run_in_process(federation_config(), transport, self.home / "run")
        return transport

    @cached_property
    def sent(self) -> list[WireMessage]:
        return [from_bytes(to_bytes(m)) for node, m in self.transport.sent if node == 10]

    @cached_property
    def foreign(self) -> list[WireMessage]:
        return [from_bytes(to_bytes(m)) for node, m in self.transport.sent if node == ATTACKED]

    @cached_property
    def honest(self) -> list[WireMessage]:
        """The responses where nobody attacks."""
        self.start_anew()
        return [self.site.answer(message) for message in self.sent]

    @property
    def folder_of_run(self) -> Path:
        return self.site.folder / str(self.sent[0].header["run"])

    def start_anew(self) -> None:
        """An empty state folder; the data stay in memory."""
        folder = self.home / "state"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self.site.folder = folder
        self.trained.clear()

    def answer(self, message: WireMessage) -> WireMessage:
        """The site's response; counts what it trains."""
        real = site_module.make_work

        def counted(*arguments: Any) -> Any:
            work = real(*arguments)
            if message.header["kind"] == "train":
                self.trained[digest_of(message.header, message.arrays)] += 1
            return work

        with mock.patch.object(site_module, "make_work", counted):
            response = self.site.answer(message)
        check_response(message, response)
        return response

    def states(self) -> dict[str, bytes]:
        """The files of the clients' states of the honest run."""
        found = self.folder_of_run.glob("client-*/round-*.safetensors")
        return {str(path.relative_to(self.folder_of_run)): path.read_bytes() for path in found}


def check_response(message: WireMessage, response: WireMessage) -> None:
    """It can be sent, and has declared fields only; a decline has no arrays."""
    back = from_bytes(to_bytes(response))
    assert set(back.header) <= set(RESPONSE_HEADER)
    assert {name.partition(pytree.SEPARATOR)[0] for name in back.arrays} <= set(REPLY)
    if back.header["kind"] == "declined":
        assert not back.arrays
        assert isinstance(back.header["code"], str)
        assert back.header["reason"]
    else:
        kinds = {"ping": "site_info", "train": "trained", "score": "counts", "personal": "counts"}
        assert back.header["kind"] == kinds[message.header["kind"]]


def same(a: WireMessage, b: WireMessage) -> bool:
    """Equal but for the seconds of work."""
    return (
        {**a.header, "seconds": 0} == {**b.header, "seconds": 0}
        and set(a.arrays) == set(b.arrays)
        and all(np.array_equal(a.arrays[name], b.arrays[name]) for name in a.arrays)
    )


def attack_site(lab: SiteLab, steps: list[Step], log: list[str]) -> None:
    """Attacks in a sequence, with the honest messages in between, in order.

    Raises:
        AssertionError: The property does not hold; `log` says after what.
    """
    honest = lab.honest
    lab.start_anew()
    done = 0
    for which, number in steps:
        draw = random.Random(number)
        for _ in range(draw.randrange(3)):  # honest messages before this attack
            if done < len(lab.sent):
                send_honest(lab, done, log)
                done += 1
        function = SITE_ATTACKS[which % len(SITE_ATTACKS)]
        message = function(draw.choice(lab.sent), draw, lab)
        log.append(f"{function.__name__} ({number}) of {message.header.get('kind')}")
        before, digest = lab.states(), digest_of(message.header, message.arrays)
        response = lab.answer(message)
        log.append(f"  -> {response.header.get('code', response.header['kind'])}")
        after = lab.states()
        changed = [name for name in set(before) & set(after) if before[name] != after[name]]
        assert not changed, f"the attack changes the state {changed[0]}"
        for client in {name.partition("/")[0] for name in before}:
            newest = [max(n for n in files if n.startswith(client)) for files in (before, after)]
            assert newest[1] >= newest[0], f"the state of {client} goes back"
        assert lab.trained[digest] <= 1, "a repeated request is trained again"
    while done < len(lab.sent):
        send_honest(lab, done, log)
        done += 1
    assert len(honest) == done
    assert max(lab.trained.values()) == 1


def send_honest(lab: SiteLab, number: int, log: list[str]) -> None:
    log.append(f"honest {lab.sent[number].header['kind']}")
    response = lab.answer(lab.sent[number])
    assert same(response, lab.honest[number]), f"an honest message gets {response.header}"


# ------------------------------------------------------------------------ attacks on a coordinator

Reply = WireMessage
ReplyAttack = Callable[[Reply, random.Random, "AttackedTransport"], "Reply | None"]


def earlier_reply(reply: Reply, draw: random.Random, net: AttackedTransport) -> Reply | None:
    """A response to an earlier message of this run."""
    return draw.choice(net.answered) if net.answered else None


def reply_of_another_site(
    reply: Reply, draw: random.Random, net: AttackedTransport
) -> Reply | None:
    return draw.choice(net.others) if net.others else None


def reply_of_another_run(reply: Reply, draw: random.Random, net: AttackedTransport) -> Reply:
    """The same site, round and clients."""
    kept = [r for r in net.other_run if r.header["kind"] == reply.header["kind"]]
    return draw.choice(kept)


def no_message(reply: Reply, draw: random.Random, net: AttackedTransport) -> None:
    """Another version of the protocol, or bytes that are no message."""
    return None


def odd_reply_header(reply: Reply, draw: random.Random, net: AttackedTransport) -> Reply:
    odd: dict[str, Any] = draw.choice(
        (
            {"kind": "counts" if reply.header["kind"] == "trained" else "trained"},
            {"request": "0" * 64},
            {"request": None},
            {"clients": [0, 1], "request": ""},
            {"round": None, "request": 5},
        )
    )
    return Reply(reply.header | odd, {} if "kind" in odd else dict(reply.arrays))


def damaged_reply(reply: Reply, draw: random.Random, net: AttackedTransport) -> Reply:
    """Arrays that no correct site sends."""
    arrays = dict(reply.arrays)
    name = draw.choice(sorted(arrays))
    old = arrays.pop(name)
    damage = draw.randrange(6)
    if name in ("loss", "weight") and damage in (1, 2):
        # a loss may be NaN where a model diverges, and both may have any floating-point type
        damage = 0
    if damage == 0:
        arrays[name] = np.zeros((*old.shape, 2), dtype=old.dtype)
    elif damage == 1:
        arrays[name] = np.full(old.shape, np.nan) if old.dtype.kind == "f" else -1 - abs(old)
    elif damage == 2:
        arrays[name] = old.astype(np.float32 if old.dtype != np.float32 else np.float64)
    elif damage == 3:
        arrays[name] = old[:1]
    elif damage == 4:
        arrays[f"{name}/deeper"] = old
    return Reply(reply.header, arrays)


def oversized_reply(reply: Reply, draw: random.Random, net: AttackedTransport) -> Reply:
    return Reply(reply.header, dict(reply.arrays) | {"payload/scaffold/more": np.zeros(10**5)})


def forged_decline(reply: Reply, draw: random.Random, net: AttackedTransport) -> Reply:
    code: Any = draw.choice(("policy", "", 7, None, "x" * 1000))
    return Reply(
        {"kind": "declined", "code": code, "reason": draw.choice((None, ["?"], "a" * 10**5))}, {}
    )


REPLY_ATTACKS: tuple[ReplyAttack, ...] = (
    earlier_reply,
    reply_of_another_site,
    reply_of_another_run,
    no_message,
    odd_reply_header,
    damaged_reply,
    oversized_reply,
    forged_decline,
)


class AttackedTransport(InProcessTransport):
    """Replaces responses of one site. A response to a ping is left alone: who the sites are is not
    what is attacked.

    Args:
        sites: By node id.
        steps: For each response of the attacked site, which attack; those beyond are honest.
        other_run: Responses of the attacked site in another run.
    """

    def __init__(self, sites: dict[int, Site], steps: list[Step], other_run: list[Reply]):
        super().__init__(sites)
        self.steps, self.other_run = steps, other_run
        self.answered: list[Reply] = []  # honest responses of the attacked site so far
        self.others: list[Reply] = []  # of the other sites
        self.hit: dict[int, str] = {}  # by round: the attack on the reply
        self.count = 0

    def send(self, node: int, message: WireMessage, kind: str, group: str) -> str:
        message_id = super().send(node, message, kind, group)
        reply = self.ready[message_id].message
        assert reply is not None
        if message.header["kind"] == "ping":
            return message_id
        if node != ATTACKED:
            self.others.append(reply)
            return message_id
        self.count += 1
        if self.count <= len(self.steps):
            self._attack(message_id, message, reply, *self.steps[self.count - 1])
        self.answered.append(reply)
        return message_id

    def _attack(
        self, message_id: str, message: WireMessage, reply: Reply, which: int, number: int
    ) -> None:
        if which % 3 == 0:  # two thirds of the responses are attacked
            return
        function = REPLY_ATTACKS[which % len(REPLY_ATTACKS)]
        changed = function(reply, random.Random(number), self)
        if changed is None and function is not no_message:  # nothing to replay yet
            return
        problem = "" if changed is not None else "not a message of Remanence"
        self.ready[message_id] = Response(message_id, changed, problem)
        if message.header["kind"] == "train":
            self.hit[int(message.header["round"])] = function.__name__


@dataclass
class CoordinatorLab:
    """Sites whose state folders are emptied for every run, and the honest results."""

    home: Path
    models: dict[tuple[bool, ...], Any] = field(default_factory=dict)

    @cached_property
    def sites(self) -> dict[int, Site]:
        return three_sites(self.home)

    @cached_property
    def other_run(self) -> list[Reply]:
        transport = InProcessTransport(self.sites)
        run_in_process(federation_config(), transport, self.home / "other")
        messages = [m for node, m in transport.sent if node == ATTACKED]
        return [self.sites[ATTACKED].answer(m) for m in messages if m.header["kind"] != "ping"]

    def run(self, steps: list[Step]) -> tuple[Run, AttackedTransport]:
        other = self.other_run
        for site in self.sites.values():
            shutil.rmtree(site.folder)
            site.folder.mkdir()
        transport = AttackedTransport(self.sites, steps, other)
        out = self.home / "attacked"
        shutil.rmtree(out, ignore_errors=True)
        return run_in_process(federation_config(), transport, out, SHORT_TIMEOUTS), transport
