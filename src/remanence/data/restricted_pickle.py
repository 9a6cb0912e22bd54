"""Read the pickle files of CIFAR's Python version without trusting them.

A pickle is a program. Before it runs, every instruction is checked against a short list (plain
values and their containers). While it runs, it can resolve only the few names with which NumPy
writes an array; these resolve to classes of this module that accept a two-dimensional uint8 array
and nothing else. No function of NumPy or of any other module is called.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from remanence.core.errors import InputError
from remanence.core.memory import check_memory, size_of
from remanence.data.files import damaged_file

_VALUES = {"NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1"}
_TEXTS = {
    "BINSTRING",
    "SHORT_BINSTRING",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINBYTES",
    "SHORT_BINBYTES",
    "BINBYTES8",
    "BYTEARRAY8",
}
_CONTAINERS = {"EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "APPEND", "APPENDS", "MARK"}
_NUMBERS = ("b1", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "f2", "f4", "f8")
_TUPLES = {"EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
_FRAME = {"PROTO", "FRAME", "STOP", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET"}
_ARRAYS = {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD"}
ALLOWED = _VALUES | _TEXTS | _CONTAINERS | _TUPLES | _FRAME | _ARRAYS
_MAX_INSTRUCTIONS = 1_000_000  # the training file of CIFAR-100 has 500,000
_INSTRUCTION_BYTES = 200  # the most that the value of an instruction takes, with its entry in memos
_MAX_TUPLES = 100  # a batch of CIFAR has about ten


class _Forbidden(Exception):
    """The pickle contains more than data; the message names it."""


class _Dtype:
    """Replaces numpy.dtype; accepts only one-byte numbers."""

    __slots__ = ("code",)
    orders: tuple[str, ...] = ("|",)

    def __init__(self, code: object, *_: object):
        self.code = code.decode("latin-1") if isinstance(code, bytes) else code

    def __setstate__(self, state: object) -> None:
        order = state[1] if isinstance(state, tuple) and len(state) > 1 else None
        order = order.decode("latin-1") if isinstance(order, bytes) else order
        if order not in self.orders:
            raise _Forbidden("an array that is not of plain bytes")

    def type_of(self, shape: tuple[int, ...]) -> np.dtype:
        """The type of an array of this shape."""
        if self.code not in ("u1", "|u1", "uint8"):
            raise _Forbidden("an array that is not uint8")
        if len(shape) != 2:
            raise _Forbidden("an array without two dimensions")
        return np.dtype(np.uint8)


class _NumberDtype(_Dtype):
    """Accepts numbers of all widths, and an array that only holds another object."""

    __slots__ = ()
    orders = ("|", "<")

    def type_of(self, shape: tuple[int, ...]) -> np.dtype:
        if self.code in ("O8", "O") and shape == ():
            return np.dtype(object)
        if self.code not in _NUMBERS or not 1 <= len(shape) <= 5:
            raise _Forbidden(f"an array of type {str(self.code)[:20]} with {len(shape)} dimensions")
        return np.dtype(str(self.code))


class _Array:
    """Replaces numpy.ndarray; its state becomes an array after every part is checked."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Any = None

    def __setstate__(self, state: object) -> None:
        if not (isinstance(state, tuple) and len(state) == 5):
            raise _Forbidden("an array in an unknown form")
        _, shape, dtype, fortran, raw = state
        self.fill(raw, dtype, shape, "F" if fortran else "C")

    def fill(self, raw: object, dtype: object, shape: object, order: object) -> None:
        if not isinstance(dtype, _Dtype):
            raise _Forbidden("an array in an unknown form")
        if not (
            isinstance(shape, tuple) and all(type(side) is int and side >= 0 for side in shape)
        ):
            raise _Forbidden("an array in an unknown form")
        wanted = dtype.type_of(shape)
        if wanted.hasobject:
            if not isinstance(raw, list) or len(raw) != 1:
                raise _Forbidden("an array of several objects")
            self.value = raw[0]
        elif (
            not isinstance(raw, bytes | bytearray)
            or len(raw) != math.prod(shape) * wanted.itemsize
            or order not in ("C", "F")
        ):
            raise _Forbidden("an array whose bytes do not fill its shape")
        else:
            self.value = np.frombuffer(raw, dtype=wanted).reshape(shape, order=order)


