"""Who is there: which sites are connected, which clients live where, who is silent and who
declines.

A node id says nothing: a site that was restarted may come back under another one. So every node
that appears is greeted, and says which clients it has. A node that did not answer in time is
greeted again and asked for nothing until it has answered; messages are answered in their order, so
a greeting that is answered before older work means that this work was lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from remanence.data.population import ClientData, FederatedPopulation, PartitionIndices
from remanence.flower.transport import Answer, Transport
from remanence.flower.wire import WireMessage

LOOK = 2.0  # seconds between two looks at who is connected


@dataclass
class Node:
    """A connection, and what the site behind it said of itself."""

    number: int
    asked: float  # when it was last greeted
    ping_id: str  # the greeting that is not answered yet; empty: it is
    name: str = ""
    announced_clients: tuple[int, ...] = ()  # the clients it says it has
    clients: tuple[int, ...] = ()  # those of them that are believed to live there
    shared: bool = False
    evaluates: bool = True
    declined: tuple[str, str] | None = None  # code and reason
    silent: bool = False  # it has not answered in time, and nothing since

    @property
    def ready(self) -> bool:
        """Can it be given work?"""
        return bool(self.clients) and not self.silent and self.declined is None


class NodeRegistry:
    """The sites of a run. `hello` is the greeting; `say` is told what happens, in sentences."""

    def __init__(
        self, carrier: Transport, hello: WireMessage, clients: int, say: Callable[[str], None]
    ):
        self.carrier, self.hello, self.count, self.say = carrier, hello, clients, say
        self.nodes: dict[int, Node] = {}
        # by client, as last told (`Bench.sizes`): a site that is away still has its rows
        self.sizes: dict[int, list[list[int]]] = {}
        self.looked = float("-inf")

    def poll(self) -> list[Answer]:
        """See who came and went, and collect what came back; greetings are dealt with here, the
        rest is returned.
        """
        if time.monotonic() - self.looked >= LOOK:
            self._see_who_is_connected()
            self.looked = time.monotonic()
        rest = []
        greeted = {node.ping_id: node for node in self.nodes.values() if node.ping_id}
        for answer in self.carrier.poll():
            if answer.number in greeted:
                self._meet(greeted[answer.number], answer)
            else:
                rest.append(answer)
        self._settle_claims()
        return rest

    def node_of(self, client: int) -> Node | None:
        """Where a client can be given work now."""
        return next(
            (node for node in self.nodes.values() if node.ready and client in node.clients), None
        )

    def present(self) -> np.ndarray:
        """Who can be given work now. -> [K] bool"""
        there = np.zeros(self.count, dtype=bool)
        for node in self.nodes.values():
            if node.ready:
                there[list(node.clients)] = True
        return there

    def declined(self) -> dict[int, tuple[str, str]]:
        """Clients whose site said no to the whole run: code and reason."""
        return {
            client: node.declined
            for node in self.nodes.values()
            if node.declined is not None
            for client in node.clients
        }

    def ping(self, node: Node) -> None:
        """Ask a site who it is; nothing happens while an earlier greeting is on its way."""
        if not node.ping_id:
            node.asked, node.ping_id = (
                time.monotonic(),
                self.carrier.send(node.number, self.hello, "query", "hello"),
            )

    def mark_silent(self, node: Node, why: str) -> None:
        """A site did not answer in time: nothing is asked of it until it says something."""
        if not node.silent:
            self.say(
                f"site {node.name or node.number} {why}: it is left alone until it answers again"
            )
        node.silent = True
        self.ping(node)

    def wait_until(self, enough: Callable[[], bool], seconds: float) -> bool:
        """Look until there is enough of whatever is counted. -> was there in time?"""
        end = time.monotonic() + seconds
        while not enough():
            self.poll()
            if enough():
                break
            if time.monotonic() >= end:
                return False
            time.sleep(0.2)
        return True

    def _see_who_is_connected(self) -> None:
        connected = self.carrier.nodes()
        for number in sorted(set(self.nodes) - connected):
            gone = self.nodes.pop(number)
            self.carrier.cancel([gone.ping_id])
            if gone.name:
                self.say(f"site {gone.name} went away (node {number})")
        for number in sorted(connected - set(self.nodes)):
            self.nodes[number] = node = Node(number, 0.0, "")
            self.ping(node)

    def _meet(self, node: Node, answer: Answer) -> None:
        node.ping_id = ""
        if answer.gone:
            self.mark_silent(node, "cannot be reached")
            return
        about: dict[str, Any] = {} if answer.parcel is None else answer.parcel.header
        name = str(about.get("site", ""))[:100] or node.name or f"node {node.number}"
        known, returned, node.silent, node.name = (
            node.ready,
            node.silent and bool(node.clients),
            False,
            name,
        )
        clients = about.get("clients_here")
        if isinstance(clients, list) and all(
            type(client) is int and 0 <= client < self.count for client in clients
        ):
            node.announced_clients = tuple(sorted(set(clients)))
            node.clients = tuple(
                client for client in node.clients if client in node.announced_clients
            )
            self._settle_claims()
            for client in node.announced_clients if not known else ():
                if client not in node.clients and (holder := self._holder(client)) is not None:
                    self.say(
                        f"site {name} claims client {client}, which lives at site"
                        f" {holder.name}: it is not believed"
                    )
        if about.get("kind") == "hello" and node.clients:
            node.declined = None
            self.sizes |= _read_sizes(about.get("sizes"), node.clients)
            node.shared, node.evaluates = (
                about.get("shared") is True,
                about.get("evaluates") is not False,
            )
            has = (
                f"client{'s' if len(node.clients) > 1 else ''} {', '.join(map(str, node.clients))}"
            )
            if not known:
                self.say(
                    f"site {name} {'is back' if returned else 'is here'} with {has} (node"
                    f" {node.number})"
                )
        elif about.get("kind") != "hello":
            code, reason = (
                str(about.get("code", "failed"))[:40],
                str(about.get("reason", answer.problem))[:500],
            )
            node.declined = (code, reason)
            self.say(f"site {name} declines ({code}): {reason}")

    def _settle_claims(self) -> None:
        """A client lives at one site: another that claims it, whatever its name, gets it only
        when the first is gone or silent.
        """
        for node in self.nodes.values():
            for client in (
                client
                for client in node.announced_clients
                if client not in node.clients and not node.silent
            ):
                holder = self._holder(client)
                if holder is None or holder.silent:
                    if holder is not None:
                        holder.clients = tuple(other for other in holder.clients if other != client)
                        self.say(
                            f"client {client} lives at site {node.name} now (node {node.number})"
                        )
                    node.clients = tuple(sorted((*node.clients, client)))

    def _holder(self, client: int) -> Node | None:
        return next((node for node in self.nodes.values() if client in node.clients), None)


def _read_sizes(told: Any, clients: tuple[int, ...]) -> dict[int, list[list[int]]]:
    """What a site says of its rows, as far as it makes sense."""
    sizes = {}
    for client in clients:
        steps = told.get(str(client)) if isinstance(told, dict) else None
        good = isinstance(steps, list) and all(
            isinstance(row, list) and all(type(n) is int and 0 <= n < 1 << 40 for n in row)
            for row in steps
        )
        if (
            good
            and steps
            and all(len(row) == 2 for row in steps[:-1])
            and len(steps) > 1
            and len(steps[-1]) == 1
        ):
            sizes[client] = steps
    return sizes


@dataclass(frozen=True)
class RemotePopulation(FederatedPopulation):
    """How many rows every client has, as its site tells; which ones they are nobody else knows.
    A client that never came has none.
    """

    roster: NodeRegistry | None = None

    def at(self, time_step: int) -> ClientData:
        assert self.roster is not None
        told = [self.roster.sizes.get(client, [[0, 0], [0]]) for client in range(self.roster.count)]
        # [K, 2]
        pairs = np.array(
            [steps[min(time_step, len(steps) - 2)] for steps in told], dtype=np.int64
        ).reshape(-1, 2)
        train, valid = (_unseen(pairs[:, column]) for column in (0, 1))
        return ClientData(train, valid, np.zeros(self.roster.count, dtype=np.int64))


def _unseen(sizes: np.ndarray) -> PartitionIndices:
    """Rows of which only the numbers are known; their ids are one 0 that takes no memory."""
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return PartitionIndices(np.broadcast_to(np.zeros((), np.int64), (int(offsets[-1]),)), offsets)
