"""Reading options that say something for each cluster: `0 1|2 3`, `photo|sketch`, `1|0.5`, with
classes and groups by number or name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from remanence.core.errors import InputError, nearest
from remanence.data.dataset import ArrayDataset


def concept_error(name: str, problem: str, cure: str) -> InputError:
    """The sentence for a kind of drift that cannot be."""
    return InputError(f"kind of drift {name!r} {problem}: {cure}")


def split_clusters(name: str, option: str, text: str, clusters: int) -> list[str]:
    """What was written for each cluster, separated by bars."""
    groups = text.split("|")
    if len(groups) != clusters:
        cure = "write one for each cluster, separated by |"
        raise concept_error(
            name,
            f"has {len(groups)} entries in {option}={text!r} but the drift has {clusters} clusters",
            cure,
        )
    return groups


def read_numbers(name: str, option: str, text: str, clusters: int) -> list[float]:
    """One number for each cluster."""
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
    """The number of a class or group that was written as a number or a name."""
    number = _look_up(word, names)
    if number is None:
        raise concept_error(
            name,
            f"does not know the {thing} {word!r}",
            f"give a number below {len(names)} or a name, {_suggest(word, names)}",
        )
    return number


def _look_up(word: str, names: Sequence[str]) -> int | None:
    if re.fullmatch(r"\d{1,9}", word, re.ASCII):
        return int(word) if int(word) < len(names) else None
    return names.index(word) if word in names else None


def _suggest(word: str, names: Sequence[str]) -> str:
    return nearest(word, names) if len(names) <= 100 else f"such as {names[0]}"


def read_labels(name: str, text: str, dataset: ArrayDataset) -> tuple[int, ...]:
    """Classes separated by commas or spaces; where a name has spaces in it, by commas."""
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
    """Pairs separated by commas, the two of a pair by a space, also where names have spaces in
    them.
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
            if all(_look_up(word, dataset.classes) is not None for word in half)
        ]
        first, second = (known or halves)[0]
        pairs.append(
            (
                resolve("swap", "label", first, dataset.classes),
                resolve("swap", "label", second, dataset.classes),
            )
        )
    return pairs
