"""The message format: a JSON header and arrays. Imports neither torch nor Flower.

Flower sends every array as an object of its own, with its own requests, and stores equal objects
once. So all arrays of one dtype are concatenated into one flat array, and arrays that are the same
for all sites are kept apart from those for one site: the global model is uploaded once, whatever
the number of sites.

Incoming messages are not trusted: names, dtypes and sizes are checked against each other before
they are used, and nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from remanence.core.errors import RemanenceError

PROTOCOL = 1  # both ends must have the same version
NOISED = "noised"  # the array of counts with a site's noise, in place of exact ones
DTYPES = ("bool", "float16", "float32", "float64", "int32", "int64", "uint8")
WireArrays = dict[str, np.ndarray]
FlatArrays = dict[str, np.ndarray]  # by dtype, one dimension each
Layout = list[list[Any]]  # of each array: name, dtype, shape


class WireError(RemanenceError):
    """A message is not in the format of this module."""


class WireMessage(NamedTuple):
    """One message: a header of plain JSON, arrays for (or from) one site, and arrays that are the
    same for all sites.
    """

    header: dict[str, Any]
    site_arrays: WireArrays
    # a named tuple's defaults are never changed
    shared_arrays: WireArrays = {}  # noqa: RUF012

    @property
    def arrays(self) -> WireArrays:
        return self.shared_arrays | self.site_arrays

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())


def flatten_arrays(arrays: Mapping[str, np.ndarray]) -> tuple[Layout, FlatArrays]:
    """Concatenate arrays by dtype.

    Args:
        arrays: Arrays by name.

    Returns:
        The layout (name, dtype and shape of every array) and one flat array for each dtype.

    >>> layout, flat = flatten_arrays({"a": np.zeros((2, 1)), "n": np.array(7)})
    >>> layout, {name: array.tolist() for name, array in flat.items()}
    ([['a', 'float64', [2, 1]], ['n', 'int64', []]], {'float64': [0.0, 0.0], 'int64': [7]})
    """
    layout: Layout = []
    pieces: dict[str, list[np.ndarray]] = {}
    for name, array in arrays.items():
        dtype = str(array.dtype)
        if dtype not in DTYPES:
            raise WireError(
                f"{name} is of type {dtype}, which cannot be sent: use one of {', '.join(DTYPES)}"
            )
        layout.append([name, dtype, list(array.shape)])
        pieces.setdefault(dtype, []).append(np.ascontiguousarray(array).reshape(-1))
    return layout, {dtype: np.concatenate(parts) for dtype, parts in pieces.items()}


def restore_arrays(layout: Any, flat: Mapping[str, np.ndarray]) -> WireArrays:
    """The inverse of `flatten_arrays`.

    Args:
        layout: The layout as received; any JSON value.
        flat: The flat arrays by dtype.

    Returns:
        The arrays by name, as views of `flat`.

    Raises:
        WireError: Layout and arrays do not match exactly.
    """
    arrays: WireArrays = {}
    used = dict.fromkeys(flat, 0)
    for entry in layout if isinstance(layout, list) else [None]:
        if not (
            isinstance(entry, list)
            and len(entry) == 3
            and isinstance(entry[0], str)
            and isinstance(entry[2], list)
        ):
            raise WireError("the list of arrays has a wrong format")
        name, dtype, shape = entry
        if dtype not in DTYPES or dtype not in flat or name in arrays:
            raise WireError(f"array {name} is listed twice, or its dtype is missing")
        if not all(type(side) is int and side >= 0 for side in shape):
            raise WireError(f"array {name} has no valid shape: {shape}")
        size, begin = math.prod(shape), used[dtype]
        if begin + size > flat[dtype].size:
            raise WireError(f"array {name} is listed as larger than the data received")
        arrays[name] = flat[dtype][begin : begin + size].reshape(shape)
        used[dtype] += size
    for dtype, array in flat.items():
        if str(array.dtype) != dtype or array.ndim != 1 or used[dtype] != array.size:
            raise WireError(f"the {dtype} data received does not match the list of arrays")
    return arrays


def encode_header(message: WireMessage, layouts: Mapping[str, Layout]) -> str:
    """The header and the layouts of a message as JSON."""
    return json.dumps(
        {"remanence": PROTOCOL, "header": message.header, "layouts": layouts}, allow_nan=False
    )


def decode_header(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The inverse of `encode_header`.

    Returns:
        The header and the layouts.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise WireError("the message is not JSON") from None
    if (
        not isinstance(content, dict)
        or not isinstance(content.get("header"), dict)
        or not isinstance(content.get("layouts"), dict)
    ):
        raise WireError("the message is not a message of Remanence")
    if content.get("remanence") != PROTOCOL:
        raise WireError(
            f"the other end uses protocol version {content.get('remanence')!r} and this one"
            f" {PROTOCOL}: install the same version of remanence"
        )
    return content["header"], content["layouts"]


def to_bytes(message: WireMessage) -> bytes:
    """A message as safetensors, for a file or a socket. The JSON text is in its metadata."""
    layout, flat = flatten_arrays(message.arrays)
    return save_arrays(flat, metadata={"text": encode_header(message, {"arrays": layout})})


def from_bytes(content: bytes) -> WireMessage:
    """The inverse of `to_bytes`; all arrays come back as `site_arrays`."""
    try:
        flat = load_arrays(content)
        metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        text = metadata["__metadata__"]["text"]
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"this is not a message of Remanence ({type(error).__name__})") from None
    header, layouts = decode_header(text)
    return WireMessage(header, restore_arrays(layouts.get("arrays"), flat))


def digest_of(header: dict[str, Any], arrays: WireArrays) -> str:
    """A hash of a request: repeated requests have the same one."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
