"""Concepts: what the data of each cluster look like. The kinds of drift below each fill some fields
of all clusters' concepts, and `+` joins them.

The words are those of Klefbom and Örtenberg Toftås (2023, section 2.4): label (who sees which
classes), covariate (`domain`, `rotate`, `corrupt`: other inputs), sentiment and feature together
(`swap`: the same inputs mean something else) and quantity. What clients have at one time is a
shift, what changes over time a drift, and which of them happens is up to the schedule.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from remanence.core.errors import InputError, nearest
from remanence.core.expressions import instantiate, parse_parts
from remanence.data.cluster_options import (
    concept_error,
    read_labels,
    read_numbers,
    read_pairs,
    resolve,
    split_clusters,
)
from remanence.data.dataset import ArrayDataset, DatasetSplit

CORRUPTIONS = ("clean", "noise", "blur", "contrast", "brightness", "pixelate", "invert")


@dataclass(frozen=True)
class Concept:
    """The distribution of one cluster: which rows, how they look, and how many."""

    # only rows with these labels in the dataset, ascending; None: all
    labels: tuple[int, ...] | None = None
    # the new label of each label in the dataset; None: as they are
    mapping: tuple[int, ...] | None = None
    domain: int | None = None  # only rows of this group; None: all
    rotation: float = 0.0  # degrees against the clock, from 0 up to 360
    corruption: str = ""  # one of CORRUPTIONS but clean
    severity: int = 0  # 1 to 5; 0 where it means nothing
    max_pixel: int = 255  # the largest pixel, for corruptions
    size_factor: float = 1.0  # of the rows a client would have

    def select(self, split: DatasetSplit) -> np.ndarray:
        """The rows of a split that belong to this concept, ascending."""
        chosen = np.ones(len(split), dtype=bool)
        if self.labels is not None:
            chosen &= np.isin(split.y, self.labels)
        if self.domain is not None:
            chosen &= (
                np.zeros(len(split), dtype=bool)
                if split.groups is None
                else split.groups == self.domain
            )
        return np.flatnonzero(chosen)


# (clusters, dataset) -> for each field that this kind fills, one value a cluster
ConceptRule = Callable[[int, ArrayDataset], Mapping[str, Sequence[Any]]]


def make_concepts(text: str, clusters: int, dataset: ArrayDataset) -> tuple[Concept, ...]:
    """One concept a cluster from kinds such as `label(groups="0 1|2 3")+rotate`; nothing at all
    means `label`, or `none` for a single cluster.
    """
    calls = parse_parts(text or ("label" if clusters > 1 else "none"))
    fields: dict[str, Sequence[Any]] = {}
    filled: dict[str, str] = {}
    for place, call in enumerate(calls):
        if call.name in {other.name for other in calls[:place]}:
            raise concept_error(call.name, f"stands twice in {text!r}", "write it once")
        for field, values in instantiate(call, CONCEPTS, "kind of drift")(
            clusters, dataset
        ).items():
            if field in filled:
                raise concept_error(
                    call.name,
                    f"says which {field} a cluster has, and so does {filled[field]!r}",
                    "let one of them say it",
                )
            fields[field], filled[field] = values, call.name
    concepts = tuple(
        Concept(**{field: values[cluster] for field, values in fields.items()})
        for cluster in range(clusters)
    )
    for cluster, concept in enumerate(concepts):
        for part, split in (("training", dataset.train), ("test", dataset.test)):
            if not len(concept.select(split)):
                what = describe(concept, dataset)
                raise InputError(
                    f"cluster {cluster} of the drift has no {part} examples ({what}): choose"
                    " other labels or domains for it"
                )
    return concepts


def describe(concept: Concept, dataset: ArrayDataset) -> str:
    """A concept in words, for tables and sentences."""
    words = (
        []
        if concept.labels is None
        else [", ".join(dataset.classes[label] for label in concept.labels)]
    )
    if concept.domain is not None:
        words.append(dataset.group_names[concept.domain])
    if concept.mapping is not None:
        pairs = [(label, other) for label, other in enumerate(concept.mapping) if label < other]
        words.append(
            "swapped "
            + ", ".join(
                f"{dataset.classes[label]} and {dataset.classes[other]}" for label, other in pairs
            )
        )
    if concept.rotation:
        words.append(f"turned by {concept.rotation:g} degrees")
    if concept.corruption:
        words.append(concept.corruption + (f" {concept.severity}" if concept.severity else ""))
    if concept.size_factor != 1:
        words.append(f"{concept.size_factor:g} times the examples")
    return "; ".join(words) or "as they are"


def none(*, labels: str = "") -> ConceptRule:
    """One distribution for all clusters; `labels` are the classes that take part, by number or
    name, such as "0 1 3"; without it, all.
    """

    def fill(clusters: int, dataset: ArrayDataset) -> Mapping[str, Sequence[Any]]:
        return {"labels": [read_labels("none", labels, dataset)] * clusters} if labels else {}

    return fill


def label(*, groups: str = "") -> ConceptRule:
    """Each cluster sees some of the classes: label shift or drift.

    `groups` are the classes of each cluster, by number or name, such as "0 1|2 3" or "cat,
    dog|ship, truck"; they may overlap. A number is always a number, whatever the classes are
    called. Without `groups` the classes are divided evenly, in order.
    """

    def fill(clusters: int, dataset: ArrayDataset) -> Mapping[str, Sequence[Any]]:
        if groups:
            return {
                "labels": [
                    read_labels("label", group, dataset)
                    for group in split_clusters("label", "groups", groups, clusters)
                ]
            }
        if clusters > len(dataset.classes):
            cure = "have fewer clusters or write groups that overlap"
            raise concept_error(
                "label",
                f"cannot divide {len(dataset.classes)} classes over {clusters} clusters",
                cure,
            )
        return {
            "labels": [
                tuple(part.tolist())
                for part in np.array_split(np.arange(len(dataset.classes)), clusters)
            ]
        }

    return fill


def swap(*, pairs: str = "", labels: str = "") -> ConceptRule:
    """Each cluster exchanges some labels with each other: the same inputs mean something else
    (sentiment and feature together).

    `pairs` are those of each cluster, by number or name, such as "|0 1|3 4, 5 7": none in cluster
    0, one in cluster 1, two in cluster 2. Without it, cluster 0 swaps nothing, cluster 1 the first
    two classes, cluster 2 the next two. `labels` are the classes that take part.
    """

    def fill(clusters: int, dataset: ArrayDataset) -> Mapping[str, Sequence[Any]]:
        part = (
            read_labels("swap", labels, dataset) if labels else tuple(range(len(dataset.classes)))
        )
        if pairs:
            written = [
                read_pairs(group, dataset)
                for group in split_clusters("swap", "pairs", pairs, clusters)
            ]
        elif 2 * (clusters - 1) <= len(part):
            written = [
                [],
                *([(part[2 * cluster], part[2 * cluster + 1])] for cluster in range(clusters - 1)),
            ]
        else:
            raise concept_error(
                "swap",
                f"cannot find {clusters - 1} pairs in {len(part)} classes",
                "write pairs such as '|0 1|0 2'",
            )
        for outside in (
            name for group in written for pair in group for name in pair if name not in part
        ):
            raise concept_error(
                "swap",
                f"exchanges label {outside}, which is not in labels={labels!r}",
                "add it to labels or leave it alone",
            )
        mappings = [_exchange(group, len(dataset.classes)) for group in written]
        return {"mapping": mappings} | ({"labels": [part] * clusters} if labels else {})

    return fill


def domain(*, groups: str = "") -> ConceptRule:
    """Each cluster sees the examples of one domain, writer or user: covariate shift or drift.

    `groups` are those of the clusters, by number or name, such as "photo|sketch"; without it, group
    0 for cluster 0 and so on.
    """

    def fill(clusters: int, dataset: ArrayDataset) -> Mapping[str, Sequence[Any]]:
        if dataset.train.groups is None:
            raise concept_error(
                "domain",
                f"needs data with domains, writers or users, which {dataset.name!r} has not",
                "use rotate or corrupt",
            )
        if groups:
            entries = split_clusters("domain", "groups", groups, clusters)
            return {
                "domain": [
                    resolve("domain", "group", entry.strip(), dataset.group_names)
                    for entry in entries
                ]
            }
        if clusters > len(dataset.group_names):
            raise concept_error(
                "domain",
                f"has {len(dataset.group_names)} groups for {clusters} clusters",
                "have fewer clusters or write groups",
            )
        return {"domain": list(range(clusters))}

    return fill


def rotate(*, degrees: str = "") -> ConceptRule:
    """Each cluster sees its images turned: covariate shift or drift.

    `degrees` are those of the clusters, against the clock, such as "0|90|180|270"; without it they
    are spread evenly over the circle. Quarter turns are exact; others interpolate between pixels,
    and corners that come from outside the image are 0.
    """

    def fill(clusters: int, dataset: ArrayDataset) -> Mapping[str, Sequence[Any]]:
        _check_images("rotate", dataset)
        even = [360 * cluster / clusters for cluster in range(clusters)]
        turns = (
            [turn % 360 for turn in read_numbers("rotate", "degrees", degrees, clusters)]
            if degrees
            else even
        )
        height, width = dataset.shape[1:]
        if height != width and (90 in turns or 270 in turns):
            cure = "use 0 and 180, or crop the images"
            raise concept_error(
                "rotate",
                f"cannot make a quarter turn of images that are not square ({height} x {width})",
                cure,
            )
        return {"rotation": turns}

    return fill


def corrupt(*, kinds: str = "", severity: int = 3) -> ConceptRule:
    """Each cluster sees its images corrupted in one way: covariate shift or drift.

    `kinds` are those of the clusters; without it,
    "clean|noise|blur|contrast|brightness|pixelate|invert" as far as there are clusters. With s for
    the severity from 1 to 5 and w for the largest pixel of the training images:

        clean        x noise        x + 0.05 s w z, z standard normal for each pixel and channel
        blur         a Gaussian of s / 4 pixels; in images whose shorter side is longer than 32, s /
        128 of that side contrast     m + (1 - 0.18 s) (x - m), m the mean of a channel of the image
        brightness   x + 0.1 s w pixelate     means over blocks of s / 32 of a side, at least 2
        pixels invert       w - x, at any severity

    clipped to 0 .. w and rounded. The noise of an example is always the same.
    """
    if not 1 <= severity <= 5:
        raise concept_error(
            "corrupt", f"cannot use severity={severity}", "give a whole number from 1 to 5"
        )

    def fill(clusters: int, dataset: ArrayDataset) -> Mapping[str, Sequence[Any]]:
        _check_images("corrupt", dataset)
        names = [
            name.strip()
            for name in split_clusters(
                "corrupt", "kinds", kinds or "|".join(CORRUPTIONS[:clusters]), clusters
            )
        ]
        for name in names:
            if name not in CORRUPTIONS:
                raise concept_error(
                    "corrupt", f"does not know the corruption {name!r}", nearest(name, CORRUPTIONS)
                )
        white = int(dataset.train.x.max())
        return {
            "corruption": ["" if name == "clean" else name for name in names],
            "severity": [0 if name in ("clean", "invert") else severity for name in names],
            "max_pixel": [255 if name == "clean" else white for name in names],
        }

    return fill


def quantity(*, shares: str = "") -> ConceptRule:
    """Clients of different clusters have different numbers of examples: quantity shift or drift.

    `shares` are what a client of each cluster has of the size asked for, such as "1|0.5"; without
    it every cluster has half of the one before.
    """

    def fill(clusters: int, dataset: ArrayDataset) -> Mapping[str, Sequence[Any]]:
        halves = [0.5**cluster for cluster in range(clusters)]
        values = read_numbers("quantity", "shares", shares, clusters) if shares else halves
        if not all(0 < value <= 1000 for value in values):
            raise concept_error(
                "quantity", f"cannot use shares={shares!r}", "give numbers above 0 and up to 1000"
            )
        return {"size_factor": values}

    return fill


CONCEPTS: dict[str, Callable[..., ConceptRule]] = {
    "corrupt": corrupt,
    "domain": domain,
    "label": label,
    "none": none,
    "quantity": quantity,
    "rotate": rotate,
    "swap": swap,
}


def _check_images(name: str, dataset: ArrayDataset) -> None:
    if dataset.kind != "image":
        raise concept_error(
            name,
            f"is for images, and {dataset.name!r} is {dataset.kind}",
            "use label, swap, domain or quantity",
        )


def _exchange(pairs: Sequence[tuple[int, int]], classes: int) -> tuple[int, ...] | None:
    """The new label of each label; None where nothing changes."""
    named = list(itertools.chain.from_iterable(pairs))
    if len(set(named)) < len(named):
        twice = next(name for name in named if named.count(name) > 1)
        raise concept_error(
            "swap",
            f"exchanges label {twice} more than once in a cluster",
            "let every label of a cluster stand in one pair",
        )
    mapping = list(range(classes))
    for one, other in pairs:
        mapping[one], mapping[other] = other, one
    return tuple(mapping) if pairs else None
