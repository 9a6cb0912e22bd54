"""The front of a network that a phase of training leaves alone: looked at once for each row,
instead of in every step.

Fine-tuning the last layers computes, epoch after epoch, the same activations below them. Where
nothing else reads a step's inputs, a network is cut at the first layer that is trained (or that
draws or mixes rows), and the phase trains the rear on what the front made of a client's rows. The
numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn

from remanence.core.model import BatchNorms, FeatureHook, InstanceNorms, KeyedDropout, Model
from remanence.core.pytree import Params
from remanence.core.types import ModelState
from remanence.data.batches import Examples
from remanence.engines.vector_steps import round_up
from remanence.training.task import TrainingTask

ROWS = 250  # rows the front sees at once
CLOSE = 1e-3  # of the largest activation: a front that mixed rows would be off by far more,
LOOSE = 3e-2  # also where bf16 or tf32 rounds, and other kernels see one row than three

PredictStacked = Callable[
    [TrainingTask, ModelState, Tensor, int | None], Tensor
]  # as `judge_models` does


class PrefixSplit(NamedTuple):
    """A network in two pieces."""

    frozen_prefix: Model  # inputs -> what the rear starts from, as if they were logits
    trainable_suffix: Model  # that -> logits
    width: int  # bytes of what the front makes of one row

    def suffix_params(self, tree: Params) -> Params:
        """Those parameters or buffers that are the rear's."""
        return restrict_to(self.trainable_suffix.train_module, tree)

    @torch.no_grad()
    def features(self, model: ModelState, x: Tensor) -> Tensor:
        """What the front makes of some rows."""
        return self.frozen_prefix.predict(
            ModelState(*(restrict_to(self.frozen_prefix.eval_module, tree) for tree in model)), x
        ).logits

    def features_of(self, model: ModelState, examples: Examples, ids: Tensor) -> Tensor:
        """What the front makes of many rows, a part at a time. ids: [n] -> [n, ...]"""
        return torch.cat(
            [self.features(model, examples.inputs(part)) for part in torch.split(ids, ROWS)]
        )

    def with_cached_features(
        self, task: TrainingTask, model: ModelState, ids: Tensor
    ) -> TrainingTask:
        """The task of training the rear alone on these rows, which the front of `model` has
        seen. ids: [n], each row once
        """
        # never read at other rows
        place = torch.empty(len(task.train.y), dtype=torch.int64, device=ids.device)
        place[ids] = torch.arange(len(ids), device=ids.device)
        seen = Examples(
            self.features_of(model, task.train, ids),
            task.train.y,
            None,
            None,
            task.train.dtype,
            (),
            place,
        )
        return replace(task, model=self.trainable_suffix, train=seen)

    @torch.no_grad()
    def stack_with_cached_features(
        self,
        task: TrainingTask,
        models: ModelState,
        rows: Tensor,
        at_once: int,
        judge: PredictStacked,
    ) -> TrainingTask:
        """The same for a stack of clients, each of whose fronts sees the client's own rows; they
        are called by other numbers then, those of `flat_indices`.

        models: [k, ...]; rows: [k, n] ids; at_once: of n, how many are looked at together; judge:
            by what
        """
        front, (clients, many) = replace(task, model=self.frozen_prefix), rows.shape
        fronts = ModelState(*(restrict_to(self.frozen_prefix.eval_module, tree) for tree in models))
        x, y = torch.empty(0, device=rows.device), rows.new_zeros(clients, round_up(many))
        y[:, :many] = task.train.labels(rows)
        for first in range(0, many, at_once):
            seen = judge(front, fronts, task.train.inputs(rows[:, first : first + at_once]), 0)
            if first == 0:
                x = seen.new_zeros(clients, round_up(many), *seen.shape[2:])
            x[:, first : first + seen.shape[1]] = seen
        return replace(
            task,
            model=self.trainable_suffix,
            train=Examples(x.flatten(0, 1), y.flatten(), None, None, task.train.dtype),
        )


def flat_indices(rows: Tensor) -> Tensor:
    """What the rows of a stack's clients are called where each has activations of its own: [k, n]
    -> [k, n]

    >>> flat_indices(torch.tensor([[7, 9, 7], [9, 5, 8]]))
    tensor([[0, 1, 2],
            [4, 5, 6]])
    """
    clients, many = rows.shape
    first = round_up(many) * torch.arange(clients, device=rows.device)
    return first.unsqueeze(1) + torch.arange(many, device=rows.device)


def restrict_to(module: nn.Module, tree: Params) -> Params:
    """Those parameters or buffers that a module has."""
    mine = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    return {name: value for name, value in tree.items() if name in mine}


def find_split(task: TrainingTask, trained: Collection[str]) -> PrefixSplit | None:
    """Where the network can be cut if only these parameters are trained; None where it cannot,
    or nothing would be gained.
    """
    everything = set(task.model.initial.params) <= set(trained)
    # a tied weight could stand on both sides
    if everything or task.model.has_tied_weights or not inputs_only_feed_model(task):
        return None
    try:
        split = cut(
            task.model,
            trained,
            task.train.inputs(torch.arange(min(3, len(task.train.y)), device=task.info.device)),
        )
    # tracing runs a user's code on stand-ins for tensors, which may fail in any way: the network is
    # then trained whole
    except Exception:
        return None
    finally:
        task.model.train_features.release()  # what a traced hook has seen is no tensor
    return split


