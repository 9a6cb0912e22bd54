"""A site's files of one run: its clients' states of the last rounds, and its last replies.

    state/RUN/client-0000003/round-0000012.safetensors     the client's state after that round
    state/RUN/client-0000003/stats-0000000.safetensors     noised label counts, drawn once
    state/RUN/reply-0000012-DIGEST.safetensors             the reply to one request
    state/RUN/experiment.sha256                            of the experiment they belong to

A reply may be lost, rejected or late. So the coordinator names the round whose state a client
starts from: the last round whose reply it used. The named state and the two newest ones are kept.
A request that is repeated, because the coordinator restarted, gets the stored reply.

RUN is the coordinator's name for its run, and clients have the numbers of site.toml: a site that
comes back under another node id finds its files.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch

from remanence.core import pytree
from remanence.core.files import write_atomically
from remanence.core.pytree import Tree
from remanence.flower.refusals import Declined
from remanence.flower.wire import WireError, WireMessage, from_bytes, to_bytes

KEPT = 2  # newest states of a client, besides the named one
REPLIES = 2  # newest rounds whose replies are kept
REPLIES_A_ROUND = 8
RUNS = 8
EXPERIMENT = "experiment.sha256"
_ROUND = re.compile(r"round-(\d{7,})\.safetensors")


class SiteStorage:
    """The files of one run.

    Args:
        folder: The site's state folder, for all runs.
        run: The name of the run.
        experiment: A hash of the experiment; files of another one are not used. Empty: not checked.
    """

    def __init__(self, folder: Path, run: str, experiment: str = ""):
        if not re.fullmatch(r"[0-9a-z-]{8,64}", run):  # it becomes the name of a folder
            raise Declined("malformed", f"{run!r} is not the name of a run")
        self.root, self.folder, self.experiment = folder, folder / run, experiment
        belongs_to = self.folder / EXPERIMENT
        if experiment and belongs_to.exists() and belongs_to.read_text() != experiment:
            raise Declined("wrong-run", "the run of this message has another experiment")

    def load(self, client: int, round: int) -> Tree | None:
        """A client's state after a round; None if there is none, or if the file is damaged."""
        arrays = _read_arrays(self._state_file(client, round))
        return None if arrays is None else pytree.unflatten(arrays)

    def store(self, client: int, round: int, state: Tree, start_round: int) -> None:
        """Store a client's state after a round.

        Args:
            client: The client's number.
            round: The round.
            state: The state.
            start_round: The round whose state this round started from; that state is kept.
        """
        flat = {name: x.detach().cpu().numpy() for name, x in pytree.flatten(state).items()}
        path = self._state_file(client, round)
        self._make_folder(path.parent)
        write_atomically(path, to_bytes(WireMessage({"client": client, "round": round}, flat)))
        for old in self.rounds(client)[:-KEPT]:
            if old != start_round:
                self._state_file(client, old).unlink(missing_ok=True)

    def rounds(self, client: int) -> list[int]:
        """The rounds of which a client's state is stored, ascending."""
        folder = self._state_file(client, 0).parent
        matches = (
            _ROUND.fullmatch(path.name) for path in (folder.iterdir() if folder.is_dir() else ())
        )
        return sorted(int(match[1]) for match in matches if match)

    def load_stats(self, client: int, time_step: int) -> Tree | None:
        """The statistics of a client's data at a time step that were sent before."""
        return _read_arrays(self._stats_file(client, time_step))

    def store_stats(self, client: int, time_step: int, stats: Tree) -> None:
        path = self._stats_file(client, time_step)
        self._make_folder(path.parent)
        arrays = {name: x.detach().cpu().numpy() for name, x in stats.items()}
        write_atomically(path, to_bytes(WireMessage({}, arrays)))

    def find_reply(self, round: int, digest: str) -> WireMessage | None:
        """The stored reply to a request; None if the request is new or the file is damaged."""
        try:
            return from_bytes(self._reply_file(round, digest).read_bytes())
        except (FileNotFoundError, WireError):
            return None

    def check_round(self, round: int) -> None:
        """Decline a request of a round whose replies are no longer kept: it may be a repeated one,
        and nothing is trained twice.
        """
        later = {stored for stored in self._replies() if stored > round}
        if len(later) >= REPLIES:
            raise Declined(
                "wrong-round",
                f"this site has replied in {len(later)} later rounds than {round}, and keeps no"
                " reply of that round: begin a new run",
            )

    def store_reply(self, round: int, digest: str, reply: WireMessage) -> None:
        self._make_folder(self.folder)
        write_atomically(self._reply_file(round, digest), to_bytes(reply))
        for number, (_, files) in enumerate(sorted(self._replies().items(), reverse=True)):
            for old in files if number >= REPLIES else files[:-REPLIES_A_ROUND]:
                old.unlink(missing_ok=True)
        self._prune_runs()

    def _replies(self) -> dict[int, list[Path]]:
        """The files of stored replies by round, the oldest first."""
        files = self.folder.glob("reply-*.safetensors")
        found: dict[int, list[Path]] = {}
        for path in sorted(files, key=lambda path: path.stat().st_mtime_ns):
            found.setdefault(int(path.name.split("-")[1]), []).append(path)
        return found

    def _make_folder(self, folder: Path) -> None:
        """Create a folder of this run, and write which experiment it belongs to."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.experiment and not (self.folder / EXPERIMENT).exists():
            write_atomically(self.folder / EXPERIMENT, self.experiment.encode())

    def _prune_runs(self) -> None:
        runs = sorted(
            (path for path in self.root.iterdir() if path.is_dir()),
            key=lambda path: path.stat().st_mtime_ns,
        )
        for old in runs[:-RUNS]:
            if old != self.folder:
                shutil.rmtree(old, ignore_errors=True)

    def _state_file(self, client: int, round: int) -> Path:
        return self.folder / f"client-{client:07d}" / f"round-{round:07d}.safetensors"

    def _stats_file(self, client: int, time_step: int) -> Path:
        return self.folder / f"client-{client:07d}" / f"stats-{time_step:07d}.safetensors"

    def _reply_file(self, round: int, digest: str) -> Path:
        return self.folder / f"reply-{round:07d}-{digest[:32]}.safetensors"


def _read_arrays(path: Path) -> Tree | None:
    try:
        arrays = from_bytes(path.read_bytes()).arrays
    except (FileNotFoundError, WireError):
        return None
    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
