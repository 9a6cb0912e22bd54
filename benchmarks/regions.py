"""A graph compiled in regions, each different one once in a process.

Convolutions and matrix products are library calls, which a compiler does not fuse with anything.
Between them lie regions of elementwise operations and sums. `split` cuts a graph into both. Regions
with the same operations on tensors of the same shapes, strides and dtypes are compiled once: the
blocks that a network repeats, parameters of the same shape, and whatever the steps of two methods
have in common.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from compile_workers import GraphToCompile, compile_all
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch_parts import propagate_layouts, trace_pure

# Operations that a library computes.
PRODUCTS = ("aten.convolution", "aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "remanence.")
# Operations that compute nothing.
VIEWS = {
    *("view", "_unsafe_view", "permute", "transpose", "t", "expand", "unsqueeze", "squeeze"),
    *("select", "slice", "detach", "alias", "as_strided", "diagonal"),
    *("split", "split_with_sizes", "unbind"),
}
# Operations of a level that read the same tensor become one region, so that it is read once, if it
# has more elements than this. A learning rate does not join the updates of all parameters.
SMALL = 2**14

Run = Callable[..., Sequence[Any]]

# by operations, and by shapes, strides, dtypes and devices of the inputs
_compiled: dict[Any, Run] = {}


class Region(NamedTuple):
    """Operations without a library call between them, or one library call. Views belong to no
    region: each one makes those that it reads.
    """

    nodes: list[Node]
    product: bool

    def inputs(self) -> list[Node]:
        """What it reads from other regions, in the order of first use."""
        own = set(self.nodes)
        read = dict.fromkeys(each for node in self.nodes for each in sources(node))
        return [node for node in read if node not in own]

    def outputs(self) -> list[Node]:
        """What other regions read."""
        own = set(self.nodes)
        return [node for node in self.nodes if any(reader not in own for reader in readers(node))]


class Call(NamedTuple):
    """A region as a function of the values of its inputs."""

    run: Any
    inputs: list[Node]
    outputs: list[Node]
    key: Any = None  # equal for regions that are compiled once; None: it is not compiled
    layouts: Sequence[Any] = ()  # of the inputs
    last_use: Sequence[Node] = ()  # values that no later region reads


def compile_regions(
    graph: GraphModule, inputs: Sequence[Tensor], options: dict[str, Any] | None
) -> Run:
    """Compile a graph for inputs of exactly these shapes, dtypes and strides.

    Args:
        graph: The graph.
        inputs: Its inputs.
        options: Of the compiler.

    Returns:
        A function of such inputs that returns the graph's results.
    """
    pure = trace_pure(graph, inputs)
    values = propagate_layouts(pure, inputs)
    calls = _compile_calls([_prepare(region, values) for region in split(pure)], options)
    placeholders = [node for node in pure.graph.nodes if node.op == "placeholder"]
    (results,) = (node.args[0] for node in pure.graph.nodes if node.op == "output")
    constants = {
        node: getattr(pure, str(node.target)) for node in pure.graph.nodes if node.op == "get_attr"
    }
    calls = _free_early(calls, {node for node in results if isinstance(node, Node)})

    def run(*tensors: Tensor) -> list[Any]:
        known: dict[Node, Any] = constants | dict(zip(placeholders, tensors, strict=True))
        for call in calls:
            found = call.run(*[known[node] for node in call.inputs])
            known.update(zip(call.outputs, found, strict=True))
            for node in call.last_use:
                del known[node]
        return [known[each] if isinstance(each, Node) else each for each in results]

    return run


def split(graph: GraphModule) -> list[Region]:
    """The regions of a graph, in an order in which they can run.

    An operation belongs to the level of its inputs; what reads the result of a library call, to the
    next one; what only later levels read, to the first of these. A level is divided into regions
    that share neither results nor large inputs.
    """
    level = _levels(graph)
    members = defaultdict[tuple[int, bool], list[Node]](list)
    for node, at in level.items():
        members[at, bool(_product_of(node))].append(node)
    regions = []
    for at, is_product in sorted(members):
        parts = (_by_product if is_product else _connected)(members[at, is_product])
        regions += [Region(part, is_product) for part in parts]
    return regions


def _levels(graph: GraphModule) -> dict[Node, int]:
    """The level of each operation, in the order of the graph."""
    level = dict[Node, int]()
    for node in graph.graph.nodes:
        if node.op != "call_function" or is_view(node):
            continue
        product = _product_of(node)
        if product in level:
            level[node] = level[product]
        else:
            before = [*sources(node), *_readers_of_target(node)]
            levels = [level[each] + bool(_product_of(each)) for each in before if each in level]
            level[node] = max(levels, default=0)
    for node in reversed(level):
        if node.target is not operator.getitem and not _product_of(node) and _grows(node):
            # the inputs are kept for other readers, as a rule; the result need not be
            later = [level.get(reader, level[node]) for reader in readers(node)]
            level[node] = max(level[node], min(later, default=0))
    return level


def _grows(node: Node) -> bool:
    """Whether the result is at least as large as each input."""
    return _size(node) >= max(map(_size, sources(node)), default=0)


def _size(node: Node) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, Tensor) else 0


def is_view(node: Node) -> bool:
    """Whether an operation only shows the memory of its input in another form. What the graph
    returns is none.
    """
    if node.op != "call_function" or any(user.op == "output" for user in node.users):
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, Node) and is_view(source)
    return str(node.target).split(".")[1] in VIEWS


def sources(node: Node) -> list[Node]:
    """What a node reads, through views."""
    found = dict[Node, None]()
    for each in node.all_input_nodes:
        found.update(dict.fromkeys(sources(each) if is_view(each) else [each]))
    return list(found)


def readers(node: Node) -> list[Node]:
    """What reads a node, through views."""
    found = dict[Node, None]()
    for user in node.users:
        found.update(dict.fromkeys(readers(user) if is_view(user) else [user]))
    return list(found)


def _product_of(node: Node) -> Node | None:
    """The library call that a node is, or whose results it picks from."""
    source = node.args[0] if node.target is operator.getitem else node
    assert isinstance(source, Node)
    known = source.op == "call_function" and str(source.target).startswith(PRODUCTS)
    return source if known else None


def _readers_of_target(node: Node) -> list[Node]:
    """What must run before an input of the graph is overwritten."""
    if node.target is not torch.ops.aten.copy_.default:
        return []
    target = node.args[0]
    assert isinstance(target, Node)
    return [each for each in readers(target) if each is not node and each.op != "output"]


def _by_product(nodes: Sequence[Node]) -> list[list[Node]]:
    parts = defaultdict[Node | None, list[Node]](list)
    for node in nodes:
        parts[_product_of(node)].append(node)
    return list(parts.values())


def _connected(nodes: Sequence[Node]) -> list[list[Node]]:
    """Operations of a level in groups that share results, large inputs, or an input that one of
    them overwrites.
    """
    group, own = dict[Node, Node](), set(nodes)

    def root(node: Node) -> Node:
        while group.setdefault(node, node) is not node:
            node = group[node]
        return node

    for node in nodes:
        overwritten = [reader for reader in _readers_of_target(node) if reader in own]
        shared = [each for each in sources(node) if each in own or _size(each) > SMALL]
        for each in (*shared, *overwritten):
            group[root(each)] = root(node)
    parts = defaultdict[Node, list[Node]](list)
    for node in nodes:
        parts[root(node)].append(node)
    return list(parts.values())


def _prepare(region: Region, values: dict[Node, Any]) -> Call:
    """A region as a graph of its own, which is not compiled yet."""
    inputs, outputs = region.inputs(), region.outputs()
    graph, place = Graph(), dict[Node, Node]()
    number_of = dict[Node, str]()
    for number, node in enumerate(inputs):
        place[node], number_of[node] = graph.placeholder(f"input{number}"), f"%{number}"
    operations = []

    def add(node: Node) -> None:
        if node in place:
            return
        for each in node.all_input_nodes:
            add(each)
        place[node] = graph.node_copy(node, place.__getitem__)
        arguments = map_arg((node.args, node.kwargs), number_of.__getitem__)
        operations.append((str(node.target), str(arguments)))
        number_of[node] = f"%{len(number_of)}"

    for node in region.nodes:
        add(node)
    graph.output([place[node] for node in outputs])
    call = Call(GraphModule({}, graph), inputs, outputs)
    if region.product or len(region.nodes) == 1:
        return call  # one operation gains nothing
    layouts = [_layout(values[node]) for node in inputs]
    key = (*layouts, *operations, *(number_of[node] for node in outputs))
    return call._replace(key=key, layouts=layouts)


def _compile_calls(calls: Sequence[Call], options: dict[str, Any] | None) -> list[Call]:
    """Compile each different region that was not compiled before."""
    missing = {call.key: call for call in calls if call.key and call.key not in _compiled}
    graphs = [GraphToCompile(call.run, call.layouts) for call in missing.values()]
    _compiled.update(zip(missing, compile_all(graphs, options), strict=True))
    return [call._replace(run=_compiled.get(call.key, call.run)) for call in calls]


def _layout(value: Any) -> Any:
    return tuple(value.shape), tuple(value.stride()), value.dtype, value.device


def _free_early(calls: Sequence[Call], kept: set[Node]) -> list[Call]:
    """The calls, with the values that each is the last to read."""
    needed, freed = set(kept), []
    for call in reversed(calls):
        used = [*call.inputs, *call.outputs]
        freed.append(call._replace(last_use=[node for node in used if node not in needed]))
        needed.update(used)
    return freed[::-1]
