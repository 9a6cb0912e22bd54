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
from pathlib import Path

import torch

from remanence.core import pytree
from remanence.core.pytree import Tree
from remanence.core.safe_path import FOLDER, SafePath
from remanence.flower.refusals import Declined
from remanence.flower.wire import WireError, WireMessage, from_bytes, to_bytes

KEPT = 2  # newest states of a client, besides the named one
REPLIES = 2  # newest rounds whose replies are kept
REPLIES_A_ROUND = 8
RUNS = 8
_RUN = re.compile(r"[0-9a-z-]{8,64}")
_REPLY = re.compile(r"reply-(\d{7,})-.*\.safetensors")
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
        if not _RUN.fullmatch(run):  # it becomes the name of a folder
            raise Declined("malformed", f"{run!r} is not the name of a run")
        self.root = SafePath(folder)
        self.folder, self.experiment = self.root / run, experiment
        belongs_to = self.folder / EXPERIMENT
        if (
            experiment
            and belongs_to.is_regular_file()
            and belongs_to.read(len(experiment) + 1) != experiment.encode()
        ):
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
        path.write(to_bytes(WireMessage({"client": client, "round": round}, flat)))
        for old in self.rounds(client)[:-KEPT]:
            if old != start_round:
                self._state_file(client, old).delete()

    def rounds(self, client: int) -> list[int]:
        """The rounds of which a client's state is stored, ascending."""
        folder = self._state_file(client, 0).parent
        matches = (_ROUND.fullmatch(name) for name in folder.list_files())
        return sorted(int(match[1]) for match in matches if match)

    def load_stats(self, client: int, time_step: int) -> Tree | None:
        """The statistics of a client's data at a time step that were sent before."""
        return _read_arrays(self._stats_file(client, time_step))

    def store_stats(self, client: int, time_step: int, stats: Tree) -> None:
        path = self._stats_file(client, time_step)
        self._make_folder(path.parent)
        arrays = {name: x.detach().cpu().numpy() for name, x in stats.items()}
        path.write(to_bytes(WireMessage({}, arrays)))

    def find_reply(self, round: int, digest: str) -> WireMessage | None:
        """The stored reply to a request; None if the request is new or the file is damaged."""
        try:
            return from_bytes(self._reply_file(round, digest).read())
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
        self._reply_file(round, digest).write(to_bytes(reply))
        for number, (_, names) in enumerate(sorted(self._replies().items(), reverse=True)):
            for old in names if number >= REPLIES else names[:-REPLIES_A_ROUND]:
                (self.folder / old).delete()
        self._prune_runs()

    def _replies(self) -> dict[int, list[str]]:
        """The files of stored replies by round, the oldest first."""
        files = self.folder.list_files()
        found: dict[int, list[str]] = {}
        for name in sorted(files, key=lambda name: files[name].st_mtime_ns):
            if match := _REPLY.fullmatch(name):
                found.setdefault(int(match[1]), []).append(name)
        return found

    def _make_folder(self, folder: SafePath) -> None:
        """Create a folder of this run, and write which experiment it belongs to."""
        folder.make_folder()
        belongs_to = self.folder / EXPERIMENT
        if self.experiment and not belongs_to.is_regular_file():
            belongs_to.write(self.experiment.encode())

    def _prune_runs(self) -> None:
        runs = [self.root / name for name in self.root.list_folders() if _RUN.fullmatch(name)]
        times = {run: status.st_mtime_ns for run in runs if (status := run.status(FOLDER))}
        for old in sorted(times, key=lambda run: times[run])[:-RUNS]:
            if old != self.folder:
                old.delete_folder()

    def _state_file(self, client: int, round: int) -> SafePath:
        return self.folder / f"client-{client:07d}" / f"round-{round:07d}.safetensors"

    def _stats_file(self, client: int, time_step: int) -> SafePath:
        return self.folder / f"client-{client:07d}" / f"stats-{time_step:07d}.safetensors"

    def _reply_file(self, round: int, digest: str) -> SafePath:
        return self.folder / f"reply-{round:07d}-{digest[:32]}.safetensors"


def _read_arrays(path: SafePath) -> Tree | None:
    try:
        arrays = from_bytes(path.read()).arrays
    except (FileNotFoundError, WireError):
        return None
    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
