"""The switch that turns hand-written operators off, and the one file that uses private parts of
torch.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import remanence
from remanence.kernels import SWITCH, grouped_conv, kernels_enabled, trace

SOURCE = Path(remanence.__file__).parent
INTERNALS = SOURCE / "kernels" / "torch_internals.py"
CHAIN = re.compile(r"torch(\.\w+)+")
# private attributes of objects of torch: of modules and of tensors
ATTRIBUTES = {
    name
    for value in (nn.BatchNorm1d(1), torch.zeros(1))
    for name in dir(value)
    if name.startswith("_") and not name.startswith("__")
}


def test_the_switch_turns_all_operators_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute() -> None:
        pass

    monkeypatch.delenv(SWITCH, raising=False)
    assert kernels_enabled()
    assert grouped_conv.with_convolutions(compute) is not compute
    assert len(trace.decompositions()) == 3
    monkeypatch.setenv(SWITCH, "0")
    assert not kernels_enabled()
    assert grouped_conv.with_convolutions(compute) is compute
    assert trace.decompositions() == {}


def test_a_step_is_traced_with_torchs_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Max pooling stays one operation, and with the switch on becomes comparisons of slices."""
    x = torch.arange(16.0).reshape(1, 1, 4, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda x: nn.functional.max_pool2d(x, 2).sum())(x)

    monkeypatch.setattr(trace, "compile_graph", lambda graph: graph)
    results = []
    for value in ("1", "0"):
        monkeypatch.setenv(SWITCH, value)
        traced = trace.TracedFunction(step, (x,), compile=True)
        results.append(traced(x))
        used = torch.ops.aten.max_pool2d_with_indices_backward.default in {
            node.target for node in traced.run.graph.nodes
        }
        assert used == (value == "0")
    assert torch.equal(*results)


def private_names(path: Path) -> list[str]:
    """Private or experimental names of torch that a file reads or imports."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if node.attr in ATTRIBUTES and not own:
                found.append(node.attr)
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found += [name for name in names if CHAIN.fullmatch(name) and is_private(name)]
    return found


def is_private(name: str) -> bool:
    return any(
        part == "experimental" or (part.startswith("_") and not part.startswith("__"))
        for part in name.split(".")
    )


def test_private_parts_of_torch_are_used_in_one_file() -> None:
    others = {
        str(path.relative_to(SOURCE)): names
        for path in SOURCE.rglob("*.py")
        if path != INTERNALS and (names := private_names(path))
    }
    assert others == {}
    assert private_names(INTERNALS)
