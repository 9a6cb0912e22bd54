"""Local batches: which examples each step of a client uses, and the examples on the device.

A batch plan is a pure function of a key and the number of examples, so it is the same on every
engine. Images stay uint8 on the device, where batches are gathered, normalized and augmented.
Augmentation draws from (key, example), so padding and batching over clients do not change it.
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
from remanence.data.dataset import statistics_shape

AUGMENTATIONS = ("crop", "flip", "cutout")
CROP_PADDING = 4
# side of the square that cutout erases; on images smaller than 32, half of their shorter side
CUTOUT = 16


class BatchPlan(NamedTuple):
    """The examples of each local step of a client.

    Args:
        indices: [steps, batch] int64, positions in the client's examples; a smaller batch is padded
            with its first example.
        batch_sizes: [steps] int64, the number of examples before the padding.
    """

    indices: np.ndarray
    batch_sizes: np.ndarray


def plan_batches(
    key: Key, count: int, batch: int, epochs: int = 0, steps: int = 0, drop_last: bool = False
) -> BatchPlan:
    """Plan the local batches of a client; every epoch visits all examples once in a new order.

    Args:
        key: the orders are a function of it.
        count: the number of examples of the client.
        batch: the batch size.
        epochs: the number of epochs, if `steps` is 0.
        steps: the number of steps; epochs repeat until there are that many.
        drop_last: leave out the last batch of an epoch if it is smaller.

    >>> plan = plan_batches(Key(0), count=5, batch=2, epochs=1)
    >>> plan.batch_sizes.tolist()
    [2, 2, 1]
    """
    batch = min(batch, count)
    per_epoch = count // batch if drop_last else -(-count // batch)
    total = steps or epochs * per_epoch
    orders = [key.fold_in(epoch).permutation(count) for epoch in range(-(-total // per_epoch))]
    indices = np.empty((total, batch), dtype=np.int64)
    batch_sizes = np.full(total, batch, dtype=np.int64)
    for step in range(total):
        epoch, number = divmod(step, per_epoch)
        part = orders[epoch][number * batch : (number + 1) * batch]
        indices[step, : len(part)] = part
        indices[step, len(part) :] = part[0]
        batch_sizes[step] = len(part)
    return BatchPlan(indices, batch_sizes)


def plan_batches_many(
    key_values: np.ndarray,
    counts: np.ndarray,
    batch: int,
    epochs: int = 0,
    steps: int = 0,
    drop_last: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Plan the local batches of many clients at once, as `plan_batches` does for each.

    Args:
        key_values: [k] uint64, the key of each client.
        counts: [k] the number of examples of each client.
        batch: as for `plan_batches`.
        epochs: as for `plan_batches`.
        steps: as for `plan_batches`.
        drop_last: as for `plan_batches`.

    Returns:
        indices [k, most steps, largest batch] and batch sizes [k, most steps]. Smaller batches are
        padded with their first example; after the last step of a client both are 0.
    """
    totals = {
        count: count_steps(count, batch, epochs, steps, drop_last) for count in set(counts.tolist())
    }
    most = max(totals.values())
    indices = np.zeros((len(counts), most, min(batch, max(totals))), dtype=np.int64)
    batch_sizes = np.zeros((len(counts), most), dtype=np.int64)
    for count, total in totals.items():  # clients of equal size together
        clients, size = np.flatnonzero(counts == count), min(batch, count)
        per_epoch = count // size if drop_last else -(-count // size)
        num_epochs = -(-total // per_epoch)
        values = rng.fold_in_batch(key_values[clients, None], np.arange(num_epochs)).reshape(-1)
        # [clients * epochs, examples used]
        orders = rng.permutations(values, count)[:, : per_epoch * size]
        missing = per_epoch * size - orders.shape[1]
        if missing:
            padding = np.repeat(orders[:, (per_epoch - 1) * size, None], missing, axis=1)
            orders = np.concatenate([orders, padding], axis=1)
        planned = orders.reshape(len(clients), num_epochs * per_epoch, size)[:, :total]
        indices[clients, :total, :size] = planned
        indices[clients, :total, size:] = planned[:, :, :1]
        last = np.arange(total) % per_epoch == per_epoch - 1
        batch_sizes[clients, :total] = np.where(last, size - missing, size)
    return indices, batch_sizes


def count_steps(count: int, batch: int, epochs: int, steps: int, drop_last: bool) -> int:
    """Return the number of local steps that `plan_batches` makes of `count` examples."""
    batch = min(batch, count)
    return steps or epochs * (count // batch if drop_last else -(-count // batch))


@dataclass(frozen=True)
class Examples:
    """Inputs and labels of a split on a device.

    Args:
        x: [stored, ...] raw inputs: uint8 images, float tables, int64 tokens.
        y: [n] int64, the label of each id.
        mean: in raw units, broadcastable to one example; None: no normalization.
        std: likewise.
        dtype: of the inputs that a model gets.
        augment: names from `AUGMENTATIONS`.
        storage_index: [n] int64, the position of each id in x; None: the id itself.
    """

    x: Tensor
    y: Tensor
    mean: Tensor | None
    std: Tensor | None
    dtype: torch.dtype
    augment: tuple[str, ...] = ()
    storage_index: Tensor | None = None

    def inputs(self, ids: Tensor) -> Tensor:
        """Return normalized inputs. ids: [...] -> [..., example shape]"""
        return self._normalize(self._raw(ids))

    def augmented(self, ids: Tensor, key: Tensor) -> Tensor:
        """Return normalized and augmented inputs. ids: [..., B]; key: [...], one for each batch."""
        x = self._raw(ids)
        if self.augment:
            flat = rng.fold_in(rng.fold_in(key, "augment").unsqueeze(-1), ids).reshape(-1)
            x = augment_images(x.reshape(-1, *x.shape[ids.dim() :]), flat, self.augment).reshape(
                x.shape
            )
        x = self._normalize(x)
        if "cutout" in self.augment:  # after normalization, so that the erased square is the mean
            x = x * cutout_mask(flat, *x.shape[-2:]).reshape(*ids.shape, 1, *x.shape[-2:])
        return x

    def labels(self, ids: Tensor) -> Tensor:
        """Return labels. ids: [...] -> [...]"""
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
    storage_index: np.ndarray | None = None,
) -> Examples:
    """Copy a split to a device.

    Args:
        x: raw inputs, as `DatasetSplit` or `ConceptViews` hold them.
        y: the label of each id.
        statistics: mean and standard deviation of the inputs; None: no normalization.
        device: where the examples are stored.
        dtype: of the inputs that a model gets.
        augment: names from `AUGMENTATIONS`.
        storage_index: the position of each id in x; None: the id itself.
    """
    unknown = [name for name in augment if name not in AUGMENTATIONS]
    if unknown:
        raise InputError(f"unknown augmentation {unknown[0]!r}: known: {', '.join(AUGMENTATIONS)}")
    if augment and x.ndim != 4:
        raise InputError(
            "crop, flip and cutout are for images: leave data.augment empty for this data"
        )
    # torch warns about read-only arrays such as memory-mapped files
    if not x.flags.writeable:
        x = np.array(x)
    if x.dtype == np.float64 and dtype == torch.float32:
        x = x.astype(np.float32)
    mean = std = None
    if statistics is not None:
        shape = statistics_shape(x.shape[1:])
        mean, std = (
            torch.as_tensor(s, dtype=torch.float64).to(dtype).reshape(shape).to(device)
            for s in statistics
        )
    labels = torch.from_numpy(np.asarray(y, dtype=np.int64)).to(device)
    stored = None if storage_index is None else torch.from_numpy(storage_index).to(device)
    return Examples(
        torch.from_numpy(x).to(device), labels, mean, std, dtype, tuple(augment), stored
    )


def augment_images(x: Tensor, key: Tensor, names: Sequence[str]) -> Tensor:
    """Flip horizontally and crop with padding at random. x: [n, c, h, w]; key: [n]"""
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
    """Return masks for cutout (DeVries and Taylor 2017): False in a square around a random pixel,
    clipped at the border. key: [n], one an image -> [n, h, w]
    """
    side = min(CUTOUT, min(height, width) // 2)
    edges = []
    for word, length in (("hole rows", height), ("hole columns", width)):
        first = _draw(key, word, length).unsqueeze(1) - side // 2  # [n, 1]
        position = torch.arange(length, device=key.device)  # [length]
        edges.append((position >= first) & (position < first + side))
    return ~(edges[0].unsqueeze(2) & edges[1].unsqueeze(1))


def _draw(key: Tensor, purpose: str, count: int) -> Tensor:
    """Draw one integer below `count` for each key."""
    word = rng.fold_in(key, purpose)
    return (word >> 33) % count  # the sign of Python's modulo: never negative