def inputs_only_feed_model(task: TrainingTask) -> bool:
    """Does nobody but the network read the inputs of a step? And are those of a row the same in
    every epoch?
    """
    method, owner = task.method, task.method.part_filling("loss")
    known = owner is None or not owner.reads_inputs
    return known and not (
        task.train.augment
        or method.hooks("loss_terms")
        or method.hook("gradient")
        or method.trackers("step")
    )


def cut(model: Model, trained: Collection[str], example: Tensor) -> PrefixSplit | None:
    """Raises where the module cannot be traced. example: [3 or more rows, ...]"""
    graph = _Tracer().trace(model.train_module)
    late = _trainable_nodes(model.train_module, graph, trained)
    early = [node for node in graph.nodes if node not in late and node.op != "get_attr"]
    crossing = [node for node in early if any(user in late for user in node.users)]
    works = [
        node
        for node in early
        if node.op == "call_module"
        and list(model.train_module.get_submodule(str(node.target)).parameters())
    ]
    if len(crossing) != 1 or not works:
        return None
    first, second = (
        _copy(model.train_module, graph, kept, crossing[0]) for kept in (set(early), late)
    )
    front = replace(
        model, eval_module=first, eval_features=FeatureHook(first, None), dropout_keys=()
    )
    names = {name for name, _ in second.named_buffers()}
    rear = replace(
        model,
        train_module=second,
        dropout_keys=tuple(name for name in model.dropout_keys if name in names),
    )
    return _check(model, front, rear, example)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Keyed dropout needs real shapes, and the hook that taps the head is not to be lost."""
        return (
            isinstance(m, KeyedDropout)
            or bool(m._forward_pre_hooks)
            or super().is_leaf_module(m, module_qualified_name)
        )


def _trainable_nodes(module: nn.Module, graph: fx.Graph, trained: Collection[str]) -> set[fx.Node]:
    """What depends on a trained parameter, on chance, or on the other rows of a batch; the
    output, too.
    """
    # tied parameters have one name
    mine = {id(p) for name, p in module.named_parameters() if name in trained}
    late: set[fx.Node] = set()
    for node in graph.nodes:
        own = False
        if node.op == "call_module":
            layer = module.get_submodule(str(node.target))
            own = any(id(p) in mine for p in layer.parameters()) or any(
                _varies(inner) for inner in layer.modules()
            )
        elif node.op == "get_attr":
            path, _, name = str(node.target).rpartition(".")
            own = id(getattr(module.get_submodule(path), name)) in mine
        if own or node.op == "output" or any(source in late for source in node.all_input_nodes):
            late.add(node)
    return late


def _varies(layer: nn.Module) -> bool:
    if isinstance(layer, (*BatchNorms, *InstanceNorms)):
        return layer.training or not layer.track_running_stats
    return isinstance(layer, KeyedDropout) and layer.p > 0


def _copy(
    module: nn.Module, graph: fx.Graph, kept: set[fx.Node], crossing: fx.Node
) -> fx.GraphModule:
    """The part of a traced network on one side of the crossing; constants stand on both."""
    part: fx.Graph = fx.Graph()
    place: dict[fx.Node, fx.Node] = {}
    if crossing not in kept:
        place[crossing] = part.placeholder("seen")
    for node in graph.nodes:
        if node in kept or (node.op == "get_attr" and any(user in kept for user in node.users)):
            place[node] = part.node_copy(node, lambda source: place[source])
    if crossing in kept:
        part.output(place[crossing])
    return fx.GraphModule(module, part)


def _check(model: Model, front: Model, rear: Model, example: Tensor) -> PrefixSplit | None:
    """Both pieces together must be the network, and the front must treat every row by itself."""
    params, buffers = model.initial
    key = torch.zeros((), dtype=torch.int64, device=example.device)
    with torch.no_grad():
        split = PrefixSplit(front, rear, 0)
        seen, alone = (
            split.features(model.initial, example),
            split.features(model.initial, example[:1]),
        )
        whole, _ = model.apply(params, buffers, example, key)
        pieces, _ = rear.apply(split.suffix_params(params), split.suffix_params(buffers), seen, key)
    allowed = CLOSE if example.device.type == "cpu" and model.autocast is None else LOOSE
    if len(seen) != len(example) or not all(
        _close(*pair, allowed) for pair in ((seen[:1], alone), (whole.logits, pieces.logits))
    ):
        return None
    return split._replace(width=seen[0].numel() * seen.element_size())


def _close(a: Tensor, b: Tensor, allowed: float) -> bool:
    return a.shape == b.shape and bool(
        (a - b).abs().max() <= allowed * max(1.0, float(a.abs().max()))
    )
