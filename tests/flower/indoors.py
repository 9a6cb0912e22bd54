"""A federation within one process: the coordinator's and the sites' own code, with the bytes of
every message, and no Flower in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from remanence.config import Experiment, parse_experiment
from remanence.core.progress import NullProgress
from remanence.flower.coordinator import run_experiment
from remanence.flower.session import Timeouts
from remanence.flower.settings import read_site
from remanence.flower.site import Site
from remanence.flower.transport import Answer
from remanence.flower.wire import WireMessage, from_bytes, to_bytes
from remanence.results.run import Run
from remanence.testing.toy_task import SMALL

QUICK = Timeouts(join_timeout=1.0, reply_timeout=0.6, ping_after=0.2, gone_after=0.3)
EVERYTHING = {"code": True, "label_counts": True}


class Indoors:
    """Sites by node id, each answering at once; `fate(node, parcel)` may lose a message
    ("lost") or its answer ("silent").
    """

    def __init__(
        self,
        sites: dict[int, Site],
        fate: Callable[[int, WireMessage], str] = lambda node, parcel: "",
    ):
        self.sites, self.fate = sites, fate
        self.ready: dict[str, Answer] = {}
        self.sent: list[tuple[int, WireMessage]] = []
        self.sent_bytes = self.received_bytes = 0

    def nodes(self) -> set[int]:
        return set(self.sites)

    def send(self, node: int, parcel: WireMessage, kind: str, group: str) -> str:
        number = f"message {len(self.sent)}"
        self.sent.append((node, parcel))
        self.sent_bytes += parcel.nbytes
        fate = self.fate(node, parcel)
        if fate != "lost" and node in self.sites:
            reply = from_bytes(to_bytes(self.sites[node].answer(from_bytes(to_bytes(parcel)))))
            if fate != "silent":
                self.ready[number] = Answer(number, reply)
        return number

    def poll(self) -> list[Answer]:
        came, self.ready = list(self.ready.values()), {}
        return came

    def cancel(self, numbers: Iterable[str]) -> None:
        for number in numbers:
            self.ready.pop(number, None)


def make_site(
    folder: Path,
    name: str,
    clients: Iterable[int],
    policy: dict[str, Any] | None = None,
    data: Any = "share",
    **more: Any,
) -> Site:
    """A site with its own folder."""
    return Site(read_site(write_site(folder, name, clients, policy, data, **more)))


def write_site(
    folder: Path,
    name: str,
    clients: Iterable[int],
    policy: dict[str, Any] | None = None,
    data: Any = "share",
    **more: Any,
) -> Path:
    """-> its site.toml"""
    import tomli_w

    path = folder / name / "site.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    tree = {
        "name": name,
        "data": data if isinstance(data, dict) else {str(client): data for client in clients},
        "policy": EVERYTHING if policy is None else policy,
        "compute": {"device": "cpu", "threads": 1},
    }
    path.write_text(tomli_w.dumps(tree | more))
    return path


def small_spec(method: str, **changes: Any) -> Experiment:
    """The small experiment of `testing/toy_task.py` for two rounds; the public set is there where it is
    needed.
    """
    return parse_experiment({}, SMALL | {"engine": "auto", "method": method, "rounds": 2} | changes)


def play_indoors(spec: Experiment, carrier: Indoors, out: Path, patience: Timeouts = QUICK) -> Run:
    return run_experiment(spec, out, carrier, patience, NullProgress())