class _Name:
    """A resolved name: it can be called, but a pickle cannot change it."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[..., object]):
        self.call = call

    def __call__(self, *arguments: object) -> object:
        return self.call(*arguments)

    def __setstate__(self, _: object) -> None:
        raise _Forbidden("a change to a function")


def _empty_array(*_: object) -> _Array:
    return _Array()


def _full_array(raw: object, dtype: object, shape: object, order: object) -> _Array:
    array = _Array()
    array.fill(raw, dtype, shape, order)
    return array


def _no_call(*_: object) -> object:
    raise _Forbidden("a call of numpy.ndarray")


def _names(dtype: type[_Dtype]) -> dict[tuple[str, str], Callable[..., object]]:
    """What a pickle may name."""
    names: dict[tuple[str, str], Callable[..., object]] = {
        ("numpy", "dtype"): dtype,
        ("numpy", "ndarray"): _no_call,
    }
    for numpy in ("numpy.core", "numpy._core"):  # numpy 1 and numpy 2
        names[numpy + ".multiarray", "_reconstruct"] = _empty_array
        names[numpy + ".numeric", "_frombuffer"] = _full_array  # protocol 5
    return names


class _PlainUnpickler(pickle.Unpickler):
    names = _names(_Dtype)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.names:
            raise _Forbidden(f"{module}.{name}")
        return _Name(self.names[module, name])


class _NumberUnpickler(_PlainUnpickler):
    names = _names(_NumberDtype)


def _scan(raw: bytes) -> None:
    """Reject a pickle before it runs: other instructions, and constructs that make a small file
    large in memory or slow to hash.
    """
    made_by: dict[int, str] = {}  # memo index -> the instruction that made the value
    before, tuples = "", 0
    for count, (opcode, argument, _) in enumerate(pickletools.genops(raw)):
        name = opcode.name
        if name not in ALLOWED:
            raise _Forbidden(f"the instruction {name}")
        if count > _MAX_INSTRUCTIONS:
            raise _Forbidden(f"more than {_MAX_INSTRUCTIONS} instructions")
        if name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            index = argument if isinstance(argument, int) else len(made_by)
            if index > 2 * len(made_by) + 256:  # the unpickler allocates all indices up to this one
                raise _Forbidden("a memo of unreasonable size")
            made_by[index] = before
        elif name in ("BINGET", "LONG_BINGET") and made_by.get(argument or 0, "").startswith(
            "TUPLE"
        ):
            # hashing shared tuples takes time exponential in their depth
            raise _Forbidden("a tuple inside itself or used twice")
        tuples += name.startswith("TUPLE")
        if tuples > _MAX_TUPLES:
            raise _Forbidden(f"more than {_MAX_TUPLES} tuples")
        before = name


def pickle_bytes(size: int) -> int:
    """The most memory that reading a pickle of this size takes: the file, a copy of every value by
    the check and one by the unpickler, and the objects that instructions make.
    """
    return 3 * size + _INSTRUCTION_BYTES * min(size, _MAX_INSTRUCTIONS)


def read_plain_pickle(path: Path, limit: int) -> dict[str, object]:
    """Return the dictionary in a file of at most `limit` bytes: names to bytes, str, int, list,
    dict or uint8 array.
    """
    found = path.stat().st_size
    if found > limit:
        raise damaged_file(path, f"at most {size_of(limit)}", size_of(found))
    check_memory(path, {"its content": pickle_bytes(found)})
    return _load(path.read_bytes(), path, _PlainUnpickler)


def load_number_arrays(raw: bytes, path: Path) -> dict[str, object]:
    """The dictionary of arrays of numbers in a pickle, which may be within an array that holds
    nothing else, as `numpy.savez(file, data=dictionary)` writes it.

    Args:
        raw: The pickle, whose memory has been checked.
        path: Of its file, for errors.
    """
    return _load(raw, path, _NumberUnpickler)


def _load(raw: bytes, path: Path, unpickler: type[_PlainUnpickler]) -> dict[str, object]:
    try:
        _scan(raw)
        content = unpickler(io.BytesIO(raw), encoding="bytes").load()
    except _Forbidden as reason:
        raise InputError(
            f"{path} is rejected because it contains {reason}, which no file of images and"
            " labels needs: fetch it again from its publisher"
        ) from None
    except Exception as error:  # a broken pickle can raise anything
        raise damaged_file(
            path, "a complete pickle", f"an unreadable one ({str(error) or type(error).__name__})"
        ) from None
    content = content.value if isinstance(content, _Array) else content
    if not isinstance(content, dict):
        raise damaged_file(path, "a pickled dictionary", f"a pickled {type(content).__name__}")
    return {
        _text(name): value.value if isinstance(value, _Array) else value
        for name, value in content.items()
    }


def _text(name: object) -> str:
    return name.decode("latin-1") if isinstance(name, bytes) else str(name)
