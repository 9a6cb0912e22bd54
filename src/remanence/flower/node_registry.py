"""Which sites are connected, which clients each of them has, which are silent and which decline.

Flower's node ids do not identify sites: a site that was restarted may come back with another id. So
every new node gets a ping, and its response lists the site's clients. A node that did not respond
in time is silent: it gets another ping, and no work until it responds. Messages are handled in
order, so a ping that is answered before older work means that this work was lost.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from remanence.data.population import ClientData, FederatedPopulation, PartitionIndices
from remanence.flower.transport import Response, Transport
from remanence.flower.wire import WireMessage

NODES_POLL_S = 2.0  # seconds between two requests for the list of connected nodes


@dataclass
class Node:
    """A connected node, and what its site reported."""

    node_id: int
    pinged_at: float
    ping_id: str  # message id of the ping without a response yet; empty: there is none
    name: str = ""
    announced_clients: tuple[int, ...] = ()  # the clients that the site lists
    clients: tuple[int, ...] = ()  # those of them that are assigned to it
    simulated: bool = False  # its data are shares of the experiment's own
    evaluates: bool = True  # as its site reports
    budget_spent: bool = False  # its site declined counts: they would exceed its privacy budget
    logged: set[str] = field(default_factory=set)  # codes that need not be logged again
    declined: tuple[str, str] | None = None  # code and reason
    silent: bool = False  # it missed a timeout and has not responded since

    @property
    def ready(self) -> bool:
        """Whether the node can be given work."""
        return bool(self.clients) and not self.silent and self.declined is None


class NodeRegistry:
    """The sites of a run.

    Args:
        transport: The network.
        ping_message: The message that asks a site for its clients.
        num_clients: How many clients the experiment has.
        log: Called with one sentence for each event.
    """

    def __init__(
        self,
        transport: Transport,
        ping_message: WireMessage,
        num_clients: int,
        log: Callable[[str], None],
    ):
        self.transport, self.ping_message = transport, ping_message
        self.num_clients, self.log = num_clients, log
        self.nodes: dict[int, Node] = {}
        # by client, as last reported (`SiteTask.sizes`); kept while a site is away
        self.sizes: dict[int, list[list[int]]] = {}
        self._nodes_polled_at = float("-inf")

    def poll(self) -> list[Response]:
        """Update the list of nodes and handle responses to pings.

        Returns:
            All other responses that have arrived.
        """
        if time.monotonic() - self._nodes_polled_at >= NODES_POLL_S:
            self._update_nodes()
            self._nodes_polled_at = time.monotonic()
        others = []
        pinged = {node.ping_id: node for node in self.nodes.values() if node.ping_id}
        for response in self.transport.poll():
            if response.message_id in pinged:
                self._read_ping_response(pinged[response.message_id], response)
            else:
                others.append(response)
        self._assign_clients()
        return others

    def node_of(self, client: int) -> Node | None:
        """The node that can be given work for a client now."""
        return next(
            (node for node in self.nodes.values() if node.ready and client in node.clients), None
        )

    def group_by_node(self, clients: np.ndarray) -> tuple[list[tuple[Node, np.ndarray]], list[int]]:
        """Group clients by their node.

        Returns:
            For each node the positions of its clients in `clients`; and the clients whose node is
            not available.
        """
        positions: dict[int, list[int]] = defaultdict(list)
        nodes: dict[int, Node] = {}
        unavailable = []
        for position, client in enumerate(clients.tolist()):
            node = self.node_of(client)
            if node is None:
                unavailable.append(client)
            else:
                nodes[node.node_id] = node
                positions[node.node_id].append(position)
        groups = [
            (nodes[node_id], np.array(group, dtype=np.int64))
            for node_id, group in positions.items()
        ]
        return groups, unavailable

    def available(self) -> np.ndarray:
        """Which clients can be given work now: [K] bool."""
        mask = np.zeros(self.num_clients, dtype=bool)
        for node in self.nodes.values():
            if node.ready:
                mask[list(node.clients)] = True
        return mask

    def declined(self) -> dict[int, tuple[str, str]]:
        """Clients whose site declined the whole run, with code and reason."""
        return {
            client: node.declined
            for node in self.nodes.values()
            if node.declined is not None
            for client in node.clients
        }

    def ping(self, node: Node) -> None:
        """Ask a site for its clients, unless an earlier ping has no response yet."""
        if not node.ping_id:
            node.pinged_at = time.monotonic()
            node.ping_id = self.transport.send(node.node_id, self.ping_message, "query", "ping")

    def mark_silent(self, node: Node, why: str) -> None:
        """Give a node no work until it responds to a ping."""
        if not node.silent:
            self.log(
                f"site {node.name or node.node_id} {why}: it gets no work until it responds again"
            )
        node.silent = True
        self.ping(node)

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Poll until a condition holds.

        Returns:
            Whether it held in time.
        """
        end = time.monotonic() + seconds
        while not condition():
            self.poll()
            if condition():
                break
            if time.monotonic() >= end:
                return False
            time.sleep(0.2)
        return True

    def _update_nodes(self) -> None:
        connected = self.transport.nodes()
        for node_id in sorted(set(self.nodes) - connected):
            gone = self.nodes.pop(node_id)
            self.transport.cancel([gone.ping_id])
            if gone.name:
                self.log(f"site {gone.name} disconnected (node {node_id})")
        for node_id in sorted(connected - set(self.nodes)):
            self.nodes[node_id] = node = Node(node_id, 0.0, "")
            self.ping(node)

    def _read_ping_response(self, node: Node, response: Response) -> None:
        node.ping_id = ""
        if response.unreachable:
            self.mark_silent(node, "cannot be reached")
            return
        header: dict[str, Any] = {} if response.message is None else response.message.header
        was_ready, returned = node.ready, node.silent and bool(node.clients)
        node.silent = False
        node.name = str(header.get("site", ""))[:100] or node.name or f"node {node.node_id}"
        self._read_clients(node, header.get("clients_here"), log_conflicts=not was_ready)
        if header.get("kind") != "site_info":
            code = str(header.get("code") or "failed")[:40]
            reason = str(header.get("reason") or response.problem or "it gives no reason")[:500]
            node.declined = (code, reason)
            self.log(f"site {node.name} declines ({code}): {reason}")
        elif node.clients:
            node.declined = None
            self.sizes |= _read_sizes(header.get("sizes"), node.clients)
            node.simulated = header.get("simulated") is True
            node.evaluates = header.get("evaluates") is not False
            if not was_ready:
                plural = "s" if len(node.clients) > 1 else ""
                clients = f"client{plural} {', '.join(map(str, node.clients))}"
                how = "is back" if returned else "joined"
                counts = "" if node.evaluates else "; it sends no counts"
                self.log(f"site {node.name} {how} with {clients} (node {node.node_id}){counts}")

    def _read_clients(self, node: Node, clients: Any, log_conflicts: bool) -> None:
        """Store the clients that a site lists, if the list is valid."""
        if not isinstance(clients, list) or not all(
            type(client) is int and 0 <= client < self.num_clients for client in clients
        ):
            return
        node.announced_clients = tuple(sorted(set(clients)))
        node.clients = tuple(c for c in node.clients if c in node.announced_clients)
        self._assign_clients()
        for client in node.announced_clients if log_conflicts else ():
            if client not in node.clients and (owner := self._owner_of(client)) is not None:
                self.log(
                    f"site {node.name} lists client {client}, which belongs to site"
                    f" {owner.name}: this is ignored"
                )

    def _assign_clients(self) -> None:
        """A client belongs to the first site that lists it. Another one that lists it, whatever
        its name, gets it only when the first is disconnected or silent.
        """
        for node in self.nodes.values():
            for client in node.announced_clients:
                if client in node.clients or node.silent:
                    continue
                owner = self._owner_of(client)
                if owner is not None and not owner.silent:
                    continue
                if owner is not None:
                    owner.clients = tuple(other for other in owner.clients if other != client)
                    self.log(
                        f"client {client} belongs to site {node.name} now (node {node.node_id})"
                    )
                node.clients = tuple(sorted((*node.clients, client)))

    def _owner_of(self, client: int) -> Node | None:
        return next((node for node in self.nodes.values() if client in node.clients), None)


