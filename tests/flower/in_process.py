"""A federation within one process: the real code of coordinator and sites, and the bytes of every
message, without Flower.
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
from remanence.flower.transport import Response
from remanence.flower.wire import WireMessage, from_bytes, to_bytes
from remanence.results.run import Run
from remanence.testing.toy_task import SMALL

SHORT_TIMEOUTS = Timeouts(join_timeout=1.0, reply_timeout=0.6, ping_after=0.2, gone_after=0.3)
# clients of the small experiment have one example and more
ALLOW_ALL = {"code": True, "label_counts": True, "min_examples": 1, "min_steps": 1}


class InProcessTransport:
    """A transport to sites in this process, which respond at once.

    Args:
        sites: By node id.
        fault: Called as fault(node, message). "lost": the message does not arrive; "silent": its
            response does not arrive.
    """

    def __init__(
        self,
        sites: dict[int, Site],
        fault: Callable[[int, WireMessage], str] = lambda node, message: "",
    ):
        self.sites, self.fault = sites, fault
        self.ready: dict[str, Response] = {}
        self.sent: list[tuple[int, WireMessage]] = []
        self.sent_bytes = self.received_bytes = 0

    def nodes(self) -> set[int]:
        return set(self.sites)

    def send(self, node: int, message: WireMessage, kind: str, group: str) -> str:
        message_id = f"message {len(self.sent)}"
        self.sent.append((node, message))
        self.sent_bytes += message.nbytes
        fault = self.fault(node, message)
        if fault != "lost" and node in self.sites:
            reply = from_bytes(to_bytes(self.sites[node].answer(from_bytes(to_bytes(message)))))
            if fault != "silent":
                self.ready[message_id] = Response(message_id, reply)
        return message_id

    def poll(self) -> list[Response]:
        responses, self.ready = list(self.ready.values()), {}
        return responses

    def cancel(self, message_ids: Iterable[str]) -> None:
        for message_id in message_ids:
            self.ready.pop(message_id, None)


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
    """Write a site.toml and return its path."""
    import tomli_w

    path = folder / name / "site.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    tree = {
        "name": name,
        "data": data if isinstance(data, dict) else {str(client): data for client in clients},
        "policy": ALLOW_ALL if policy is None else policy,
        "compute": {"device": "cpu", "threads": 1},
    }
    path.write_text(tomli_w.dumps(tree | more))
    return path


def small_config(method: str, **changes: Any) -> Experiment:
    """The small experiment of `testing/toy_task.py` for two rounds."""
    return parse_experiment({}, SMALL | {"engine": "auto", "method": method, "rounds": 2} | changes)


def run_in_process(
    config: Experiment,
    transport: InProcessTransport,
    out: Path,
    timeouts: Timeouts = SHORT_TIMEOUTS,
) -> Run:
    return run_experiment(config, out, transport, timeouts, NullProgress())
