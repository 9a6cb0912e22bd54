"""Forgetting of single examples: which ones a client loses by aggregation, and how often each one
is learned and forgotten.

Computed from the records of `run.examples`: whether the models of a round classify the clients'
training examples correctly, and with which margin.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from remanence.results.ledger import MOMENTS

LOCAL, MERGED = MOMENTS.index("local"), MOMENTS.index("merged")


@dataclass(frozen=True)
class ForgettableExamples:
    """Number of a client's examples that its local model classifies correctly and the new global
    model does not.
    """

    round: np.ndarray  # [n] of the merged model
    client: np.ndarray  # [n]
    count: np.ndarray  # [n] forgettable examples
    evaluated: np.ndarray  # [n] examples on which both models were evaluated


@dataclass(frozen=True)
class ExampleEvents:
    """Number of events of each example of each client over the recorded rounds."""

    client: np.ndarray  # [n]
    id: np.ndarray  # [n]
    evaluated: np.ndarray  # [n] number of evaluations
    learning: np.ndarray  # [n] wrong (or not evaluated before), then right
    forgetting: np.ndarray  # [n] right, then wrong
    margin_rise: np.ndarray  # [n] the margin error grew

    @property
    def never_forgotten(self) -> np.ndarray:
        """Ids of examples that were right once and never wrong after it (unforgettable: Toneva)."""
        return np.unique(self.id[(self.learning > 0) & (self.forgetting == 0)])

    @property
    def never_learned(self) -> np.ndarray:
        """Ids of examples that were always wrong."""
        return np.unique(self.id[self.learning == 0])


def find_forgettable(examples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find forgettable examples (FedWAvg): the client's model after its latest training classifies
    them correctly, the new global model does not.

    Args:
        examples: The records of `run.examples`.

    Returns:
        The records of the aggregated model on examples on which the client's latest local model was
        evaluated too, and a mask of those that are forgettable.
    """
    kept = examples[np.isin(examples["moment"], (LOCAL, MERGED))]
    # local before merged
    kept = kept[np.lexsort((kept["moment"], kept["round"], kept["id"], kept["client"]))]
    place = np.arange(len(kept))
    latest = (
        np.maximum.accumulate(np.where(kept["moment"] == LOCAL, place, -1)) if len(kept) else place
    )
    same = (
        (latest >= 0)
        & (kept["client"][latest] == kept["client"])
        & (kept["id"][latest] == kept["id"])
    )
    seen = same & (kept["moment"] == MERGED)
    return kept[seen], (kept["correct"][latest[seen]] > 0) & (kept["correct"][seen] == 0)


def forgettable_examples(examples: np.ndarray) -> ForgettableExamples:
    """Count the forgettable examples of each client in each round (FedWAvg, Hong et al., 2022):
    what aggregation loses on the client's own training examples.

    Client 0's model classifies both of its examples correctly, the aggregated model only one:

    >>> from remanence.results.ledger import EXAMPLE
    >>> rows = [(1, 0, LOCAL, 0, 5, 1, 1.0), (1, 0, LOCAL, 0, 6, 1, 1.0)]
    >>> rows += [(1, 0, MERGED, 0, 5, 1, 0.5), (1, 0, MERGED, 0, 6, 0, -0.5)]
    >>> forgettable_examples(np.array(rows, dtype=EXAMPLE)).count
    array([1])
    """
    merged, lost = find_forgettable(examples)
    keys, group = np.unique(
        np.stack([merged["round"], merged["client"]]), axis=1, return_inverse=True
    )
    evaluated = np.bincount(group.reshape(-1), minlength=keys.shape[1])
    count = np.bincount(group.reshape(-1)[lost], minlength=keys.shape[1])
    return ForgettableExamples(keys[0], keys[1], count, evaluated)


def example_events(examples: np.ndarray, moment: str = "merged") -> ExampleEvents:
    """Count learning and forgetting events (Toneva et al., ICLR 2019): acc_t < acc_{t+1} and
    acc_t > acc_{t+1}, over the recorded rounds of an example.

    Before its first record an example counts as wrong, so an example that is right at its first
    record is learned there. The margin error is the largest other logit minus that of the label;
    `margin_rise` counts how often it grew. Right, wrong, right is learned twice and forgotten once:

    >>> from remanence.results.ledger import EXAMPLE
    >>> rows = [(1, 0, MERGED, 0, 5, 1, 1.0), (2, 0, MERGED, 0, 5, 0, -1.0)]
    >>> rows += [(3, 0, MERGED, 0, 5, 1, 0.5)]
    >>> events = example_events(np.array(rows, dtype=EXAMPLE))
    >>> events.learning, events.forgetting, events.margin_rise
    (array([2]), array([1]), array([1]))
    """
    kept = examples[examples["moment"] == MOMENTS.index(moment)]
    kept = kept[np.lexsort((kept["round"], kept["id"], kept["client"]))]
    first = np.ones(len(kept), dtype=bool)  # the first record of its client and example
    first[1:] = (kept["client"][1:] != kept["client"][:-1]) | (kept["id"][1:] != kept["id"][:-1])
    right, margin = kept["correct"] > 0, kept["margin"]
    was_right = np.where(first, False, np.roll(right, 1))
    worse = ~first & (margin < np.roll(margin, 1))
    group, count = np.cumsum(first) - 1, int(first.sum())

    def count_events(mask: np.ndarray) -> np.ndarray:
        return np.bincount(group[mask], minlength=count)

    evaluated = np.bincount(group, minlength=count)
    return ExampleEvents(
        kept["client"][first],
        kept["id"][first],
        evaluated,
        count_events(right & ~was_right),
        count_events(was_right & ~right),
        count_events(worse),
    )
