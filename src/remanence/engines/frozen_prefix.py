"""The frozen prefix: the layers that a phase does not train, computed once for each example instead
of in every step.

Fine-tuning the last layers computes the same activations below them in every epoch. Where only the
model reads a step's inputs, the network is cut before the first layer that is trained, draws random
numbers or mixes examples. The phase then trains the suffix on the activations of the prefix. The
results are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn

from remanence.core.model import FeatureHook, Model
from remanence.core.model_layers import BatchNorms, InstanceNorms, KeyedDropout
from remanence.core.pytree import Params
from remanence.core.types import ModelState
from remanence.data.batches import Examples
from remanence.engines.vector_steps import round_up
from remanence.kernels.torch_internals import has_pre_hooks
from remanence.training.task import TrainingTask

ROWS = 250  # examples of one forward pass of the prefix
# Largest difference, relative to the largest activation, between a network and its two pieces. A
# prefix that mixed examples would differ far more.
TOLERANCE = 1e-3
LOW_PRECISION_TOLERANCE = 3e-2  # with bf16 or tf32, whose kernels depend on the number of examples

# as `evaluation.predict_logits_stacked`
PredictStacked = Callable[[TrainingTask, ModelState, Tensor, int | None], Tensor]


class PrefixSplit(NamedTuple):
    """A network in two pieces."""

    frozen_prefix: Model  # inputs -> activations, returned as logits
    trainable_suffix: Model  # activations -> logits
    width: int  # bytes of one example's activations

    def suffix_params(self, tree: Params) -> Params:
        """The parameters or buffers of the suffix."""
        return restrict_to(self.trainable_suffix.train_module, tree)

    @torch.no_grad()
    def features(self, model: ModelState, x: Tensor) -> Tensor:
        """The prefix's activations of some inputs."""
        return self.frozen_prefix.predict(
            ModelState(*(restrict_to(self.frozen_prefix.eval_module, tree) for tree in model)), x
        ).logits

    def features_of(self, model: ModelState, examples: Examples, ids: Tensor) -> Tensor:
        """The prefix's activations of many examples, in parts. ids: [n] -> [n, ...]"""
        return torch.cat(
            [self.features(model, examples.inputs(part)) for part in torch.split(ids, ROWS)]
        )

    def with_cached_features(
        self, task: TrainingTask, model: ModelState, ids: Tensor
    ) -> TrainingTask:
        """The task of training the suffix on the activations of these examples.

        Args:
            task: The task of training the whole network.
            model: Whose prefix is computed.
            ids: [n] examples, each once.
        """
        # entries of other examples are never read, so they stay uninitialized
        place = torch.empty(len(task.train.y), dtype=torch.int64, device=ids.device)
        place[ids] = torch.arange(len(ids), device=ids.device)
        cached = Examples(
            self.features_of(model, task.train, ids),
            task.train.y,
            None,
            None,
            task.train.dtype,
            (),
            place,
        )
        return replace(task, model=self.trainable_suffix, train=cached)

    @torch.no_grad()
    def stack_with_cached_features(
        self,
        task: TrainingTask,
        models: ModelState,
        rows: Tensor,
        rows_per_pass: int,
        predict: PredictStacked,
    ) -> TrainingTask:
        """The same for a stack of clients, each with the prefix of its own model.

        An example that two clients hold has two activations, so the ids of examples are those of
        `flat_indices`.

        Args:
            task: The task of training the whole network.
            models: Stacked [k, ...].
            rows: [k, n] ids of the clients' examples.
            rows_per_pass: Of the n, how many one forward pass takes.
            predict: Computes the forward pass.
        """
        prefix_task, (clients, count) = replace(task, model=self.frozen_prefix), rows.shape
        prefixes = ModelState(
            *(restrict_to(self.frozen_prefix.eval_module, tree) for tree in models)
        )
        x, y = torch.empty(0, device=rows.device), rows.new_zeros(clients, round_up(count))
        y[:, :count] = task.train.labels(rows)
        for first in range(0, count, rows_per_pass):
            inputs = task.train.inputs(rows[:, first : first + rows_per_pass])
            part = predict(prefix_task, prefixes, inputs, 0)
            if first == 0:
                x = part.new_zeros(clients, round_up(count), *part.shape[2:])
            x[:, first : first + part.shape[1]] = part
        return replace(
            task,
            model=self.trainable_suffix,
            train=Examples(x.flatten(0, 1), y.flatten(), None, None, task.train.dtype),
        )


def flat_indices(rows: Tensor) -> Tensor:
    """Ids for the activations of a stack's clients, one for each client and example.

    rows: [k, n] -> [k, n]

    >>> flat_indices(torch.tensor([[7, 9, 7], [9, 5, 8]]))
    tensor([[0, 1, 2],
            [4, 5, 6]])
    """
    clients, count = rows.shape
    first = round_up(count) * torch.arange(clients, device=rows.device)
    return first.unsqueeze(1) + torch.arange(count, device=rows.device)


def restrict_to(module: nn.Module, tree: Params) -> Params:
    """The parameters or buffers that a module has."""
    names = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    return {name: value for name, value in tree.items() if name in names}


