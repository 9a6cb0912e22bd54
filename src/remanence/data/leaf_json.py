"""Datasets with users as groups, in the JSON format of LEAF (Caldas et al. 2018): FEMNIST, and
MNIST by writer.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from remanence.core.errors import InputError
from remanence.core.memory import check_memory
from remanence.data.dataset import LABEL_BYTES, ArrayDataset, DatasetSplit, validate
from remanence.data.fast_json import read_decimals, value_bytes
from remanence.data.files import damaged_file, find_files
from remanence.data.mnist_idx import CHARACTERS, DIGITS

SIDE = 28
_USER_BYTES = 1000  # of a user besides the examples: names, arrays and their places
_SMALLER = "let LEAF write several smaller files"
_decode = json.JSONDecoder().raw_decode
_space = re.compile(r"[ \t\r\n]*")


def femnist(root: Path | None) -> ArrayDataset:
    """Handwritten characters by writer, 62 classes: LEAF's FEMNIST."""
    get = (
        "write LEAF's femnist data (train/ and test/ of its data folder, made by its"
        " preprocess.sh) to femnist/"
    )
    note = (
        "Handwritten characters of 28x28 pixels by the person who wrote them (LEAF, Caldas et"
        " al. 2018)."
    )
    return _read(
        "femnist", root, ("femnist", "femnist/data", "leaf/femnist/data"), CHARACTERS, get, note
    )


def mnist_by_writer(root: Path | None) -> ArrayDataset:
    """MNIST's digits by the person who wrote them, 10 classes, in LEAF's JSON."""
    get = (
        "write MNIST grouped by writer (QMNIST gives the writers), as JSON in the layout of"
        " LEAF, to leaf-mnist-by-writer/"
    )
    note = "MNIST's training digits by the person who wrote them, in the layout of LEAF."
    return _read("mnist_by_writer", root, ("leaf-mnist-by-writer",), DIGITS, get, note)


def _read(
    name: str,
    root: Path | None,
    folders: Sequence[str],
    classes: tuple[str, ...],
    get: str,
    note: str,
) -> ArrayDataset:
    folder = find_files(name, root, [(choice, ("train", "test")) for choice in folders], get)
    parts: list[_Users] = []
    for half in ("train", "test"):
        parts.append(_read_users(folder / half, len(classes), sum(map(_users_bytes, parts))))
    users = sorted(parts[0].keys() | parts[1].keys())
    numbers = {user: number for number, user in enumerate(users)}
    splits = []
    for part in parts:
        x = np.concatenate([images for images, _ in part.values()])
        y = np.concatenate([labels for _, labels in part.values()])
        groups = np.repeat(
            [numbers[user] for user in part], [len(labels) for _, labels in part.values()]
        ).astype(np.int64)
        splits.append(DatasetSplit(x, y, groups))
    return validate(ArrayDataset(name, "image", classes, splits[0], splits[1], tuple(users), note))


_Users = dict[str, tuple[np.ndarray, np.ndarray]]  # uint8 [n, 1, 28, 28], int64 [n]


def _users_bytes(users: _Users) -> int:
    """What users take until they are joined, which copies the images."""
    return sum(
        2 * images.nbytes + LABEL_BYTES * len(y) + _USER_BYTES for images, y in users.values()
    )


def _read_users(folder: Path, classes: int, held: int) -> _Users:
    paths = sorted(folder.glob("*.json"))
    users: _Users = {}
    for path in paths:
        for user, content in _read_file(path, classes, held + _users_bytes(users)).items():
            if user in users:
                raise InputError(
                    f"{path} holds the user {user!r}, and so does another file of {folder}:"
                    " keep the files of one sampling only"
                )
            users[user] = content
    if not users:
        raise InputError(
            f"{folder} holds no examples in {len(paths)} *.json files: run LEAF's sampling again"
        )
    return users


