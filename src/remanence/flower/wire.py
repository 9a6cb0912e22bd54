"""What travels: a text of JSON and arrays, in few pieces. Nothing here imports torch or Flower.

Flower carries every array as an object of its own, with requests of its own, and stores equal
objects once. So all arrays of one type travel as one flat array, and what is the same for all sites
is packed apart from what is for one: the global model then goes up to the relay once, whatever the
number of sites.

Whatever comes in is from a stranger: names, types and sizes are checked against each other before
anything is made of them, and nothing is ever unpickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from remanence.core.errors import RemanenceError

PROTOCOL = 1  # what the two ends must agree on
DTYPES = ("bool", "float16", "float32", "float64", "int32", "int64", "uint8")
WireArrays = dict[str, np.ndarray]
FlatArrays = dict[str, np.ndarray]  # by dtype, one dimension each


class WireError(RemanenceError):
    """What came in is not what one of our programs would send."""


class WireMessage(NamedTuple):
    """One message: what it says, and the numbers it brings."""

    header: dict[str, Any]  # plain JSON
    site_arrays: WireArrays  # for, or from, one site
    shared_arrays: WireArrays = {}  # noqa: RUF012  the same for all sites; a named tuple's defaults are never changed

    @property
    def arrays(self) -> WireArrays:
        return self.shared_arrays | self.site_arrays

    @property
    def nbytes(self) -> int:
        """How many bytes the arrays hold."""
        return sum(array.nbytes for array in self.arrays.values())


def flatten_arrays(arrays: Mapping[str, np.ndarray]) -> tuple[list[list[Any]], FlatArrays]:
    """Many arrays as one a type, and how to find them again.

    >>> layout, flat = flatten_arrays({"a": np.zeros((2, 1)), "n": np.array(7)})
    >>> layout, {name: array.tolist() for name, array in flat.items()}
    ([['a', 'float64', [2, 1]], ['n', 'int64', []]], {'float64': [0.0, 0.0], 'int64': [7]})
    """
    layout, pieces = [], {}  # type: ignore[var-annotated]
    for name, array in arrays.items():
        kind = str(array.dtype)
        if kind not in DTYPES:
            raise WireError(
                f"{name} is of type {kind}, which does not travel: only {', '.join(DTYPES)} do"
            )
        layout.append([name, kind, list(array.shape)])
        pieces.setdefault(kind, []).append(np.ascontiguousarray(array).reshape(-1))
    return layout, {kind: np.concatenate(parts) for kind, parts in pieces.items()}


def restore_arrays(layout: Any, flat: Mapping[str, np.ndarray]) -> WireArrays:
    """The inverse; refuses whatever does not fit together exactly."""
    arrays: WireArrays = {}
    used = dict.fromkeys(flat, 0)
    for entry in layout if isinstance(layout, list) else [None]:
        if not (
            isinstance(entry, list)
            and len(entry) == 3
            and isinstance(entry[0], str)
            and isinstance(entry[2], list)
        ):
            raise WireError("the list of arrays is not one of ours")
        name, kind, shape = entry
        if kind not in DTYPES or kind not in flat or name in arrays:
            raise WireError(f"array {name} is announced twice, or with a type that did not come")
        if not all(type(side) is int and side >= 0 for side in shape):
            raise WireError(f"array {name} has no shape: {shape}")
        size, begin = math.prod(shape), used[kind]
        if begin + size > flat[kind].size:
            raise WireError(f"array {name} is announced larger than what came")
        arrays[name] = flat[kind][begin : begin + size].reshape(shape)
        used[kind] += size
    for kind, array in flat.items():
        if str(array.dtype) != kind or array.ndim != 1 or used[kind] != array.size:
            raise WireError(f"what came as {kind} is not what was announced")
    return arrays


def pack_text(parcel: WireMessage, layouts: Mapping[str, list[list[Any]]]) -> str:
    """Everything of a parcel but the numbers."""
    return json.dumps(
        {"remanence": PROTOCOL, "about": parcel.header, "layouts": layouts}, allow_nan=False
    )


def unpack_text(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """-> about, layouts"""
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        raise WireError("the message is not JSON") from None
    if (
        not isinstance(read, dict)
        or not isinstance(read.get("about"), dict)
        or not isinstance(read.get("layouts"), dict)
    ):
        raise WireError("the message is not one of ours")
    if read.get("remanence") != PROTOCOL:
        raise WireError(
            f"the other end speaks version {read.get('remanence')!r} of our protocol and"
            f" this one {PROTOCOL}: use the same remanence"
        )
    return read["about"], read["layouts"]


def to_bytes(parcel: WireMessage) -> bytes:
    """For a file or a socket: safetensors, with the text beside the numbers."""
    layout, flat = flatten_arrays(parcel.arrays)
    return save_arrays(flat, metadata={"text": pack_text(parcel, {"mine": layout})})


def from_bytes(content: bytes) -> WireMessage:
    """The inverse; what was common and what was not is no longer told apart."""
    try:
        flat = load_arrays(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        text = header["__metadata__"]["text"]
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"this is no parcel of ours ({type(error).__name__})") from None
    about, layouts = unpack_text(text)
    return WireMessage(about, restore_arrays(layouts.get("mine"), flat))