def find_split(task: TrainingTask, trained: Collection[str]) -> PrefixSplit | None:
    """Where the network can be cut if only these parameters are trained.

    None where it cannot be cut, or nothing is gained.
    """
    everything = set(task.model.initial.params) <= set(trained)
    # a tied weight could be in both pieces
    if everything or task.model.has_tied_weights or not inputs_only_feed_model(task):
        return None
    try:
        split = cut(
            task.model,
            trained,
            task.train.inputs(torch.arange(min(3, len(task.train.y)), device=task.info.device)),
        )
    # tracing runs a user's code on proxies of tensors, which may fail in any way: the network is
    # then trained whole
    except Exception:
        return None
    finally:
        task.model.train_features.release()  # the hook holds a proxy, no tensor
    return split


def inputs_only_feed_model(task: TrainingTask) -> bool:
    """Does only the model read the inputs of a step, and are they the same in every epoch?"""
    method, part = task.method, task.method.part_filling("loss")
    known = part is None or not part.reads_inputs
    return known and not (
        task.train.augment
        or method.hooks("loss_terms")
        or method.hook("gradient")
        or method.hook("project")
        or method.trackers("step")
    )


def cut(model: Model, trained: Collection[str], example: Tensor) -> PrefixSplit | None:
    """Raises where the module cannot be traced. example: [3 or more rows, ...]"""
    graph = _Tracer().trace(model.train_module)
    trainable = _trainable_nodes(model.train_module, graph, trained)
    frozen = [node for node in graph.nodes if node not in trainable and node.op != "get_attr"]
    crossing = [node for node in frozen if any(user in trainable for user in node.users)]
    with_params = [
        node
        for node in frozen
        if node.op == "call_module"
        and list(model.train_module.get_submodule(str(node.target)).parameters())
    ]
    if len(crossing) != 1 or not with_params:
        return None
    first, second = (
        _copy(model.train_module, graph, kept, crossing[0]) for kept in (set(frozen), trainable)
    )
    prefix = replace(
        model, eval_module=first, eval_features=FeatureHook(first, None), dropout_keys=()
    )
    names = {name for name, _ in second.named_buffers()}
    suffix = replace(
        model,
        train_module=second,
        dropout_keys=tuple(name for name in model.dropout_keys if name in names),
    )
    return _check(model, prefix, suffix, example)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Keyed dropout needs real shapes, and the hook that reads features must stay."""
        return (
            isinstance(m, KeyedDropout)
            or has_pre_hooks(m)
            or super().is_leaf_module(m, module_qualified_name)
        )


def _trainable_nodes(module: nn.Module, graph: fx.Graph, trained: Collection[str]) -> set[fx.Node]:
    """The nodes of the suffix: those that depend on a trained parameter, on random numbers or on
    the other examples of a batch, and the output.
    """
    # tied parameters have one name
    trained_ids = {id(p) for name, p in module.named_parameters() if name in trained}
    found: set[fx.Node] = set()
    for node in graph.nodes:
        varies = False
        if node.op == "call_module":
            layer = module.get_submodule(str(node.target))
            varies = any(id(p) in trained_ids for p in layer.parameters()) or any(
                _varies(inner) for inner in layer.modules()
            )
        elif node.op == "get_attr":
            path, _, name = str(node.target).rpartition(".")
            varies = id(getattr(module.get_submodule(path), name)) in trained_ids
        depends = any(source in found for source in node.all_input_nodes)
        if varies or node.op == "output" or depends:
            found.add(node)
    return found


def _varies(layer: nn.Module) -> bool:
    if isinstance(layer, (*BatchNorms, *InstanceNorms)):
        return layer.training or not layer.track_running_stats
    return isinstance(layer, KeyedDropout) and layer.p > 0


def _copy(
    module: nn.Module, graph: fx.Graph, kept: set[fx.Node], crossing: fx.Node
) -> fx.GraphModule:
    """The part of a traced network on one side of the crossing; constants are on both."""
    part: fx.Graph = fx.Graph()
    place: dict[fx.Node, fx.Node] = {}
    if crossing not in kept:
        place[crossing] = part.placeholder("activations")
    for node in graph.nodes:
        if node in kept or (node.op == "get_attr" and any(user in kept for user in node.users)):
            place[node] = part.node_copy(node, lambda source: place[source])
    if crossing in kept:
        part.output(place[crossing])
    return fx.GraphModule(module, part)


def _check(model: Model, prefix: Model, suffix: Model, example: Tensor) -> PrefixSplit | None:
    """None unless both pieces together are the network and the prefix mixes no examples."""
    params, buffers = model.initial
    key = torch.zeros((), dtype=torch.int64, device=example.device)
    with torch.no_grad():
        split = PrefixSplit(prefix, suffix, 0)
        features = split.features(model.initial, example)
        single = split.features(model.initial, example[:1])
        whole, _ = model.apply(params, buffers, example, key)
        pieces, _ = suffix.apply(
            split.suffix_params(params), split.suffix_params(buffers), features, key
        )
    exact = example.device.type == "cpu" and model.autocast is None
    tolerance = TOLERANCE if exact else LOW_PRECISION_TOLERANCE
    if len(features) != len(example) or not all(
        _close(*pair, tolerance) for pair in ((features[:1], single), (whole.logits, pieces.logits))
    ):
        return None
    return split._replace(width=features[0].numel() * features.element_size())


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return a.shape == b.shape and bool(
        (a - b).abs().max() <= tolerance * max(1.0, float(a.abs().max()))
    )
