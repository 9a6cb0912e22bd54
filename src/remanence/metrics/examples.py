"""What happens to single examples: which ones aggregation makes a client's model lose, and how
often each is learned and forgotten.

All from the records of `run.examples`: clients' training rows, judged right or wrong with a margin,
at the moments of a round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from remanence.results.ledger import MOMENTS

if TYPE_CHECKING:
    from remanence.results.run import Run

LOCAL, MERGED = MOMENTS.index("local"), MOMENTS.index("merged")
EVENTS = ("right_to_wrong", "margin_rise")  # as the method `centralized` reports them


@dataclass(frozen=True)
class ForgettableExamples:
    """How many of a client's examples its own model had right and the new global model has
    wrong.
    """

    round: np.ndarray  # [n] of the merged model
    client: np.ndarray  # [n]
    count: np.ndarray  # [n] forgettable examples
    evaluated: np.ndarray  # [n] examples seen by both models


@dataclass(frozen=True)
class ExampleEvents:
    """What happened to each example of each client over the recorded rounds."""

    client: np.ndarray  # [n]
    id: np.ndarray  # [n]
    evaluated: np.ndarray  # [n] how often
    learning: np.ndarray  # [n] wrong (or never judged before), then right
    forgetting: np.ndarray  # [n] right, then wrong
    margin_rise: np.ndarray  # [n] the margin error grew, whether or not the example became wrong

    @property
    def never_forgotten(self) -> np.ndarray:
        """Right at some time and never wrong after it (Toneva's unforgettable examples). -> ids"""
        return np.unique(self.id[(self.learning > 0) & (self.forgetting == 0)])

    @property
    def never_learned(self) -> np.ndarray:
        """Wrong every time. -> ids"""
        return np.unique(self.id[self.learning == 0])


@dataclass(frozen=True)
class CentralizedEvents:
    """Forgetting events of centralized training, batch to batch, added up over the examples of
    a round.
    """

    round: np.ndarray  # [n]
    right_to_wrong: np.ndarray  # [n]
    margin_rise: np.ndarray  # [n]


def find_forgettable(examples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """-> records of the merged global model on examples that the client's latest local model has
    judged too, and which of them are forgettable

    Forgettable (FedWAvg): right for the client's own model after its latest training, wrong for the
    new global model.
    """
    kept = examples[np.isin(examples["moment"], (LOCAL, MERGED))]
    # local stands before merged
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
    """Forgettable examples of each client in each round (FedWAvg, Hong et al., 2022): aggregation's
    loss on the client's own training rows.

    Client 0 had both of its examples right; the merged model has the second wrong, and one is
    forgotten:

    >>> from remanence.results.ledger import EXAMPLE
    >>> rows = [(1, 0, LOCAL, 0, 5, 1, 1.0), (1, 0, LOCAL, 0, 6, 1, 1.0), (1, 0, MERGED, 0, 5, 1, 0.5), (1, 0, MERGED, 0, 6, 0, -0.5)]
    >>> forgettable_examples(np.array(rows, dtype=EXAMPLE)).count
    array([1])
    """
    merged, lost = find_forgettable(examples)
    keys, group = np.unique(
        np.stack([merged["round"], merged["client"]]), axis=1, return_inverse=True
    )
    judged = np.bincount(group.reshape(-1), minlength=keys.shape[1])
    count = np.bincount(group.reshape(-1)[lost], minlength=keys.shape[1])
    return ForgettableExamples(keys[0], keys[1], count, judged)


def example_events(examples: np.ndarray, moment: str = "merged") -> ExampleEvents:
    """Learning and forgetting events (Toneva et al., ICLR 2019): acc_t < acc_{t+1} and acc_t >
    acc_{t+1}, over an example's recorded rounds.

    Before its first record an example counts as wrong, so right at first sight is learned. The
    margin error is the largest other logit minus the true one, and `margin_rise` counts where it
    grew. Right, wrong, right is learned twice and forgotten once:

    >>> from remanence.results.ledger import EXAMPLE
    >>> rows = [(1, 0, MERGED, 0, 5, 1, 1.0), (2, 0, MERGED, 0, 5, 0, -1.0), (3, 0, MERGED, 0, 5, 1, 0.5)]
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

    def tally(happened: np.ndarray) -> np.ndarray:
        return np.bincount(group[happened], minlength=count)

    judged = np.bincount(group, minlength=count)
    return ExampleEvents(
        kept["client"][first],
        kept["id"][first],
        judged,
        tally(right & ~was_right),
        tally(was_right & ~right),
        tally(worse),
    )


def centralized_events(run: Run) -> CentralizedEvents | None:
    """Forgetting events of a run with the method `centralized` (FedWAvg, table 1), by round;
    None where they were not counted.
    """
    rounds: dict[int, tuple[int, int]] = {}
    for line in run.metrics:
        extras = line.get("payload") or {}
        if all(f"centralized.{kind}" in extras for kind in EVENTS):
            rounds[int(line["round"])] = (
                int(extras["centralized.right_to_wrong"]),
                int(extras["centralized.margin_rise"]),
            )
    if not rounds:
        return None
    counts = np.array([rounds[round] for round in sorted(rounds)])
    return CentralizedEvents(np.array(sorted(rounds)), counts[:, 0], counts[:, 1])
