"""Messages are decoded as they were encoded, and anything else is rejected."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from remanence.flower.array_codec import as_arrays, as_tree
from remanence.flower.wire import (
    DTYPES,
    WireError,
    WireMessage,
    decode_header,
    flatten_arrays,
    from_bytes,
    restore_arrays,
    to_bytes,
)

some_arrays = st.dictionaries(
    st.text("abc/.", min_size=1, max_size=5),
    st.sampled_from(DTYPES).flatmap(
        lambda kind: arrays.arrays(
            np.dtype(kind), arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
        )
    ),
    max_size=6,
)


@given(some_arrays)
def test_arrays_are_restored_bit_by_bit_and_in_order(given_arrays: dict[str, np.ndarray]) -> None:
    layout, flat = flatten_arrays(given_arrays)
    assert len(flat) <= len(DTYPES)  # one flat array for each dtype, however many arrays there are
    back = restore_arrays(json.loads(json.dumps(layout)), flat)
    assert list(back) == list(given_arrays)
    for name, array in given_arrays.items():
        assert back[name].dtype == array.dtype
        assert back[name].shape == array.shape
        assert back[name].tobytes() == np.ascontiguousarray(array).tobytes()  # NaN and -0.0 too


@given(
    some_arrays,
    st.dictionaries(
        st.text(max_size=3),
        st.integers(-(2**64), 2**64) | st.floats(allow_nan=False, allow_infinity=False),
        max_size=3,
    ),
)
def test_a_message_is_restored_from_its_bytes(
    site_arrays: dict[str, np.ndarray], header: dict[str, float]
) -> None:
    back = from_bytes(to_bytes(WireMessage(dict(header), site_arrays)))
    # floats exactly: JSON writes the shortest text that reads back as the same number
    assert back.header == header
    assert {name: array.tobytes() for name, array in back.arrays.items()} == {
        n: np.ascontiguousarray(a).tobytes() for n, a in site_arrays.items()
    }


FLAT = {"float64": np.arange(6.0)}


@pytest.mark.parametrize(
    "layout",
    [
        None,
        [["a", "float64", [7]]],  # more than the data
        [["a", "float64", [5]]],  # less than the data
        [["a", "float64", [3]], ["a", "float64", [3]]],  # twice
        [["a", "float32", [6]]],  # a dtype without data
        [["a", "object", [6]]],
        [["a", "float64", [-6]]],
        [["a", "float64", [2, 3.0]]],
        [["a", "float64", [True, 6]]],
        [["a", "float64"]],
        ["a"],
    ],
)
def test_a_layout_that_does_not_match_is_rejected(layout: object) -> None:
    with pytest.raises(WireError):
        restore_arrays(layout, FLAT)


def test_an_array_of_another_dtype_is_rejected() -> None:
    with pytest.raises(WireError, match="does not match the list of arrays"):
        restore_arrays([["a", "float64", [6]]], {"float64": np.arange(6, dtype=np.float32)})


def test_dtypes_that_cannot_be_sent_are_named() -> None:
    with pytest.raises(WireError, match="secret is of type object"):
        flatten_arrays({"secret": np.array([print], dtype=object)})


@given(st.binary(max_size=200))
def test_random_bytes_are_rejected(content: bytes) -> None:
    with pytest.raises(WireError):
        from_bytes(content)


def test_a_truncated_message_is_rejected() -> None:
    content = to_bytes(WireMessage({"kind": "trained"}, {"w": np.ones(9)}))
    for length in range(0, len(content), 7):
        with pytest.raises(WireError):
            from_bytes(content[:length])


def test_another_version_is_named() -> None:
    with pytest.raises(WireError, match="uses protocol version 99"):
        decode_header(json.dumps({"remanence": 99, "header": {}, "layouts": {}}))


def test_trees_are_restored_as_copies() -> None:
    tree = {
        "start": {"params": {"body.weight": torch.ones(2, 2, dtype=torch.float64)}, "buffers": {}},
        "n": torch.tensor(3),
    }
    arrays_ = as_arrays(tree)
    back = as_tree(arrays_, "start", torch.device("cpu"))
    assert list(back) == ["params"]
    back["params"]["body.weight"][0, 0] = 5.0
    assert arrays_["start/params/body.weight"][0, 0] == 1.0


def test_a_name_that_is_leaf_and_branch_is_rejected() -> None:
    with pytest.raises(ValueError, match="not those of a tree"):
        as_tree({"x/a": np.ones(1), "x/a/b": np.ones(1)}, "x", torch.device("cpu"))
