"""The rules that concepts are written with, by kind of drift; `CONCEPTS` lists them.

The terms are those of Klefbom and Örtenberg Toftås (2023, section 2.4): label drift (`label`: each
cluster has its own classes), covariate drift (`domain`, `rotate`, `corrupt`: other inputs),
sentiment and feature drift together (`swap`: the same inputs have other labels), and quantity drift
(`quantity`). Differences between clients at one time are a shift, changes over time a drift; the
schedule decides which of them occurs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from remanence.core.errors import nearest
from remanence.core.expressions import PlainText
from remanence.data.cluster_options import (
    concept_error,
    read_labels,
    read_numbers,
    read_pairs,
    resolve,
    split_clusters,
)
from remanence.data.dataset import ArrayDataset

CORRUPTIONS = ("clean", "noise", "blur", "contrast", "brightness", "pixelate", "invert")

# (clusters, dataset) -> for each field of `Concept` that the rule fills, one value for each cluster
ConceptRule = Callable[[int, ArrayDataset], Mapping[str, Sequence[Any]]]


def none(*, labels: PlainText = "") -> ConceptRule:
    """One distribution for all clusters.

    Args:
        labels: the classes that are used, by number or name, such as "0 1 3"; default: all.
    """

    def fill(clusters: int, dataset: ArrayDataset) -> Mapping[str, Sequence[Any]]:
        return {"labels": [read_labels("none", labels, dataset)] * clusters} if labels else {}

    return fill


def label(*, groups: PlainText = "") -> ConceptRule:
    """Each cluster has some of the classes: label shift or drift.

    Args:
        groups: the classes of each cluster, by number or name, such as "0 1|2 3" or
            "cat, dog|ship, truck"; they may overlap. A number is always a class number, also if a
            class has a number as its name. Default: classes are divided evenly, in order.
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
            raise concept_error(
                "label",
                f"cannot divide {len(dataset.classes)} classes over {clusters} clusters",
                "use fewer clusters or write groups that overlap",
            )
        return {
            "labels": [
                tuple(part.tolist())
                for part in np.array_split(np.arange(len(dataset.classes)), clusters)
            ]
        }

    return fill


def swap(*, pairs: PlainText = "", labels: PlainText = "") -> ConceptRule:
    """Each cluster swaps some labels: the same inputs have other labels (sentiment and feature
    drift together).

    Args:
        pairs: the swapped labels of each cluster, by number or name, such as "|0 1|3 4, 5 7": none
            in cluster 0, one pair in cluster 1, two in cluster 2. Default: cluster 0 swaps nothing,
            cluster 1 the first two classes, cluster 2 the next two, and so on.
        labels: the classes that are used; default: all.
    """

    def fill(clusters: int, dataset: ArrayDataset) -> Mapping[str, Sequence[Any]]:
        everything = tuple(range(len(dataset.classes)))
        used = read_labels("swap", labels, dataset) if labels else everything
        if pairs:
            entries = split_clusters("swap", "pairs", pairs, clusters)
            swapped = [read_pairs(entry, dataset) for entry in entries]
        elif 2 * (clusters - 1) <= len(used):
            swapped = [[], *([(used[2 * c], used[2 * c + 1])] for c in range(clusters - 1))]
        else:
            raise concept_error(
                "swap",
                f"cannot find {clusters - 1} pairs in {len(used)} classes",
                "write pairs such as '|0 1|0 2'",
            )
        unused = [x for group in swapped for pair in group for x in pair if x not in used]
        if unused:
            raise concept_error(
                "swap",
                f"swaps label {unused[0]}, which is not in labels={labels!r}",
                "add it to labels or remove it from pairs",
            )
        mappings = [_swap_labels(group, len(dataset.classes)) for group in swapped]
        return {"mapping": mappings} | ({"labels": [used] * clusters} if labels else {})

    return fill


