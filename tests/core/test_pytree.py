from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, tensor

from remanence.core import pytree

Tree = dict[str, Any]

names = st.text(
    st.characters(blacklist_characters="/", blacklist_categories=("Cs",)), min_size=1, max_size=4
)
some_leaf = st.lists(st.integers(-9, 9), max_size=3).map(
    lambda values: torch.tensor(values, dtype=torch.float64)
)
some_tree = st.recursive(
    st.dictionaries(names, some_leaf, min_size=1, max_size=3),
    lambda below: st.dictionaries(names, st.one_of(some_leaf, below), min_size=1, max_size=3),
    max_leaves=8,
)


def equal(a: Tree, b: Tree) -> bool:
    """The same structure, order of names, dtypes and values."""
    if list(a) != list(b):
        return False
    return all(
        equal(a[name], b[name])
        if isinstance(a[name], dict)
        else isinstance(b[name], Tensor)
        and a[name].dtype == b[name].dtype
        and torch.equal(a[name], b[name])
        for name in a
    )


def small() -> Tree:
    return {"w": tensor([1.0, 2.0]), "deep": {"b": tensor(3.0)}}


def other() -> Tree:
    return {"w": tensor([10.0, 20.0]), "deep": {"b": tensor(30.0)}}


def test_arithmetic_by_hand() -> None:
    """1, 2 | 3 with 10, 20 | 30."""
    a, b = small(), other()
    assert equal(pytree.add(a, b), {"w": tensor([11.0, 22.0]), "deep": {"b": tensor(33.0)}})
    assert equal(pytree.sub(a, b), {"w": tensor([-9.0, -18.0]), "deep": {"b": tensor(-27.0)}})
    assert equal(pytree.scale(a, 2), {"w": tensor([2.0, 4.0]), "deep": {"b": tensor(6.0)}})
    assert equal(pytree.axpy(2.0, a, b), {"w": tensor([12.0, 24.0]), "deep": {"b": tensor(36.0)}})
    assert equal(pytree.lerp(a, b, 0.5), {"w": tensor([5.5, 11.0]), "deep": {"b": tensor(16.5)}})
    assert equal(pytree.lerp(a, b, 0.0), a)
    assert equal(pytree.lerp(a, b, tensor(1.0)), b)
    assert float(pytree.dot(a, b)) == 10 + 40 + 90
    assert float(pytree.squared_norm(a)) == 1 + 4 + 9
    assert equal(pytree.zeros_like(a), {"w": tensor([0.0, 0.0]), "deep": {"b": tensor(0.0)}})


def test_arguments_are_left_alone() -> None:
    a, b = small(), other()
    for result in (
        pytree.add(a, b),
        pytree.axpy(3, a, b),
        pytree.lerp(a, b, 0.3),
        pytree.where(tensor(True), a, b),
        pytree.clone(a),
    ):
        result["w"] += 100
        result["deep"]["b"] = tensor(0.0)
    assert equal(a, small())
    assert equal(b, other())


def test_the_names_of_the_first_tree_decide() -> None:
    """What a frozen group does not have is not touched, and not returned."""
    frozen = {"w": tensor([1.0, 1.0])}
    whole = {"head": tensor(7.0), "w": tensor([2.0, 3.0])}
    assert equal(pytree.add(frozen, whole), {"w": tensor([3.0, 4.0])})
    assert float(pytree.dot(frozen, whole)) == 5.0
    with pytest.raises(KeyError):
        pytree.add(whole, frozen)


@pytest.mark.parametrize("first", [True, False])
def test_select_takes_one_whole_tree(first: bool) -> None:
    assert equal(pytree.where(tensor(first), small(), other()), small() if first else other())


def test_select_hides_nan_in_the_tree_not_taken() -> None:
    bad = {"w": tensor([float("nan"), 0.0]), "deep": {"b": tensor(float("inf"))}}
    assert equal(pytree.where(tensor(False), bad, small()), small())


def test_stacks_by_hand() -> None:
    stacked = pytree.stack([small(), other()])
    assert equal(
        stacked, {"w": tensor([[1.0, 2.0], [10.0, 20.0]]), "deep": {"b": tensor([3.0, 30.0])}}
    )
    assert equal(pytree.take(stacked, 1), other())
    assert equal(pytree.take(stacked, slice(0, 1)), pytree.stack([small()]))
    assert equal(pytree.take(stacked, tensor([1, 0, 1])), pytree.stack([other(), small(), other()]))
    assert equal(
        pytree.concatenate([stacked, pytree.stack([small()])]),
        pytree.stack([small(), other(), small()]),
    )
    assert equal(pytree.concatenate([stacked]), stacked)


