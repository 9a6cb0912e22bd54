"""From row numbers to batches: the plan of a round, and the data on the device.

The plan is a pure function of (key, number of rows): it is computed where the data are, and is the
same on every engine. Images stay uint8 on the device; a batch is gathered, normalized and augmented
there, and augmentation draws from (key, example), so padding and stacking change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from remanence.core import rng
from remanence.core.errors import InputError
from remanence.core.rng import Key

AUGMENTATIONS = ("crop", "flip", "cutout")
CROP_PADDING = 4
# pixels of the square that cutout empties; on images smaller than 32, half of their shorter side
CUTOUT = 16


class BatchPlan(NamedTuple):
    """Which of its rows a client sees in each local step."""

    # [steps, batch] int64, positions 0 .. n-1; beyond the width, the first row of the step again
    indices: np.ndarray
    batch_sizes: np.ndarray  # [steps] int64, how many of them count


def plan_batches(
    key: Key, count: int, batch: int, epochs: int = 0, steps: int = 0, drop_last: bool = False
) -> BatchPlan:
    """Every epoch visits all rows once in a fresh order; with `steps`, epochs follow each other
    until there are enough steps.

    >>> plan = plan_batches(Key(0), count=5, batch=2, epochs=1)
    >>> plan.batch_sizes.tolist()
    [2, 2, 1]
    """
    batch = min(batch, count)
    per_epoch = count // batch if drop_last else -(-count // batch)
    total = steps or epochs * per_epoch
    orders = [key.fold_in(epoch).permutation(count) for epoch in range(-(-total // per_epoch))]
    rows = np.empty((total, batch), dtype=np.int64)
    widths = np.full(total, batch, dtype=np.int64)
    for step in range(total):
        epoch, place = divmod(step, per_epoch)
        part = orders[epoch][place * batch : (place + 1) * batch]
        rows[step, : len(part)] = part
        rows[step, len(part) :] = part[0]
        widths[step] = len(part)
    return BatchPlan(rows, widths)


def plan_batches_many(
    key_values: np.ndarray,
    counts: np.ndarray,
    batch: int,
    epochs: int = 0,
    steps: int = 0,
    drop_last: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """`plan_batches` for many clients at once, those of equal size together.

    key_values: uint64 [k]; counts: [k] -> rows [k, most steps, widest batch], widths [k, most
    steps]. Beyond a width the step's first row stands again; beyond a client's last step rows are 0
    and so is the width.
    """
    totals = {
        count: count_steps(count, batch, epochs, steps, drop_last) for count in set(counts.tolist())
    }
    most, widest = max(totals.values()), min(batch, max(totals))
    rows, widths = (
        np.zeros((len(counts), most, widest), dtype=np.int64),
        np.zeros((len(counts), most), dtype=np.int64),
    )
    for count, total in totals.items():
        some, wide = np.flatnonzero(counts == count), min(batch, count)
        per_epoch = count // wide if drop_last else -(-count // wide)
        rounds = -(-total // per_epoch)
        values = rng.fold_in_batch(key_values[some, None], np.arange(rounds)).reshape(-1)
        # [clients * epochs, rows used]
        orders = rng.permutations(values, count)[:, : per_epoch * wide]
        short = per_epoch * wide - orders.shape[1]
        if short:
            orders = np.concatenate(
                [orders, np.repeat(orders[:, (per_epoch - 1) * wide, None], short, axis=1)], axis=1
            )
        mine = orders.reshape(len(some), rounds * per_epoch, wide)[:, :total]
        rows[some, :total, :wide] = mine
        rows[some, :total, wide:] = mine[:, :, :1]
        last = np.arange(total) % per_epoch == per_epoch - 1
        widths[some, :total] = np.where(last, wide - short, wide)
    return rows, widths


def count_steps(count: int, batch: int, epochs: int, steps: int, drop_last: bool) -> int:
    """How many local steps `plan_batches` makes of so many rows."""
    batch = min(batch, count)
    return steps or epochs * (count // batch if drop_last else -(-count // batch))


@dataclass(frozen=True)
class Examples:
    """Inputs and labels on a device."""

    x: Tensor  # [stored, ...] raw: uint8 images, float tables, int64 tokens
    y: Tensor  # [n] int64, by id
    mean: Tensor | None  # in raw units, broadcastable to one example; None: used as they are
    std: Tensor | None
    dtype: torch.dtype
    augment: tuple[str, ...] = ()
    storage_index: Tensor | None = None  # [n] int64: where in x an example lies; None: at its id

    def inputs(self, ids: Tensor) -> Tensor:
        """Normalized inputs. ids: [...] -> [..., example shape]"""
        return self._normalize(self._raw(ids))

    def augmented(self, ids: Tensor, key: Tensor) -> Tensor:
        """Inputs for training. ids: [..., B]; key: [...], one for each batch."""
        x = self._raw(ids)
        if self.augment:
            flat = rng.fold_in(rng.fold_in(key, "augment").unsqueeze(-1), ids).reshape(-1)
            x = augment_images(x.reshape(-1, *x.shape[ids.dim() :]), flat, self.augment).reshape(
                x.shape
            )
        x = self._normalize(x)
        if "cutout" in self.augment:  # after normalizing, so that the hole is the mean
            x = x * cutout_mask(flat, *x.shape[-2:]).reshape(*ids.shape, 1, *x.shape[-2:])
        return x

    def labels(self, ids: Tensor) -> Tensor:
        return self.y[ids]

    def _raw(self, ids: Tensor) -> Tensor:
        return self.x[ids if self.storage_index is None else self.storage_index[ids]]

    def _normalize(self, x: Tensor) -> Tensor:
        if self.mean is None or self.std is None:
            return x.to(self.dtype) if x.is_floating_point() or x.dtype == torch.uint8 else x
        return (x.to(self.dtype) - self.mean) / self.std


def to_device(
    x: np.ndarray,
    y: np.ndarray,
    statistics: tuple[np.ndarray, np.ndarray] | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    augment: Sequence[str] = (),
    place: np.ndarray | None = None,
) -> Examples:
    """Put a split on the device."""
    unknown = [name for name in augment if name not in AUGMENTATIONS]
    if unknown:
        raise InputError(f"unknown augmentation {unknown[0]!r}: known: {', '.join(AUGMENTATIONS)}")
    if augment and x.ndim != 4:
        raise InputError(
            "crop, flip and cutout are for images: leave data.augment empty for this data"
        )
    # a mapped file: torch would warn, and a gather needs no second copy of it
    if not x.flags.writeable:
        x = np.array(x)
    if x.dtype == np.float64 and dtype == torch.float32:
        x = x.astype(np.float32)
    mean = std = None
    if statistics is not None:
        shape = (-1, *(1,) * (x.ndim - 2))
        mean, std = (
            torch.as_tensor(s, dtype=torch.float64).to(dtype).reshape(shape).to(device)
            for s in statistics
        )
    labels = torch.from_numpy(np.asarray(y, dtype=np.int64)).to(device)
    places = None if place is None else torch.from_numpy(place).to(device)
    return Examples(
        torch.from_numpy(x).to(device), labels, mean, std, dtype, tuple(augment), places
    )


def augment_images(x: Tensor, key: Tensor, names: Sequence[str]) -> Tensor:
    """Random crop with padding and horizontal flip, one key an image. x: [n, c, h, w], key: [n]"""
    height, width = x.shape[-2:]
    rows = torch.arange(height, device=x.device).expand(len(x), height)
    columns = torch.arange(width, device=x.device).expand(len(x), width)
    if "flip" in names:
        flipped = _draw(key, "flip", 2).unsqueeze(1) == 1
        columns = torch.where(flipped, columns.flip(1), columns)
    if "crop" in names:
        rows = rows + _draw(key, "rows", 2 * CROP_PADDING + 1).unsqueeze(1) - CROP_PADDING
        columns = columns + _draw(key, "columns", 2 * CROP_PADDING + 1).unsqueeze(1) - CROP_PADDING
    # [n, h, w]
    inside = ((rows >= 0) & (rows < height)).unsqueeze(2) & (
        (columns >= 0) & (columns < width)
    ).unsqueeze(1)
    image = torch.arange(len(x), device=x.device).reshape(-1, 1, 1)
    # [n, h, w, c]
    picked = x.permute(0, 2, 3, 1)[
        image, rows.clamp(0, height - 1).unsqueeze(2), columns.clamp(0, width - 1).unsqueeze(1)
    ]
    return torch.where(inside.unsqueeze(3), picked, torch.zeros_like(picked)).permute(0, 3, 1, 2)


def cutout_mask(key: Tensor, height: int, width: int) -> Tensor:
    """Cutout (DeVries and Taylor 2017): False in a square around a random pixel, cut off at the
    border, one key an image. key: [n] -> [n, h, w]
    """
    side = min(CUTOUT, min(height, width) // 2)
    edges = []
    for word, length in (("hole rows", height), ("hole columns", width)):
        first = _draw(key, word, length).unsqueeze(1) - side // 2  # [n, 1]
        place = torch.arange(length, device=key.device)  # [length]
        edges.append((place >= first) & (place < first + side))
    return ~(edges[0].unsqueeze(2) & edges[1].unsqueeze(1))


def _draw(key: Tensor, purpose: str, count: int) -> Tensor:
    """One whole number below `count` for each key."""
    word = rng.fold_in(key, purpose)
    return (word >> 33) % count  # python-style modulo: never negative