def domain(*, groups: PlainText = "") -> ConceptRule:
    """Each cluster has the examples of one domain, writer or user: covariate shift or drift.

    Args:
        groups: the group of each cluster, by number or name, such as "photo|sketch"; default: group
            0 for cluster 0, and so on.
    """

    def fill(clusters: int, dataset: ArrayDataset) -> Mapping[str, Sequence[Any]]:
        if dataset.train.groups is None:
            raise concept_error(
                "domain",
                f"needs data with domains, writers or users, which {dataset.name!r} does not have",
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
                "use fewer clusters or write groups",
            )
        return {"domain": list(range(clusters))}

    return fill


def rotate(*, degrees: PlainText = "") -> ConceptRule:
    """Each cluster has rotated images: covariate shift or drift.

    Multiples of 90 degrees are exact; other angles interpolate between pixels, and pixels from
    outside the image are 0.

    Args:
        degrees: the angle of each cluster, counterclockwise, such as "0|90|180|270"; default:
            spread evenly over the circle.
    """

    def fill(clusters: int, dataset: ArrayDataset) -> Mapping[str, Sequence[Any]]:
        _check_images("rotate", dataset)
        angles = (
            [angle % 360 for angle in read_numbers("rotate", "degrees", degrees, clusters)]
            if degrees
            else [360 * cluster / clusters for cluster in range(clusters)]
        )
        height, width = dataset.shape[1:]
        if height != width and (90 in angles or 270 in angles):
            raise concept_error(
                "rotate",
                f"cannot rotate images that are not square ({height} x {width}) by 90 degrees",
                "use 0 and 180, or crop the images",
            )
        return {"rotation": angles}

    return fill


def corrupt(*, kinds: PlainText = "", severity: int = 3) -> ConceptRule:
    """Each cluster has images with one corruption: covariate shift or drift.

    With severity s and the largest pixel w of the training images, clipped to 0 .. w, and rounded
    where pixels are whole numbers:

    - clean: x
    - noise: x + 0.05 s w z, with z standard normal for each pixel and channel; always the same for
      an example
    - blur: a Gaussian of s / 4 pixels; in images whose shorter side is longer than 32, s / 128 of
      that side
    - contrast: m + (1 - 0.18 s) (x - m), with m the mean of a channel of the image
    - brightness: x + 0.1 s w
    - pixelate: means over blocks of s / 32 of a side, at least 2 pixels
    - invert: w - x, at any severity

    Args:
        kinds: the corruption of each cluster, such as "clean|blur"; default: in the order above.
        severity: 1 to 5.
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
                    "corrupt", f"has no corruption {name!r}", nearest(name, CORRUPTIONS)
                )
        if dataset.train.x.min() < 0:
            raise concept_error(
                "corrupt",
                f"needs pixels from 0 up, and {dataset.name!r} has negative ones",
                "give images that are not normalized, which is done later",
            )
        max_pixel = dataset.train.x.max().item()
        return {
            "corruption": ["" if name == "clean" else name for name in names],
            "severity": [0 if name in ("clean", "invert") else severity for name in names],
            "max_pixel": [255 if name == "clean" else max_pixel for name in names],
        }

    return fill


def quantity(*, shares: PlainText = "") -> ConceptRule:
    """Clients of different clusters have different numbers of examples: quantity shift or drift.

    Args:
        shares: the size of a client of each cluster relative to `drift.samples`, such as "1|0.5";
            default: each cluster has half of the one before.
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


def _swap_labels(pairs: Sequence[tuple[int, int]], classes: int) -> tuple[int, ...] | None:
    """Return the new label of each label, or None if nothing changes."""
    labels = list(itertools.chain.from_iterable(pairs))
    if len(set(labels)) < len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        raise concept_error(
            "swap",
            f"swaps label {twice} more than once in a cluster",
            "write every label of a cluster in one pair only",
        )
    mapping = list(range(classes))
    for one, other in pairs:
        mapping[one], mapping[other] = other, one
    return tuple(mapping) if pairs else None
