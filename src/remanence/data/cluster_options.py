"""Parse the options of concepts that have one entry for each cluster: `0 1|2 3`, `photo|sketch`,
`1|0.5`. Classes and groups are written as numbers or names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from remanence.core.errors import InputError, nearest
from remanence.data.dataset import ArrayDataset


def concept_error(name: str, problem: str, cure: str) -> InputError:
    """Return the error for a kind of drift with wrong options."""
    return InputError(f"kind of drift {name!r} {problem}: {cure}")


def split_clusters(name: str, option: str, text: str, clusters: int) -> list[str]:
    """Split an option into its entries, one for each cluster, separated by |."""
    groups = text.split("|")
    if len(groups) != clusters:
        raise concept_error(
            name,
            f"has {len(groups)} entries in {option}={text!r} but the drift has {clusters} clusters",
            "write one for each cluster, separated by |",
        )
    return groups


def read_numbers(name: str, option: str, text: str, clusters: int) -> list[float]:
    """Parse one number for each cluster."""
    values = []
    for entry in split_clusters(name, option, text, clusters):
        if not re.fullmatch(r"\s*[+-]?(\d{1,9}(\.\d{0,20})?|\.\d{1,20})\s*", entry, re.ASCII):
            raise concept_error(
                name,
                f"cannot read {entry.strip()!r} in {option}={text!r}",
                "write a number for each cluster, separated by |",
            )
        values.append(float(entry))
    return values


def resolve(name: str, thing: str, word: str, names: Sequence[str]) -> int:
    """Return the number of a class or group that is written as a number or a name."""
    number = _find(word, names)
    if number is None:
        raise concept_error(
            name,
            f"has no {thing} {word!r}",
            f"give a number below {len(names)} or a name, {_suggest(word, names)}",
        )
    return number


def _find(word: str, names: Sequence[str]) -> int | None:
    if re.fullmatch(r"\d{1,9}", word, re.ASCII):
        return int(word) if int(word) < len(names) else None
    return names.index(word) if word in names else None


def _suggest(word: str, names: Sequence[str]) -> str:
    return nearest(word, names) if len(names) <= 100 else f"such as {names[0]}"


def read_labels(name: str, text: str, dataset: ArrayDataset) -> tuple[int, ...]:
    """Parse classes separated by commas or spaces; names that contain spaces need commas."""
    entries = [entry.strip() for entry in text.split(",")] if text.strip() else []
    words = [
        word
        for entry in entries
        for word in ([entry] if entry in dataset.classes else entry.split() or [""])
    ]
    found = [resolve(name, "label", word, dataset.classes) for word in words]
    if not found:
        raise concept_error(
            name,
            "has a cluster without labels",
            "write the labels of every cluster, such as '0 1|2 3'",
        )
    if len(set(found)) < len(found):
        raise concept_error(name, f"names a label twice in {text.strip()!r}", "name each once")
    return tuple(sorted(found))


def read_pairs(text: str, dataset: ArrayDataset) -> list[tuple[int, int]]:
    """Parse pairs separated by commas; the two labels of a pair are separated by a space, and may
    contain spaces.
    """
    pairs = []
    for entry in text.split(",") if text.strip() else []:
        words = entry.split()
        halves = [(" ".join(words[:end]), " ".join(words[end:])) for end in range(1, len(words))]
        if not halves:
            raise concept_error(
                "swap",
                f"cannot read the pair {entry.strip()!r}",
                "write two labels with a space between them, such as '|0 1'",
            )
        known = [
            half
            for half in halves
            if all(_find(word, dataset.classes) is not None for word in half)
        ]
        first, second = (known or halves)[0]
        pairs.append(
            (
                resolve("swap", "label", first, dataset.classes),
                resolve("swap", "label", second, dataset.classes),
            )
        )
    return pairs
