"""Models that stay where they were trained until they are read.

An engine over many machines need not bring every client's model home only to have it averaged:
names, shapes and whether all numbers are finite are reported by the worker, which is what the gate
asks for, and a sum is made where the models lie. Reading a value fetches all of them, so that no
method, attack or record has to know: what is not read does not travel.
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
    from remanence.core.slots import ServerContext


class RemoteStore(Protocol):
    """The store of a round's models, in shards of some clients each."""

    def fetch(self, pieces: Sequence[int]) -> list[Params]:
        """All models of these pieces, each a stack."""
        ...

    def partial_sum(self, piece: Tensor, row: Tensor, weights: Tensor, srv: ServerContext) -> Tree:
        """The method's `Combine.partial` over the models at these rows of these pieces. all: [k]"""
        ...


@dataclass(frozen=True, eq=False)
class RemoteParams(Mapping[str, Tensor]):
    """The parameters of k clients, as a stack that reads like any other."""

    store: RemoteStore
    form: Params  # one client's: names, shapes and dtypes, without values
    shard: Tensor  # [k] int64: in which piece each client's are
    index: Tensor  # [k] int64: and in which row of it
    finite: Tensor  # [k] bool: whether all its numbers are, as seen where they lie
    update_norm: Tensor  # [k] float64: how far each went from where it began, in Euclidean length

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
        pieces = torch.unique(self.shard).tolist()
        fetched = self.store.fetch(pieces)
        offsets, total = {}, 0
        for number, stack in zip(pieces, fetched, strict=True):
            offsets[number] = total
            total += len(next(iter(stack.values())))
        place = self.index + torch.tensor([offsets[number] for number in self.shard.tolist()])
        return {name: torch.cat([stack[name] for stack in fetched])[place] for name in self.form}

    def to_meta(self) -> Params:
        """The stack without values: what can be said of it from here."""
        k = len(self.shard)
        # one number in memory
        return {
            name: torch.zeros((), dtype=one.dtype).expand(k, *one.shape)
            for name, one in self.form.items()
        }

    def select(self, index: Tensor | slice) -> RemoteParams:
        """Some of the clients, in the order of the index; nothing travels."""
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
        """Stacks one behind the other; None where they are not all of one holder and one form."""
        far = [part for part in parts if isinstance(part, RemoteParams)]
        if len(far) < len(parts) or any(
            part.store is not far[0].store or not _same_layout(part.form, far[0].form)
            for part in far
        ):
            return None
        columns = (
            torch.cat([getattr(part, name) for part in far])
            for name in ("shard", "index", "finite", "update_norm")
        )
        return RemoteParams(far[0].store, far[0].form, *columns)


def to_meta(params: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Names, shapes and dtypes of a stack, wherever it is."""
    return params.to_meta() if isinstance(params, RemoteParams) else params


def _same_layout(form: Params, other: Params) -> bool:
    return list(form) == list(other) and all(
        a.shape == other[name].shape and a.dtype == other[name].dtype for name, a in form.items()
    )
