"""What a site keeps on its own disk: its clients' state of the last rounds, tagged, and its last
replies.

    state/RUN/client-0000003/round-0000012.safetensors     what the client keeps after that round
    state/RUN/client-0000003/facts-0000000.safetensors     label counts as they are shown, where a
    method noises them state/RUN/reply-0000012-DIGEST.safetensors             what was answered to
    that very request

The coordinator names the round whose state counts: the last one that it has used, because a reply
may be lost, refused or too late. So the state that was named and the two newest ones are kept. A
request that comes again, because the coordinator was restarted, gets the answer that it got.

RUN is the name that the coordinator gave to its run, and a client has the number from site.toml: a
site that comes back under another node id is the same.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch

from remanence.core import pytree
from remanence.core.files import write_atomically
from remanence.core.pytree import Tree
from remanence.flower.policy import Declined
from remanence.flower.wire import WireError, WireMessage, from_bytes, to_bytes

KEPT = 2  # newest states of a client, besides the one that was named
REPLIES = 2
RUNS = 8  # runs of which anything is kept
_ROUND = re.compile(r"round-(\d{7,})\.safetensors")


class SiteStorage:
    """The memory of one site for one run."""

    def __init__(self, folder: Path, run: str):
        if not re.fullmatch(r"[0-9a-z-]{8,64}", run):  # it becomes the name of a folder
            raise Declined("malformed", f"{run!r} is not the name of a run")
        self.root, self.folder = folder, folder / run

    def load(self, client: int, round: int) -> Tree | None:
        """What a client kept after a round; None where there is nothing."""
        try:
            content = self._file(client, round).read_bytes()
        except FileNotFoundError:
            return None
        try:
            arrays = from_bytes(content).arrays
        except WireError:
            return None
        return pytree.unflatten(
            {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        )

    def store(self, client: int, round: int, kept: Tree, named: int) -> None:
        """Write down what a client keeps after a round that began from the state of the round
        `named`.
        """
        flat = {name: x.detach().cpu().numpy() for name, x in pytree.flatten(kept).items()}
        path = self._file(client, round)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, to_bytes(WireMessage({"client": client, "round": round}, flat)))
        rounds = self.rounds(client)
        for old in rounds[:-KEPT]:
            if old != named:
                self._file(client, old).unlink(missing_ok=True)

    def load_stats(self, client: int, time_step: int) -> Tree | None:
        """What was said of a client's data at a time step."""
        try:
            arrays = from_bytes(self._stats_file(client, time_step).read_bytes()).arrays
        except (FileNotFoundError, WireError):
            return None
        return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}

    def store_stats(self, client: int, time_step: int, facts: Tree) -> None:
        path = self._stats_file(client, time_step)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(
            path,
            to_bytes(
                WireMessage({}, {name: x.detach().cpu().numpy() for name, x in facts.items()})
            ),
        )

    def rounds(self, client: int) -> list[int]:
        """Of which rounds the state of a client is here, ascending."""
        folder = self._file(client, 0).parent
        found = (
            _ROUND.fullmatch(path.name) for path in (folder.iterdir() if folder.is_dir() else ())
        )
        return sorted(int(match[1]) for match in found if match)

    def find_reply(self, round: int, digest: str) -> WireMessage | None:
        """The answer that this very request got; None where it is new, or where the answer was
        cut short.
        """
        try:
            return from_bytes(self._reply_file(round, digest).read_bytes())
        except (FileNotFoundError, WireError):
            return None

    def store_reply(self, round: int, digest: str, reply: WireMessage) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._reply_file(round, digest), to_bytes(reply))
        for old in sorted(
            self.folder.glob("reply-*.safetensors"), key=lambda path: path.stat().st_mtime_ns
        )[:-REPLIES]:
            old.unlink(missing_ok=True)
        self._prune_runs()

    def _prune_runs(self) -> None:
        runs = sorted(
            (path for path in self.root.iterdir() if path.is_dir()),
            key=lambda path: path.stat().st_mtime_ns,
        )
        for old in runs[:-RUNS]:
            if old != self.folder:
                shutil.rmtree(old, ignore_errors=True)

    def _file(self, client: int, round: int) -> Path:
        return self.folder / f"client-{client:07d}" / f"round-{round:07d}.safetensors"

    def _stats_file(self, client: int, time_step: int) -> Path:
        return self.folder / f"client-{client:07d}" / f"facts-{time_step:07d}.safetensors"

    def _reply_file(self, round: int, digest: str) -> Path:
        return self.folder / f"reply-{round:07d}-{digest[:32]}.safetensors"
