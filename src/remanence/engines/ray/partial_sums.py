"""The models of one round of the engine `ray`, which lie in the object store of whoever trained
them until they are summed, or read.

A sum over a round's replies needs one model a worker to travel instead of one a client. It is made
in a fixed order, so that its bits do not depend on who did what first. Models that were lost with a
worker are trained again: a client's result is a function of its part of the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from remanence.core import pytree
from remanence.core.engine import ClientWork
from remanence.core.errors import RunFailed
from remanence.core.pytree import Params, Tree
from remanence.core.remote_params import RemoteParams
from remanence.core.slots import ServerContext
from remanence.core.types import ModelState, Reply
from remanence.engines.ray.serialization import pack, unpack

if TYPE_CHECKING:
    from remanence.engines.ray.engine import RayEngine


# seconds after which models that do not come count as lost: of a node that just died Ray may not
# know it yet
FETCH_TIMEOUT = 60.0


class RemoteReply(NamedTuple):
    """What a worker says of models that it keeps."""

    rest: Any  # packed: the replies without their models
    form: dict[str, tuple[tuple[int, ...], torch.dtype]]  # of one client's parameters
    finite: Any  # packed: [k] bool
    update_norm: Any  # packed: [k] float64
    # reference to the packed replies, with their models and without what the clients keep
    models: Any


class RemoteReplies:
    """Where the pieces of a round lie: piece i holds the clients of question i."""

    def __init__(
        self,
        engine: RayEngine,
        work: ClientWork,
        for_all: Any,
        questions: Sequence[tuple[Any, ...]],
    ):
        self.engine, self.work, self.for_all, self.questions = engine, work, for_all, questions
        self.models: dict[int, Any] = {}

    def attach(self, number: int, kept: RemoteReply) -> Reply:
        """The replies of a piece, with models that stay where they are."""
        self.models[number] = kept.models
        reply: Reply = unpack(kept.rest, self.engine.task.info.device)
        finite, moved = (
            unpack(packed, torch.device("cpu")) for packed in (kept.finite, kept.update_norm)
        )
        form = {
            name: torch.zeros((), dtype=dtype).expand(shape)
            for name, (shape, dtype) in kept.form.items()
        }
        here = torch.full((reply.num_clients,), number, dtype=torch.int64)
        return reply._replace(
            params=RemoteParams(self, form, here, torch.arange(reply.num_clients), finite, moved)
        )

    def fetch(self, pieces: Sequence[int]) -> list[Params]:
        import ray

        for _ in range(self.engine.retries + 1):
            try:
                packed = ray.get([self.models[number] for number in pieces], timeout=FETCH_TIMEOUT)
            except (ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError):
                self._train_again(pieces)
                continue
            self.engine.traffic.count(up=packed)
            return [unpack(reply.params, self.engine.task.info.device) for reply in packed]
        raise RunFailed(_LOST)

    def partial_sum(self, piece: Tensor, row: Tensor, weights: Tensor, srv: ServerContext) -> Tree:
        crew, weights = self.engine.assemble(), weights.cpu()
        # as the work was dealt out: most of a group lies with one worker
        group = piece % len(crew.members)
        wanted = {
            number: (group == number).nonzero().flatten() for number in torch.unique(group).tolist()
        }
        sums: dict[int, Any] = {}
        questioner = self._server_args(srv)
        for _ in range(self.engine.retries + 1):
            missing = [number for number in wanted if number not in sums]
            questions = [
                self._locate(questioner, piece[wanted[n]], row[wanted[n]], weights[wanted[n]])
                for n in missing
            ]
            answers = dict(self.engine.map_unordered("partial_sum", questions, missing))
            sums |= {
                number: answers[place]
                for place, number in enumerate(missing)
                if answers[place] is not None
            }
            if len(sums) == len(wanted):
                total: Tree | None = None
                for number in wanted:
                    part = unpack(sums[number], self.engine.task.info.device)
                    total = part if total is None else pytree.add(total, part)
                assert total is not None
                return total
            self._train_again(
                sorted(
                    {
                        int(p)
                        for number in wanted
                        if number not in sums
                        for p in piece[wanted[number]]
                    }
                )
            )
        raise RunFailed(_LOST)

    def _server_args(self, srv: ServerContext) -> tuple[Any, Any]:
        """What workers need to know of the server. The model is in the store already, unless
        the sum is about another one; of the state, what counts here.
        """
        owner = self.engine.task.method.part_filling("aggregate")
        state = (
            {}
            if owner is None or owner.name not in srv.state
            else {owner.name: srv.state[owner.name]}
        )
        same = not self.work.per_client_start and srv.start is self.work.start
        start: ModelState | None = None if same else srv.start
        return self.for_all, pack((srv.round, start, state, srv.key))

    def _locate(
        self, questioner: tuple[Any, Any], piece: Tensor, row: Tensor, weights: Tensor
    ) -> tuple[Any, ...]:
        numbers = torch.unique(piece).tolist()
        rows = [row[piece == number].numpy() for number in numbers]
        shares = [weights[piece == number].numpy() for number in numbers]
        return (*questioner, [self.models[number] for number in numbers], rows, shares)

    def _train_again(self, pieces: Sequence[int]) -> None:
        """Those that cannot be reached; which they are only a look at all of them would tell."""
        again = [self.questions[number] for number in pieces]
        for place, kept in self.engine.map_unordered("train_and_keep", again, pieces):
            self.models[pieces[place]] = kept.models


_LOST = (
    "the models of a round were lost with the Ray workers that held them, again and again:"
    " nothing is lost, go on with remanence resume"
)
