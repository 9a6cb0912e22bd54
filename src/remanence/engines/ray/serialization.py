"""Trees and tasks as bytes, for another machine.

The object store maps arrays into every worker of a node without a copy. Models and states are
therefore sent as arrays (`engines/packing.py`), and the receiver copies them, since it may change
them. Examples are only read, and stay in the store.

A task has functions as well as numbers, so it is pickled: for our own workers, never for a file.
"""

from __future__ import annotations

import importlib
import io
import os
import warnings
from collections import ChainMap
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from remanence.core import pytree
from remanence.core.errors import InputError
from remanence.core.types import ModelState
from remanence.data.batches import Examples
from remanence.engines.packing import PackedTensor, map_items
from remanence.training.task import TrainingTask

NamedArrays = dict[str, np.ndarray]
# of the examples: nearly all bytes of a task, the same for every worker
READ_ONLY = ("x", "y", "storage_index")


def unpack(value: Any, device: torch.device) -> Any:
    """The inverse of `packing.pack`. Everything is a copy: arrays of the store are read-only."""
    if isinstance(value, PackedTensor):
        return torch.tensor(value.array, device=device)
    if isinstance(value, np.ndarray):
        return value.copy()
    return map_items(lambda item: unpack(item, device), value)


def nbytes(value: Any) -> int:
    """Bytes of all arrays in a packed value."""
    if isinstance(value, PackedTensor | np.ndarray):
        return int((value.array if isinstance(value, PackedTensor) else value).nbytes)
    items: Any = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, tuple | list)
        else ()
    )
    return sum(nbytes(item) for item in items)


@dataclass
class ByteCounter:
    """Bytes of arrays that an engine sends and receives; what all workers share counts once."""

    down: int = 0
    up: int = 0

    def count(self, *, down: Any = (), up: Any = ()) -> None:
        self.down += nbytes(down)
        self.up += nbytes(up)


@dataclass(frozen=True)
class TaskBundle:
    """A task: everything but the examples as bytes, and the examples as arrays."""

    pickled: bytes
    examples: NamedArrays


@dataclass(frozen=True)
class TorchSettings:
    """torch's settings for a process: a worker must compute with those of the run's process."""

    deterministic: bool
    matmul_tf32: bool
    cudnn_tf32: bool
    cudnn_benchmark: bool

    @staticmethod
    def read() -> TorchSettings:
        """Of this process."""
        cudnn = torch.backends.cudnn
        matmul_tf32 = torch.backends.cuda.matmul.allow_tf32
        return TorchSettings(
            torch.are_deterministic_algorithms_enabled(),
            matmul_tf32,
            cudnn.allow_tf32,
            cudnn.benchmark,
        )

    def apply(self) -> None:
        """To this process, before it first computes on a GPU."""
        # cuBLAS reads it once in a process, and refuses to be deterministic without it
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(self.deterministic)
        torch.backends.cuda.matmul.allow_tf32 = self.matmul_tf32
        torch.backends.cudnn.allow_tf32 = self.cudnn_tf32
        torch.backends.cudnn.benchmark = self.cudnn_benchmark


def send_task(task: TrainingTask) -> TaskBundle:
    """A task as bytes and arrays, from any device."""
    examples = {
        f"{split}.{name}": array
        for split, held in (("train", task.train), ("test", task.test))
        for name, array in _arrays_of(held).items()
    }
    return TaskBundle(pickle_task(task), examples)


def pickle_task(task: TrainingTask) -> bytes:
    """A task without its examples; raises `InputError` where it cannot be pickled."""
    from ray import cloudpickle

    without_examples = replace(
        task, train=_without_arrays(task.train), test=_without_arrays(task.test)
    )
    file = io.BytesIO()
    reducers = {
        Tensor: _reduce_on_host,
        type(torch.classes): _reduce_by_name,
        type(torch.ops): _reduce_by_name,
    }
    base_pickler: Any = cloudpickle.Pickler
    # our reducers come first
    pickler = type(
        "TaskPickler",
        (base_pickler,),
        {"dispatch_table": ChainMap(reducers, base_pickler.dispatch_table)},
    )
    try:
        pickler(file).dump(without_examples)
    # a part or a network may hold anything: a lock, an open file, a generator
    except Exception as error:
        raise InputError(
            "engine ray cannot send this experiment to its workers, because something in"
            f" the method or the model cannot be pickled ({error}):"
            " make it inside the function that uses it, or use engine=processes"
        ) from error
    return file.getvalue()


def receive_task(bundle: TaskBundle, device: torch.device) -> TrainingTask:
    """The task on a device of this machine."""
    from ray import cloudpickle

    task: TrainingTask = cloudpickle.loads(bundle.pickled)
    model = task.model
    for module in (model.source_module, model.train_module, model.eval_module):
        assert isinstance(module, nn.Module)
        module.to(device)
    initial = ModelState(
        pytree.to(model.initial.params, device), pytree.to(model.initial.buffers, device)
    )
    return replace(
        task,
        model=replace(model, initial=initial),
        info=replace(task.info, device=device),
        train=_with_arrays(task.train, "train", bundle.examples, device),
        test=_with_arrays(task.test, "test", bundle.examples, device),
    )


def _arrays_of(examples: Examples) -> NamedArrays:
    held = {name: getattr(examples, name) for name in READ_ONLY}
    return {name: value.cpu().numpy() for name, value in held.items() if value is not None}


def _without_arrays(examples: Examples) -> Examples:
    return replace(
        examples, x=torch.empty(0), y=torch.empty(0, dtype=torch.int64), storage_index=None
    )


def _with_arrays(
    examples: Examples, split: str, arrays: NamedArrays, device: torch.device
) -> Examples:
    held = {name: arrays[f"{split}.{name}"] for name in READ_ONLY if f"{split}.{name}" in arrays}
    placed: dict[str, Any] = {
        name: value.to(device)
        for name in ("mean", "std")
        if (value := getattr(examples, name)) is not None
    }
    # torch warns that an array is read-only; examples are never written
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        placed |= {name: torch.from_numpy(array).to(device) for name, array in held.items()}
    return replace(examples, **placed)


def _reduce_on_host(tensor: Tensor) -> Any:
    """A worker may have other devices, or none."""
    return tensor.cpu().__reduce_ex__(4)  # type: ignore[no-untyped-call]


def _reduce_by_name(module: ModuleType) -> Any:
    """torch.classes and torch.ops are special modules, which a pickler would include."""
    return importlib.import_module, (module.__name__,)
