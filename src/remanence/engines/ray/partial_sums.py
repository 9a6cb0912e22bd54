"""The models of one round, which stay in the object store of the worker that trained them until
they are summed or read.

For a sum over a round's replies each worker sends one model, instead of one for each client. The
sum is computed in a fixed order, so that its bits do not depend on which worker ends first. Models
that were lost with a worker are trained again: a client's result is a function of its work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from remanence.core import pytree
from remanence.core.contexts import ServerContext
from remanence.core.engine import ClientWork
from remanence.core.errors import RunFailed
from remanence.core.pytree import Params, Tree
from remanence.core.remote_params import RemoteParams
from remanence.core.types import ModelState, Reply
from remanence.engines.packing import pack
from remanence.engines.ray.serialization import unpack

if TYPE_CHECKING:
    from remanence.engines.ray.engine import RayEngine


# Seconds after which models that do not come count as lost; Ray may not know yet that a node died.
FETCH_TIMEOUT = 60.0


class RemoteReply(NamedTuple):
    """A worker's answer about models that it keeps."""

    rest: Any  # packed: the replies without their models
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]]  # of one client's parameters
    finite: Any  # packed: [k] bool
    update_norm: Any  # packed: [k] float64
    # reference to the packed replies, with their models and without what the clients keep
    models: Any
    degraded_reasons: list[str]


class RemoteReplies:
    """Where the shards of a round are: shard i holds the clients of request i."""

    def __init__(
        self,
        engine: RayEngine,
        work: ClientWork,
        shared_args: Any,
        requests: Sequence[tuple[Any, ...]],
    ):
        self.engine, self.work, self.shared_args, self.requests = (
            engine,
            work,
            shared_args,
            requests,
        )
        self.models: dict[int, Any] = {}

    def attach(self, number: int, remote_reply: RemoteReply) -> Reply:
        """The replies of a shard, with models that stay where they are."""
        self.models[number] = remote_reply.models
        self.engine.add_degraded_reasons(remote_reply.degraded_reasons)
        reply: Reply = unpack(remote_reply.rest, self.engine.task.info.device)
        finite, update_norm = (
            unpack(packed, torch.device("cpu"))
            for packed in (remote_reply.finite, remote_reply.update_norm)
        )
        form = {
            name: torch.zeros((), dtype=dtype).expand(shape)
            for name, (shape, dtype) in remote_reply.layout.items()
        }
        shard = torch.full((reply.num_clients,), number, dtype=torch.int64)
        return reply._replace(
            params=RemoteParams(
                self, form, shard, torch.arange(reply.num_clients), finite, update_norm
            )
        )

    def fetch(self, shards: Sequence[int]) -> list[Params]:
        import ray

        for _ in range(self.engine.retries + 1):
            try:
                packed = ray.get([self.models[number] for number in shards], timeout=FETCH_TIMEOUT)
            except (ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError):
                self._train_again(shards)
                continue
            self.engine.traffic.count(up=packed)
            return [unpack(reply.params, self.engine.task.info.device) for reply in packed]
        raise RunFailed(_LOST)

    def partial_sum(
        self, shard: Tensor, index: Tensor, weights: Tensor, srv: ServerContext
    ) -> Tree:
        pool, weights = self.engine.assemble(), weights.cpu()
        # as the work was divided: most of a group is with one worker
        group = shard % len(pool.slots)
        wanted = {
            number: (group == number).nonzero().flatten() for number in torch.unique(group).tolist()
        }
        sums: dict[int, Any] = {}
        server_args = self._server_args(srv)
        for _ in range(self.engine.retries + 1):
            missing = [number for number in wanted if number not in sums]
            requests = [
                self._locate(server_args, shard[wanted[n]], index[wanted[n]], weights[wanted[n]])
                for n in missing
            ]
            answers = dict(self.engine.map_unordered("partial_sum", requests, missing))
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
                        for p in shard[wanted[number]]
                    }
                )
            )
        raise RunFailed(_LOST)

    def _server_args(self, srv: ServerContext) -> tuple[Any, Any]:
        """The server's context for workers.

        The model is in the store already, unless the sum is about another one. Of the state only
        the aggregating part's is sent.
        """
        part = self.engine.task.method.part_filling("aggregate")
        state = (
            {} if part is None or part.name not in srv.state else {part.name: srv.state[part.name]}
        )
        same = not self.work.per_client_start and srv.start is self.work.start
        start: ModelState | None = None if same else srv.start
        return self.shared_args, pack((srv.round, start, srv.num_replies, state, srv.key))

    def _locate(
        self, server_args: tuple[Any, Any], shard: Tensor, index: Tensor, weights: Tensor
    ) -> tuple[Any, ...]:
        numbers = torch.unique(shard).tolist()
        rows = [index[shard == number].numpy() for number in numbers]
        shares = [weights[shard == number].numpy() for number in numbers]
        return (*server_args, [self.models[number] for number in numbers], rows, shares)

    def _train_again(self, shards: Sequence[int]) -> None:
        """Train these shards again, without asking which of them are lost."""
        again = [self.requests[number] for number in shards]
        for place, remote_reply in self.engine.map_unordered("train_and_keep", again, shards):
            self.models[shards[place]] = remote_reply.models


_LOST = (
    "the models of a round were lost with the Ray workers that held them, again and again:"
    " nothing is lost, go on with remanence resume"
)
