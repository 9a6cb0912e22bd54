"""Parameters of a round's clients that stay with the workers until they are read.

An engine over many machines need not send every client's model to the process of the server only to
average them. Workers report names, shapes, update norms and whether all numbers are finite, which
the gate checks, and they compute partial sums. Reading any value fetches the models, so that
methods, attacks and records need no code for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from remanence.core.pytree import Params, Tree

if TYPE_CHECKING:
    from remanence.core.contexts import ServerContext


class RemoteStore(Protocol):
    """The store of a round's models, in shards of some clients each."""

    def fetch(self, shards: Sequence[int]) -> list[Params]:
        """The models of these shards, each as a stack."""
        ...

    def partial_sum(
        self, shard: Tensor, index: Tensor, weights: Tensor, srv: ServerContext
    ) -> Tree:
        """The method's `Aggregate.partial` over the models at `index` of `shard`; all are [k]."""
        ...


@dataclass(frozen=True, eq=False)
class RemoteParams(Mapping[str, Tensor]):
    """The parameters of k clients; a mapping like any stack of parameters."""

    store: RemoteStore
    form: Params  # names, shapes and dtypes of one client's parameters, without values
    shard: Tensor  # [k] int64: the shard of each client
    index: Tensor  # [k] int64: its position in the shard
    finite: Tensor  # [k] bool: whether all its numbers are finite, as the worker reports
    update_norm: Tensor  # [k] float64: Euclidean norm of its update, as the worker reports

    def __getitem__(self, name: str) -> Tensor:
        return self.fetched[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.form)

    def __len__(self) -> int:
        return len(self.form)

    def __ror__(self, other: Params) -> Params:
        return other | self.fetched

    @cached_property
    def fetched(self) -> Params:
        """The values, fetched once."""
        shards = torch.unique(self.shard).tolist()
        fetched = self.store.fetch(shards)
        offsets, total = {}, 0
        for number, stack in zip(shards, fetched, strict=True):
            offsets[number] = total
            total += len(next(iter(stack.values())))
        place = self.index + torch.tensor([offsets[number] for number in self.shard.tolist()])
        return {name: torch.cat([stack[name] for stack in fetched])[place] for name in self.form}

    def to_meta(self) -> Params:
        """A stack of zeros with the same names, shapes and dtypes, which takes no memory."""
        k = len(self.shard)
        return {
            name: torch.zeros((), dtype=one.dtype).expand(k, *one.shape)
            for name, one in self.form.items()
        }

    def select(self, index: Tensor | slice) -> RemoteParams:
        """Some of the clients, in the order of the index; nothing is fetched."""
        here = index.cpu() if isinstance(index, Tensor) else index
        return replace(
            self,
            shard=self.shard[here],
            index=self.index[here],
            finite=self.finite[here],
            update_norm=self.update_norm[here],
        )

    @staticmethod
    def concat(parts: Sequence[Mapping[str, Tensor]]) -> RemoteParams | None:
        """Join stacks along their leading axis; None unless all are in one store and alike."""
        remote = [part for part in parts if isinstance(part, RemoteParams)]
        if len(remote) < len(parts) or any(
            part.store is not remote[0].store or not _same_layout(part.form, remote[0].form)
            for part in remote
        ):
            return None
        joined = (
            torch.cat([getattr(part, name) for part in remote])
            for name in ("shard", "index", "finite", "update_norm")
        )
        return RemoteParams(remote[0].store, remote[0].form, *joined)


def to_meta(params: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Names, shapes and dtypes of a stack, wherever it is."""
    return params.to_meta() if isinstance(params, RemoteParams) else params


def _same_layout(form: Params, other: Params) -> bool:
    return list(form) == list(other) and all(
        a.shape == other[name].shape and a.dtype == other[name].dtype for name, a in form.items()
    )
