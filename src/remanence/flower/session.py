"""Requests to the sites of one run: sending them, waiting for responses, repeating lost ones."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from remanence.flower.node_registry import Node, NodeRegistry
from remanence.flower.transport import Response
from remanence.flower.wire import WireArrays, WireMessage, digest_of

MIN_POLL_S, MAX_POLL_S = 0.1, 1.0  # seconds between two polls for responses


class Timeouts(NamedTuple):
    """How long the coordinator waits, in real seconds."""

    join_timeout: float = 600.0  # for clients, at the start and whenever too few are available
    reply_timeout: float = 1800.0  # for a response, where the experiment sets no round.deadline
    ping_after: float = 60.0  # before a site that has not responded gets a ping
    # for a site that disconnected in a round to reconnect; Flower accepts a SuperNode that was
    # killed again only after more than a minute
    gone_after: float = 180.0


class ReplyWait(NamedTuple):
    """How long responses are waited for: some seconds, or until enough clients have replied (0:
    all).
    """

    seconds: float
    enough: int = 0


class RealDeadline(NamedTuple):
    """`round.deadline` in real time: some seconds (infinity: no limit), or until a share of the
    sampled clients has replied.
    """

    seconds: float = float("inf")
    share: float = 1.0


@dataclass
class PendingRequest:
    """A request without a response yet."""

    node: Node
    message: WireMessage
    kind: str
    clients: tuple[int, ...]
    message_id: str
    sent_at: float = field(default_factory=time.monotonic)
    # since when the node is disconnected, or known to have lost the request
    lost_at: float | None = None


class RequestResult(NamedTuple):
    """The response to a request: a message, or a code and a reason."""

    request: PendingRequest
    message: WireMessage | None
    code: str = ""
    reason: str = ""


@dataclass
class Session:
    """One run of a federation, as its engine uses it."""

    registry: NodeRegistry
    # in the header of every message: the run's name, the experiment, a description of its examples
    common_header: dict[str, Any]
    timeouts: Timeouts
    log: Callable[[str], None]
    # replies a round uses where it samples more clients than that; 0: all
    target_replies: int
    deadline: RealDeadline
    has_test: bool  # the coordinator has a test set of its own
    # of every response: seconds until it arrived, and seconds of work at its site; NaN where the
    # site does not send these
    response_times: list[tuple[float, float]] = field(default_factory=list)

    def make_message(
        self,
        kind: str,
        header: dict[str, Any],
        site_arrays: WireArrays,
        shared_arrays: WireArrays | None = None,
    ) -> WireMessage:
        header = {**self.common_header, "kind": kind, **header}
        return WireMessage(header, site_arrays, shared_arrays or {})

    def request(
        self,
        kind: str,
        messages: Sequence[tuple[Node, tuple[int, ...], WireMessage]],
        group: str,
        wait: ReplyWait,
    ) -> Iterator[RequestResult]:
        """Send messages to nodes and yield their results in the order of arrival.

        Args:
            kind: "train" or "evaluate", as Flower routes messages.
            messages: For each node the clients concerned, and the message.
            group: A label for Flower's logs.
            wait: When to stop waiting.

        Yields:
            One result for each message; after a timeout, with a code in place of a message.
        """
        pending: dict[str, PendingRequest] = {}
        for node, clients, message in messages:
            self._send(PendingRequest(node, message, kind, clients, ""), pending, group)
        end, answered, pause = time.monotonic() + wait.seconds, 0, MIN_POLL_S
        while pending:
            arrived = [r for r in self.registry.poll() if r.message_id in pending]
            for result in self._read_responses(arrived, pending):
                answered += len(result.request.clients) if result.message is not None else 0
                yield result
            if pending and wait.enough and answered >= wait.enough:
                reason = f"the round already had the {wait.enough} replies it needed"
                yield from self._give_up(pending, "late", reason)
            elif time.monotonic() >= end:
                reason = f"did not respond in {wait.seconds:g} s"
                for request in list(pending.values()):
                    self.registry.mark_silent(request.node, reason)
                yield from self._give_up(pending, "no-answer", f"its site {reason}")
            else:
                yield from self._retry_lost(pending, group)
            pause = MIN_POLL_S if arrived else min(MAX_POLL_S, 1.2 * pause)
            if pending:
                time.sleep(pause)

    def _read_responses(
        self, arrived: list[Response], pending: dict[str, PendingRequest]
    ) -> Iterator[RequestResult]:
        for response in arrived:
            request = pending.pop(response.message_id, None)
            if request is None:  # a second response to the same message
                continue
            if response.unreachable:  # sent again if the site reconnects
                self.registry.mark_silent(request.node, "cannot be reached")
                request.lost_at = time.monotonic()
                pending[f"lost with {response.message_id}"] = request
                continue
            worked = None if response.message is None else response.message.header.get("seconds")
            seconds = worked if isinstance(worked, float) else math.nan
            self.response_times.append((time.monotonic() - request.sent_at, seconds))
            yield _to_result(request, response)

    def _retry_lost(
        self, pending: dict[str, PendingRequest], group: str
    ) -> Iterator[RequestResult]:
        """Ping sites that are slow, resend requests that a site lost in a restart, and give up on
        sites that stay disconnected.
        """
        now = time.monotonic()
        for key, request in list(pending.items()):
            node = self.registry.nodes.get(request.node.node_id)
            connected = node is request.node
            if node is not None and connected:
                if now - max(request.sent_at, node.pinged_at) > self.timeouts.ping_after:
                    self.registry.ping(node)
                # messages are handled in order: a ping sent later and answered first means that
                # the site restarted and lost the request
                restarted = not node.ping_id and node.pinged_at > request.sent_at
                if not restarted and request.lost_at is None:
                    continue
            request.lost_at = request.lost_at or now
            current = self.registry.node_of(request.clients[0])
            if current is not None and set(request.clients) <= set(current.clients):
                self.log(f"site {current.name} lost its work in a restart; it is sent again")
                self.registry.transport.cancel([pending.pop(key).message_id])
                again = PendingRequest(current, request.message, request.kind, request.clients, "")
                self._send(again, pending, group)
            elif now - request.lost_at > self.timeouts.gone_after:
                del pending[key]
                reason = (
                    f"site {request.node.name} disconnected and did not come back in"
                    f" {self.timeouts.gone_after:g} s"
                )
                yield RequestResult(request, None, "away", reason)

    def _send(
        self, request: PendingRequest, pending: dict[str, PendingRequest], group: str
    ) -> None:
        node_id = request.node.node_id
        request.message_id = self.registry.transport.send(
            node_id, request.message, request.kind, group
        )
        if not request.message_id:  # the node has just disconnected
            request.lost_at = time.monotonic()
        pending[request.message_id or f"not sent to {node_id}"] = request

    def _give_up(
        self, pending: dict[str, PendingRequest], code: str, reason: str
    ) -> Iterator[RequestResult]:
        for key in list(pending):
            request = pending.pop(key)
            self.registry.transport.cancel([request.message_id])
            yield RequestResult(request, None, code, reason)


def _to_result(request: PendingRequest, response: Response) -> RequestResult:
    message = response.message
    if message is None:
        return RequestResult(request, None, "failed", response.problem)
    if message.header.get("kind") == "declined":
        code = str(message.header.get("code") or "failed")[:40]
        reason = str(message.header.get("reason") or "it gives no reason")[:500]
        return RequestResult(request, None, code, reason)
    # a response of another round, run or site, which has been sent before
    if message.header.get("request") != digest_of(request.message.header, request.message.arrays):
        return RequestResult(request, None, "wrong-request", "it responds to another message")
    return RequestResult(request, message)
