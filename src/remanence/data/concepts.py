"""Concepts: the data distribution of each cluster.

An experiment writes the concepts of all clusters as one expression such as
`label(groups="0 1|2 3")+rotate`. Each term is a rule of `concept_rules.py` that fills some fields
of every cluster's `Concept`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from remanence.core.errors import InputError
from remanence.core.expressions import instantiate, parse_parts
from remanence.data.cluster_options import concept_error
from remanence.data.concept_rules import CONCEPTS
from remanence.data.dataset import ArrayDataset, DatasetSplit


@dataclass(frozen=True)
class Concept:
    """The data distribution of one cluster: which examples, how they are transformed, how many.

    Args:
        labels: only examples with these original labels, ascending; None: all.
        mapping: the new label of each original label; None: unchanged.
        domain: only examples of this group; None: all.
        rotation: degrees counterclockwise, from 0 up to 360.
        corruption: one of `CORRUPTIONS` except "clean"; empty: none.
        severity: 1 to 5; 0 for a corruption without degrees.
        max_pixel: the largest pixel value, which corruptions scale with.
        size_factor: the size of a client relative to `drift.samples`.
    """

    labels: tuple[int, ...] | None = None
    mapping: tuple[int, ...] | None = None
    domain: int | None = None
    rotation: float = 0.0
    corruption: str = ""
    severity: int = 0
    max_pixel: float = 255
    size_factor: float = 1.0

    def select(self, split: DatasetSplit) -> np.ndarray:
        """Return the indices of the examples of a split that belong to this concept, ascending."""
        chosen = np.ones(len(split), dtype=bool)
        if self.labels is not None:
            chosen &= np.isin(split.y, self.labels)
        if self.domain is not None:
            no_groups = np.zeros(len(split), dtype=bool)
            chosen &= no_groups if split.groups is None else split.groups == self.domain
        return np.flatnonzero(chosen)


def make_concepts(text: str, clusters: int, dataset: ArrayDataset) -> tuple[Concept, ...]:
    """Parse the concepts of an experiment.

    Args:
        text: rules joined by `+`; empty: `label`, or `none` for a single cluster.
        clusters: the number of clusters.
        dataset: the data that the concepts select from and transform.

    Returns:
        One concept for each cluster.
    """
    calls = parse_parts(text or ("label" if clusters > 1 else "none"))
    fields: dict[str, Sequence[Any]] = {}
    filled_by: dict[str, str] = {}
    for position, call in enumerate(calls):
        if call.name in {other.name for other in calls[:position]}:
            raise concept_error(call.name, f"occurs twice in {text!r}", "write it once")
        rule = instantiate(call, CONCEPTS, "kind of drift")
        for field, values in rule(clusters, dataset).items():
            if field in filled_by:
                raise concept_error(
                    call.name,
                    f"sets the {field} of a cluster, and so does {filled_by[field]!r}",
                    "leave one of them out",
                )
            fields[field], filled_by[field] = values, call.name
    concepts = tuple(
        Concept(**{field: values[cluster] for field, values in fields.items()})
        for cluster in range(clusters)
    )
    for cluster, concept in enumerate(concepts):
        for part, split in (("training", dataset.train), ("test", dataset.test)):
            if not len(concept.select(split)):
                raise InputError(
                    f"cluster {cluster} of the drift has no {part} examples"
                    f" ({describe_concept(concept, dataset)}): choose other labels or domains"
                )
    return concepts


def describe_concept(concept: Concept, dataset: ArrayDataset) -> str:
    """Describe a concept in words, for tables and messages."""
    words = []
    if concept.labels is not None:
        words.append(", ".join(dataset.classes[label] for label in concept.labels))
    if concept.domain is not None:
        words.append(dataset.group_names[concept.domain])
    if concept.mapping is not None:
        pairs = (
            f"{dataset.classes[label]} and {dataset.classes[other]}"
            for label, other in enumerate(concept.mapping)
            if label < other
        )
        words.append(f"swapped {', '.join(pairs)}")
    if concept.rotation:
        words.append(f"rotated by {concept.rotation:g} degrees")
    if concept.corruption:
        words.append(concept.corruption + (f" {concept.severity}" if concept.severity else ""))
    if concept.size_factor != 1:
        words.append(f"{concept.size_factor:g} times the examples")
    return "; ".join(words) or "as they are"
