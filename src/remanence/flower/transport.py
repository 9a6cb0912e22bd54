"""Flower's grid behind four methods. The only file at the coordinator that uses Flower's messages.

    nodes()                 the ids of the connected nodes
    send(node, message)     send a message; returns its id
    poll()                  the responses since the last call; returns at once
    cancel(message_ids)     ignore the responses to these messages

Flower's own `send_and_receive` waits for all replies, polls every three seconds and does not report
which are missing, so this module pushes and pulls by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from remanence.flower.wire import (
    WireError,
    WireMessage,
    decode_header,
    encode_header,
    flatten_arrays,
    restore_arrays,
)

UNREACHABLE = (3, 4, 5)  # Flower's error codes: message, reply or node unavailable
# the records of a Flower message
HEADER, TEXT, ARRAYS = "header", "text", ("shared_arrays", "site_arrays")


class Response(NamedTuple):
    """The response to a message, or the reason why there is none."""

    message_id: str
    message: WireMessage | None
    problem: str = ""
    unreachable: bool = False  # the node could not be reached


class Transport(Protocol):
    """A network, as the node registry and the session use it."""

    sent_bytes: int  # of arrays, so far
    received_bytes: int

    def nodes(self) -> set[int]: ...
    def send(self, node: int, message: WireMessage, kind: str, group: str) -> str: ...
    def poll(self) -> list[Response]: ...
    def cancel(self, message_ids: Iterable[str]) -> None: ...


class GridTransport:
    """The grid that Flower gives to a ServerApp.

    Args:
        grid: Flower's `Grid`.
        ttl: Seconds after which the SuperLink deletes a message, answered or not.
    """

    def __init__(self, grid: Any, ttl: float = 43_200.0):
        self.grid, self.ttl = grid, ttl
        self.open: set[str] = set()
        # shared arrays are counted once for each site, although they are uploaded once
        self.sent_bytes = self.received_bytes = 0

    def nodes(self) -> set[int]:
        return {int(node) for node in self.grid.get_node_ids()}

    def send(self, node: int, message: WireMessage, kind: str, group: str) -> str:
        """Send a message to a node.

        Args:
            node: The node's id.
            message: What to send.
            kind: "train", "evaluate" or "query": how Flower routes it.
            group: A label for Flower's logs.

        Returns:
            The message's id; empty if the node has just disconnected.
        """
        from flwr.app import Message

        outgoing = Message(
            to_record(message), dst_node_id=node, message_type=kind, ttl=self.ttl, group_id=group
        )
        message_ids = [name for name in self.grid.push_messages([outgoing]) if name]
        if not message_ids:
            return ""
        self.open.add(message_ids[0])
        self.sent_bytes += message.nbytes
        return str(message_ids[0])

    def poll(self) -> list[Response]:
        responses = []
        for incoming in self.grid.pull_messages(sorted(self.open)) if self.open else ():
            message_id = incoming.metadata.reply_to_message_id
            if message_id not in self.open:
                continue
            self.open.discard(message_id)
            response = _read_response(message_id, incoming)
            self.received_bytes += 0 if response.message is None else response.message.nbytes
            responses.append(response)
        return responses

    def cancel(self, message_ids: Iterable[str]) -> None:
        self.open.difference_update(message_ids)


def _read_response(message_id: str, incoming: Any) -> Response:
    if incoming.has_error():
        error = incoming.error
        problem = f"Flower reports error {error.code}: {error.reason}"
        return Response(message_id, None, problem, unreachable=error.code in UNREACHABLE)
    try:
        return Response(message_id, from_record(incoming.content))
    except WireError as error:
        return Response(message_id, None, str(error))


def to_record(message: WireMessage) -> Any:
    """A message as the content of a Flower message."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    layouts: dict[str, Any] = {}
    record: dict[str, Any] = {}
    for group in ARRAYS:
        layouts[group], flat = flatten_arrays(getattr(message, group))
        if flat:
            record[group] = ArrayRecord({dtype: Array(array) for dtype, array in flat.items()})
    return RecordDict(record | {HEADER: ConfigRecord({TEXT: encode_header(message, layouts)})})


def from_record(record: Any) -> WireMessage:
    """The inverse of `to_record`; the arrays are read-only views."""
    try:
        text = record.config_records[HEADER][TEXT]
        flat = {
            group: {
                dtype: array.numpy() for dtype, array in record.array_records.get(group, {}).items()
            }
            for group in ARRAYS
        }
    # numpy raises all of these for a damaged .npy
    except (KeyError, ValueError, TypeError, OSError, EOFError) as error:
        raise WireError(f"not a message of Remanence ({type(error).__name__})") from None
    header, layouts = decode_header(str(text))
    shared_arrays, site_arrays = (
        restore_arrays(layouts.get(group, []), flat[group]) for group in ARRAYS
    )
    return WireMessage(header, site_arrays, shared_arrays)