def _read_sizes(reported: Any, clients: tuple[int, ...]) -> dict[int, list[list[int]]]:
    """The valid entries of the sizes that a site reports."""
    sizes = {}
    for client in clients:
        steps = reported.get(str(client)) if isinstance(reported, dict) else None
        valid = isinstance(steps, list) and all(
            isinstance(row, list) and all(type(n) is int and 0 <= n < 1 << 40 for n in row)
            for row in steps
        )
        if (
            valid
            and steps
            and all(len(row) == 2 for row in steps[:-1])
            and len(steps) > 1
            and len(steps[-1]) == 1
        ):
            sizes[client] = steps
    return sizes


@dataclass(frozen=True)
class RemotePopulation(FederatedPopulation):
    """How many examples every client has, as its site reports; the coordinator does not know which.
    A client that never joined has none.
    """

    registry: NodeRegistry | None = None

    def at(self, time_step: int) -> ClientData:
        assert self.registry is not None
        count = self.registry.num_clients
        reported = [self.registry.sizes.get(client, [[0, 0], [0]]) for client in range(count)]
        # [K, 2]
        sizes = np.array(
            [steps[min(time_step, len(steps) - 2)] for steps in reported], dtype=np.int64
        ).reshape(-1, 2)
        train, valid = (_placeholder_rows(sizes[:, column]) for column in (0, 1))
        return ClientData(train, valid, np.zeros(count, dtype=np.int64))


def _placeholder_rows(sizes: np.ndarray) -> PartitionIndices:
    """Indices of which only the numbers are known; all are 0 and take no memory."""
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return PartitionIndices(np.broadcast_to(np.zeros((), np.int64), (int(offsets[-1]),)), offsets)