def test_a_weighted_sum_by_hand() -> None:
    """1/4 of (1, 2 | 3) and 3/4 of (10, 20 | 30) is 7.75, 15.5 | 23.25; float64 weights do not
    change the parameters' precision.
    """
    summed = pytree.weighted_sum(
        torch.tensor([0.25, 0.75], dtype=torch.float64), pytree.stack([small(), other()])
    )
    assert equal(summed, {"w": tensor([7.75, 15.5]), "deep": {"b": tensor(23.25)}})


def test_expanding_copies_nothing() -> None:
    tree = small()
    many = pytree.broadcast(tree, 3)
    assert equal(many, pytree.stack([tree, tree, tree]))
    assert many["w"].data_ptr() == tree["w"].data_ptr()
    assert many["w"].stride(0) == 0


def test_detach_cuts_the_tape_and_clone_copies() -> None:
    tree = {"w": tensor([1.0], requires_grad=True)}
    assert not pytree.detach(tree)["w"].requires_grad
    assert pytree.clone(tree)["w"].data_ptr() != tree["w"].data_ptr()
    assert pytree.to(tree, "meta")["w"].device.type == "meta"


def test_restrict_keeps_the_order_asked_for() -> None:
    tree = {"a": tensor(1.0), "b": tensor(2.0), "c": tensor(3.0)}
    assert equal(pytree.select_keys(tree, ["c", "a"]), {"c": tensor(3.0), "a": tensor(1.0)})
    with pytest.raises(KeyError):
        pytree.select_keys(tree, ["d"])


def test_flat_names_by_hand() -> None:
    assert list(pytree.flatten({"a": {"b": tensor(1), "c": {"d": tensor(2)}}, "e": tensor(3)})) == [
        "a/b",
        "a/c/d",
        "e",
    ]


@given(some_tree)
def test_flattening_can_be_undone(tree: Tree) -> None:
    flat = pytree.flatten(tree)
    assert all(isinstance(leaf, Tensor) for leaf in flat.values())
    assert equal(pytree.unflatten(flat), tree)
    assert [id(leaf) for leaf in pytree.leaves(tree)] == [id(leaf) for leaf in flat.values()]


def test_a_name_with_the_separator_is_refused() -> None:
    """Flattening it would make two different trees look the same."""
    with pytest.raises(ValueError, match="'a/b' holds '/'"):
        pytree.flatten({"a/b": tensor(1.0)})


def test_bytes_by_hand() -> None:
    """2 float32 (8) + 1 float64 (8) + 3 int64 (24) + 5 bool (5) = 45."""
    tree = {
        "a": torch.zeros(2),
        "b": {"c": torch.zeros((), dtype=torch.float64), "d": torch.zeros(3, dtype=torch.int64)},
    }
    assert pytree.nbytes(tree | {"e": torch.zeros(5, dtype=torch.bool)}) == 45
    assert pytree.nbytes({}) == 0


def test_finite_judges_each_member_of_a_stack() -> None:
    nan, inf = float("nan"), float("inf")
    stack = {
        "w": tensor([[1.0, 2.0], [nan, 1.0], [1.0, 1.0], [0.0, 0.0]]),
        "deep": {"b": tensor([1.0, 1.0, -inf, 1.0])},
    }
    assert pytree.finite(stack, 4).tolist() == [True, False, False, True]
    assert pytree.finite({"count": torch.tensor([1, 2, 3])}, 3).tolist() == [True, True, True]
    assert pytree.finite({}, 2).tolist() == [True, True]
    assert pytree.finite({"nothing": torch.zeros(2, 0)}, 2).tolist() == [True, True]


def test_arithmetic_works_inside_vmap() -> None:
    stacked = pytree.stack([small(), other()])
    conditions = tensor([True, False])
    picked = torch.func.vmap(lambda c, t: pytree.where(c, t, pytree.scale(t, 2)))(
        conditions, stacked
    )
    assert equal(picked, pytree.stack([small(), pytree.scale(other(), 2)]))
    norms = torch.func.vmap(pytree.squared_norm)(stacked)
    assert norms.tolist() == [14.0, 1400.0]
