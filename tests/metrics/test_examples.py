"""Single examples: forgettable ones, learning and forgetting events."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from metrics.small_ledger import make_examples

from remanence.metrics.examples import (
    example_events,
    find_forgettable,
    forgettable_examples,
)


def test_forgettable_is_right_for_the_client_and_wrong_for_the_merged_model() -> None:
    """Client 0: 10 stays right, 11 is lost, 12 was never right, 13 is gained. Client 1 loses
    its only example. What the model knew before plays no part.
    """
    answers = {10: (True, True), 11: (True, False), 12: (False, False), 13: (False, True)}
    rows = [(1, "before", 0, 12, True, 1.0)]
    for id, (local, merged) in answers.items():
        rows += [(1, "merged", 0, id, merged, 0.0), (1, "local", 0, id, local, 0.0)]
    rows += [(1, "local", 1, 20, True, 0.0), (1, "merged", 1, 20, False, 0.0)]
    examples = make_examples(*rows)
    found = forgettable_examples(examples)
    assert found.round.tolist() == [1, 1]
    assert found.client.tolist() == [0, 1]
    assert found.count.tolist() == [1, 1]
    assert found.evaluated.tolist() == [4, 1]
    merged, lost = find_forgettable(examples)
    assert merged["id"][lost].tolist() == [11, 20]


def test_the_latest_local_model_counts() -> None:
    """Client 0 trains in rounds 1 and 3; in round 2 its examples are evaluated with the merged model all the
    same.

    Round 2 compares with round 1's local model (right -> wrong: lost), round 3 with its own (wrong
    -> wrong: not lost).
    """
    found = forgettable_examples(
        make_examples(
            (1, "local", 0, 7, True, 0.0),
            (1, "merged", 0, 7, True, 0.0),
            (2, "merged", 0, 7, False, 0.0),
            (3, "local", 0, 7, False, 0.0),
            (3, "merged", 0, 7, False, 0.0),
        )
    )
    assert found.round.tolist() == [1, 2, 3]
    assert found.count.tolist() == [0, 1, 0]


def test_an_example_without_a_local_judgement_is_not_counted() -> None:
    """A record of another client on the same example, or a later one, is not this client's."""
    found = forgettable_examples(
        make_examples(
            (1, "local", 0, 7, True, 0.0),
            (1, "merged", 1, 7, False, 0.0),
            (2, "local", 1, 7, True, 0.0),
            (1, "merged", 0, 8, False, 0.0),
        )
    )
    assert found.count.tolist() == []


def test_learning_and_forgetting_by_hand() -> None:
    """Example 1: right, wrong, wrong, right: learned twice, forgotten once. 2: wrong, right, right:
    learned, never forgotten. 3: wrong always.

    Margins of example 1: 2, -1, -2, 1: the margin error grew twice, once without changing the
    answer; of 3: -3, -2: it fell.
    """
    events = example_events(
        make_examples(
            (4, "merged", 0, 1, True, 1.0),
            (1, "merged", 0, 1, True, 2.0),
            (2, "merged", 0, 1, False, -1.0),
            (3, "merged", 0, 1, False, -2.0),
            (1, "merged", 0, 2, False, -1.0),
            (2, "merged", 0, 2, True, 1.0),
            (3, "merged", 0, 2, True, 1.0),
            (1, "merged", 5, 3, False, -3.0),
            (2, "merged", 5, 3, False, -2.0),
            (2, "local", 5, 3, True, 1.0),
        )
    )
    assert events.client.tolist() == [0, 0, 5]
    assert events.id.tolist() == [1, 2, 3]
    assert events.evaluated.tolist() == [4, 3, 2]
    assert events.learning.tolist() == [2, 1, 0]
    assert events.forgetting.tolist() == [1, 0, 0]
    assert events.margin_rise.tolist() == [2, 0, 0]
    assert events.never_forgotten.tolist() == [2]
    assert events.never_learned.tolist() == [3]


def test_events_at_another_moment() -> None:
    rows = make_examples(
        (1, "local", 0, 1, True, 1.0),
        (2, "local", 0, 1, False, -1.0),
        (1, "merged", 0, 1, True, 1.0),
    )
    assert example_events(rows, "local").forgetting.tolist() == [1]
    assert example_events(rows).forgetting.tolist() == [0]


def test_no_records_no_events() -> None:
    events = example_events(make_examples())
    assert events.id.tolist() == []
    assert events.never_learned.tolist() == []
    assert forgettable_examples(make_examples()).count.tolist() == []


answers = st.lists(st.booleans(), min_size=1, max_size=6)


@given(st.lists(answers, min_size=1, max_size=4), st.randoms())
def test_events_alternate_in_any_order_of_records(histories: list[list[bool]], random: Any) -> None:
    """What is forgotten was learned before: events differ by one exactly where the last answer
    is right.
    """
    rows = [
        (round, "merged", 0, id, right, 0.0)
        for id, history in enumerate(histories)
        for round, right in enumerate(history)
    ]
    random.shuffle(rows)
    events = example_events(make_examples(*rows))
    assert (events.learning - events.forgetting).tolist() == [
        int(history[-1]) for history in histories
    ]
    assert events.never_learned.tolist() == [
        id for id, history in enumerate(histories) if not any(history)
    ]
    assert not set(events.never_learned.tolist()) & set(events.never_forgotten.tolist())
    assert events.margin_rise.tolist() == [0] * len(histories)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=8))
def test_forgettable_equals_counting_one_by_one(pairs: list[tuple[bool, bool]]) -> None:
    rows = [
        row
        for id, (local, merged) in enumerate(pairs)
        for row in ((1, "local", 3, id, local, 0.0), (1, "merged", 3, id, merged, 0.0))
    ]
    assert forgettable_examples(make_examples(*rows)).count.tolist() == [
        sum(local and not merged for local, merged in pairs)
    ]