def _read_file(path: Path, classes: int, held: int = 0) -> _Users:
    """Read the users of a file; `held` is what those of other files take."""
    text = _read_text(path, held)
    users: _Users = {}
    outline: dict[str, object] = {}
    # bytes of the text, of a name that is as long, and of what has been read from it
    known = held + 2 * sys.getsizeof(text)

    def check(at: int) -> None:
        parts = {"the file and its images": known, "one value": value_bytes(text, at)}
        check_memory(path, parts, _SMALLER)

    def read_user(user: str, text: str, at: int) -> int:
        nonlocal known
        content: dict[str, Any] = {}

        def read_part(part: str, text: str, at: int) -> int:
            check(at)
            quick = read_decimals(text, at, SIDE * SIDE) if part == "x" else None
            content[part], end = quick or _decode(text, at)
            return end

        end = _walk(text, at, read_part)
        # user by user: a whole file as Python numbers takes ten times the memory
        users[user] = _arrays(path, user, content, classes)
        known += _users_bytes({user: users[user]})
        return end

    def read_entry(entry: str, text: str, at: int) -> int:
        if entry == "user_data":
            return _walk(text, at, read_user)
        check(at)
        outline[entry], end = _decode(text, at)
        return end

    try:
        end = _skip(text, _walk(text, _skip(text, 0), read_entry))
        if end != len(text):
            raise ValueError(f"text after the end at character {end}")
    except (ValueError, IndexError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise damaged_file(path, "a complete JSON file", f"a broken one ({error})") from None
    names, counts = outline.get("users"), outline.get("num_samples")
    if (
        not isinstance(names, list)
        or not isinstance(counts, list)
        or len(names) != len(counts)
        or len(names) != len(users)
    ):
        raise damaged_file(
            path,
            "lists 'users' and 'num_samples' as long as 'user_data'",
            f"other lengths or none ({len(users)} users have data)",
        )
    for user, count in zip(names, counts, strict=True):
        there = len(users[user][1]) if isinstance(user, str) and user in users else "none"
        if there != count:
            raise damaged_file(path, f"{count!r:.20} examples of the user {user!r:.60}", f"{there}")
    return {user: content for user, content in users.items() if len(content[1])}


def _read_text(path: Path, held: int) -> str:
    """Read a file as text; characters outside ASCII make all characters four times as large."""
    size = path.stat().st_size
    check_memory(path, {"the images of other files": held, "the file": 2 * size}, _SMALLER)
    raw = path.read_bytes()
    if not raw.isascii():
        check_memory(path, {"the images of other files": held, "its text": 6 * size}, _SMALLER)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise damaged_file(path, "a complete JSON file", f"a broken one ({error})") from None


def _skip(text: str, at: int) -> int:
    match = _space.match(text, at)
    return match.end() if match else at


def _walk(text: str, at: int, read_value: Callable[[str, str, int], int]) -> int:
    """Read the JSON object that starts at `at` and return its end; `read_value(name, text, at)`
    reads a value and returns its end.
    """
    if text[at] != "{":
        raise ValueError(f"no object at character {at}")
    at = _skip(text, at + 1)
    if text[at] == "}":
        return at + 1
    while True:
        if text[at] != '"':  # parsing another value could take any memory
            raise ValueError(f"no name at character {at}")
        name, at = _decode(text, at)
        at = _skip(text, at)
        if text[at] != ":":
            raise ValueError(f"no colon at character {at}")
        at = _skip(text, read_value(name, text, _skip(text, at + 1)))
        if text[at] == "}":
            return at + 1
        if text[at] != ",":
            raise ValueError(f"no comma at character {at}")
        at = _skip(text, at + 1)


def _arrays(
    path: Path, user: str, content: dict[str, Any], classes: int
) -> tuple[np.ndarray, np.ndarray]:
    x, y = content.get("x"), content.get("y")
    if not isinstance(x, list | np.ndarray) or not isinstance(y, list) or len(x) != len(y):
        raise damaged_file(
            path,
            f"for the user {user!r:.60} lists 'x' and 'y' of one length",
            "other lengths or none",
        )
    if not all(type(label) is int and 0 <= label < classes for label in y):
        raise damaged_file(
            path, f"labels of the user {user!r:.60} from 0 to {classes - 1}", "others"
        )
    if isinstance(x, list) and not all(
        isinstance(image, list) and len(image) == SIDE * SIDE for image in x
    ):
        raise damaged_file(
            path, f"images of the user {user!r:.60} as lists of {SIDE * SIDE} numbers", "others"
        )
    try:
        pixels = np.array(x, dtype=np.float64).reshape(-1, SIDE * SIDE)
    except (TypeError, ValueError):
        raise damaged_file(
            path,
            f"images of the user {user!r:.60} as lists of {SIDE * SIDE} numbers",
            "something that is no number",
        ) from None
    if not (np.isfinite(pixels).all() and (pixels >= 0).all() and (pixels <= 1).all()):
        raise damaged_file(path, f"pixels of the user {user!r:.60} from 0 to 1", "others")
    return np.rint(pixels * 255).astype(np.uint8).reshape(-1, 1, SIDE, SIDE), np.array(
        y, dtype=np.int64
    )
