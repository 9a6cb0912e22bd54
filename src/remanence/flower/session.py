"""A run of a federation as its engine sees it: whom to ask, what every message says, how long
to wait, and whom to tell.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from remanence.core.errors import InputError
from remanence.engines.table import OUTSIDE_FLOWER
from remanence.flower.node_registry import Node, NodeRegistry
from remanence.flower.transport import Answer
from remanence.flower.wire import WireArrays, WireMessage

SHORTEST, LONGEST = 0.1, 1.0  # seconds between two looks for answers


class Timeouts(NamedTuple):
    """How long the coordinator waits, in real seconds."""

    join_timeout: float = 600.0  # for sites to come, at the start and whenever too few are there
    reply_timeout: float = 1800.0  # for an answer, where the experiment sets no round.deadline
    # until a site that has not answered is greeted, to see whether it has been restarted
    ping_after: float = 60.0
    # for a site that went away in a round to come back: a SuperNode that was killed needs more than
    # a minute
    gone_after: float = 180.0


class ReplyWait(NamedTuple):
    """When the answers of a round are no longer waited for: after some seconds, or when enough
    clients have answered (0: all).
    """

    seconds: float
    enough: int = 0


class RealDeadline(NamedTuple):
    """`round.deadline` in real time: after some seconds (infinity: never), or when a share of
    those asked has answered.
    """

    seconds: float = float("inf")
    share: float = 1.0


@dataclass
class PendingRequest:
    """Work that a site was given."""

    node: Node
    message: WireMessage
    kind: str
    clients: tuple[int, ...]
    number: str
    since: float = field(default_factory=time.monotonic)
    lost: float | None = None  # since when its site is away, or back without a memory of it


class RequestResult(NamedTuple):
    """What became of an errand: a parcel, or a code and a reason."""

    request: PendingRequest
    message: WireMessage | None
    code: str = ""
    reason: str = ""


@dataclass
class Session:
    """`preamble` goes with every message: the run's name, the experiment, what its examples
    look like.
    """

    roster: NodeRegistry
    preamble: dict[str, Any]
    timeouts: Timeouts
    log: Callable[[str], None]
    wanted: int  # answers a round needs where more clients are asked than that; 0: all
    deadline: RealDeadline
    has_test: bool  # does the coordinator have a test set of its own?
    spent: list[tuple[float, float]] = field(
        default_factory=list
    )  # of every answer: seconds until it came, and seconds of work at its site

    def message(
        self, kind: str, about: dict[str, Any], mine: WireArrays, common: WireArrays | None = None
    ) -> WireMessage:
        return WireMessage({**self.preamble, "kind": kind, **about}, mine, common or {})

    def ask(
        self,
        kind: str,
        questions: Sequence[tuple[Node, tuple[int, ...], WireMessage]],
        group: str,
        wait: ReplyWait,
    ) -> Iterator[RequestResult]:
        """Give work to sites, and yield what becomes of each, as it comes."""
        open_: dict[str, PendingRequest] = {}
        for node, clients, parcel in questions:
            errand = PendingRequest(node, parcel, kind, clients, "")
            self._send(errand, open_, group)
        end, answered, pause = time.monotonic() + wait.seconds, 0, SHORTEST
        while open_:
            came = [answer for answer in self.roster.poll() if answer.number in open_]
            for answer in came:
                errand = open_.pop(answer.number)
                if answer.gone:  # it may come back, and then get its work again
                    self.roster.mark_silent(errand.node, "cannot be reached")
                    errand.lost = time.monotonic()
                    open_[f"lost with {answer.number}"] = errand
                    continue
                outcome = _to_result(errand, answer)
                worked = 0.0 if answer.parcel is None else answer.parcel.header.get("seconds")
                self.spent.append(
                    (time.monotonic() - errand.since, worked if isinstance(worked, float) else 0.0)
                )
                answered += len(outcome.request.clients) if outcome.message is not None else 0
                yield outcome
            if open_ and wait.enough and answered >= wait.enough:
                yield from self._give_up(
                    open_, "late", f"the round had the {wait.enough} answers it needed before"
                )
            elif time.monotonic() >= end:
                for errand in list(open_.values()):
                    self.roster.mark_silent(errand.node, f"did not answer in {wait.seconds:g} s")
                yield from self._give_up(
                    open_, "no-answer", f"its site did not answer in {wait.seconds:g} s"
                )
            else:
                yield from self._retry_lost(open_, group)
            pause = SHORTEST if came else min(LONGEST, 1.2 * pause)
            if open_:
                time.sleep(pause)

    def _retry_lost(self, open_: dict[str, PendingRequest], group: str) -> Iterator[RequestResult]:
        """Greet sites that are slow; send work again that a site has lost by a restart; give up
        on sites that stay away.
        """
        now = time.monotonic()
        for number, errand in list(open_.items()):
            node = self.roster.nodes.get(errand.node.number)
            if (
                node is errand.node
                and now - max(errand.since, node.asked) > self.timeouts.ping_after
            ):
                self.roster.ping(node)
            # messages are answered in their order
            forgotten = node is errand.node and not node.ping_id and node.asked > errand.since
            if node is errand.node and not forgotten and errand.lost is None:
                continue
            errand.lost = errand.lost or now
            home = self.roster.node_of(errand.clients[0])
            if home is not None and set(errand.clients) <= set(home.clients):
                self.log(f"site {home.name} has lost its work by a restart, and gets it again")
                self.roster.carrier.cancel([open_.pop(number).number])
                self._send(
                    PendingRequest(home, errand.message, errand.kind, errand.clients, ""),
                    open_,
                    group,
                )
            elif now - errand.lost > self.timeouts.gone_after:
                del open_[number]
                yield RequestResult(
                    errand,
                    None,
                    "away",
                    f"site {errand.node.name} went away and did not come back in"
                    f" {self.timeouts.gone_after:g} s",
                )

    def _send(self, errand: PendingRequest, open_: dict[str, PendingRequest], group: str) -> None:
        errand.number = self.roster.carrier.send(
            errand.node.number, errand.message, errand.kind, group
        )
        if not errand.number:  # gone at this very moment
            errand.lost = time.monotonic()
        open_[errand.number or f"not sent to {errand.node.number}"] = errand

    def _give_up(
        self, open_: dict[str, PendingRequest], code: str, reason: str
    ) -> Iterator[RequestResult]:
        for number in list(open_):
            errand = open_.pop(number)
            self.roster.carrier.cancel([errand.number])
            yield RequestResult(errand, None, code, reason)


def _to_result(errand: PendingRequest, answer: Answer) -> RequestResult:
    parcel = answer.parcel
    if parcel is None:
        return RequestResult(errand, None, "failed", answer.problem)
    if parcel.header.get("kind") == "declined":
        return RequestResult(
            errand,
            None,
            str(parcel.header.get("code", "failed"))[:40],
            str(parcel.header.get("reason", ""))[:500],
        )
    return RequestResult(errand, parcel)


_current: ContextVar[Session | None] = ContextVar("session", default=None)


@contextlib.contextmanager
def activate(session: Session) -> Iterator[Session]:
    """While this lasts, engines called `flower` are engines of this session."""
    token = _current.set(session)
    try:
        yield session
    finally:
        _current.reset(token)


def current_session() -> Session:
    session = _current.get()
    if session is None:
        raise InputError(OUTSIDE_FLOWER)
    return session
