"""Flower as a carrier: the only file at the coordinator that knows Flower's messages.

    nodes() -> who is connected        send(node, parcel) -> a number for it
    collect() -> what came back        forget(numbers): nobody waits for these any more

Replies are matched by the message they answer. Flower's own `send_and_receive` waits for all, looks
every three seconds and tells nothing of who is missing, so we push and pull ourselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from remanence.flower.wire import (
    WireError,
    WireMessage,
    flatten_arrays,
    pack_text,
    restore_arrays,
    unpack_text,
)

GONE = (3, 4, 5)  # Flower's error codes: the message, its reply or the node is unavailable
ABOUT, TEXT, GROUPS = "about", "text", ("shared_arrays", "site_arrays")  # the records of a message


class Answer(NamedTuple):
    """What came back for a message: a parcel, or why there is none."""

    number: str
    parcel: WireMessage | None
    problem: str = ""
    gone: bool = False  # is it the node that cannot be reached?


class Transport(Protocol):
    """What the roster and the engine need of a network."""

    sent_bytes: int  # of arrays, so far
    received_bytes: int

    def nodes(self) -> set[int]: ...
    def send(self, node: int, parcel: WireMessage, kind: str, group: str) -> str: ...
    def poll(self) -> list[Answer]: ...
    def cancel(self, numbers: Iterable[str]) -> None: ...


class GridTransport:
    """Over the grid that Flower gives to a ServerApp. `ttl`: seconds after which the relay
    throws a message away, answered or not.
    """

    def __init__(self, grid: Any, ttl: float = 43_200.0):
        self.grid, self.ttl = grid, ttl
        self.open: set[str] = set()
        self.sent_bytes = self.received_bytes = (
            # what is the same for several sites counts for each, although it goes up to the relay
            # once
            0
        )

    def nodes(self) -> set[int]:
        return {int(node) for node in self.grid.get_node_ids()}

    def send(self, node: int, parcel: WireMessage, kind: str, group: str) -> str:
        """kind: "train", "evaluate" or "query", as Flower routes it; group: shown in its logs"""
        from flwr.app import Message

        message = Message(
            to_record(parcel), dst_node_id=node, message_type=kind, ttl=self.ttl, group_id=group
        )
        numbers = [number for number in self.grid.push_messages([message]) if number]
        if not numbers:  # the relay would not take it: the node has gone in this moment
            return ""
        self.open.add(numbers[0])
        self.sent_bytes += parcel.nbytes
        return str(numbers[0])

    def poll(self) -> list[Answer]:
        """What has come since the last look; returns at once."""
        answers = []
        for message in self.grid.pull_messages(sorted(self.open)) if self.open else ():
            number = message.metadata.reply_to_message_id
            if number not in self.open:
                continue
            self.open.discard(number)
            answers.append(_read(number, message))
            parcel = answers[-1].parcel
            self.received_bytes += 0 if parcel is None else parcel.nbytes
        return answers

    def cancel(self, numbers: Iterable[str]) -> None:
        self.open.difference_update(numbers)


def _read(number: str, message: Any) -> Answer:
    if message.has_error():
        error = message.error
        return Answer(
            number,
            None,
            f"Flower reports error {error.code}: {error.reason}",
            gone=error.code in GONE,
        )
    try:
        return Answer(number, from_record(message.content))
    except WireError as error:
        return Answer(number, None, str(error))


def to_record(parcel: WireMessage) -> Any:
    """A parcel as the content of a message."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    layouts: dict[str, Any] = {}
    record: dict[str, Any] = {}
    for group in GROUPS:
        layouts[group], flat = flatten_arrays(getattr(parcel, group))
        if flat:
            record[group] = ArrayRecord({kind: Array(array) for kind, array in flat.items()})
    return RecordDict(record | {ABOUT: ConfigRecord({TEXT: pack_text(parcel, layouts)})})


def from_record(record: Any) -> WireMessage:
    """The inverse. Arrays are read-only views of what came."""
    try:
        text = record.config_records[ABOUT][TEXT]
        flat = {
            group: {
                kind: array.numpy() for kind, array in record.array_records.get(group, {}).items()
            }
            for group in GROUPS
        }
    # numpy on a damaged or disguised .npy
    except (KeyError, ValueError, TypeError, OSError, EOFError) as error:
        raise WireError(f"the message holds no parcel of ours ({type(error).__name__})") from None
    about, layouts = unpack_text(str(text))
    return WireMessage(
        about, *(restore_arrays(layouts.get(group, []), flat[group]) for group in reversed(GROUPS))
    )
