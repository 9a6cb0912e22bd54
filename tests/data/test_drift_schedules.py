from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remanence.core.errors import InputError
from remanence.core.expressions import instantiate, parse_call
from remanence.core.rng import Key
from remanence.data import drift_schedules, schedule_table
from remanence.data.drift_schedules import (
    DRIFT_SCHEDULES,
    changed_clients,
    divide_clients,
)
from remanence.data.schedule_table import read_table


def make(text: str) -> drift_schedules.DriftSchedule:
    schedule = instantiate(parse_call(text), DRIFT_SCHEDULES, "drift")
    assert isinstance(schedule, drift_schedules.DriftSchedule)
    return schedule


def write(folder: Path, text: str) -> Path:
    path = folder / "drift.csv"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("clients", "ratios", "sizes"),
    [
        (50, [1, 1, 1, 1], [13, 13, 12, 12]),  # 12.5 each: two ties, to the first two
        (50, [80, 20], [40, 10]),
        # 1.75, 1.75, 3.5: the floors 1, 1, 3 leave two, for the remainders .75
        (7, [1, 1, 2], [2, 2, 3]),
        (3, [80, 20], [2, 1]),  # 2.4, 0.6
    ],
)
def test_sizes_by_largest_remainders(clients: int, ratios: list[int], sizes: list[int]) -> None:
    assert divide_clients(clients, ratios) == sizes


@given(st.integers(1, 200), st.lists(st.integers(1, 1000), min_size=1, max_size=6))
def test_sizes_add_up_and_lie_within_one_of_their_share(clients: int, ratios: list[int]) -> None:
    sizes = divide_clients(clients, ratios)
    assert sum(sizes) == clients
    assert all(
        abs(size - clients * ratio / sum(ratios)) < 1
        for size, ratio in zip(sizes, ratios, strict=True)
    )


def test_none_keeps_blocks_of_clients() -> None:
    assert make("none")(3, 2, Key(0)).tolist() == [[0, 0, 0]] * 2
    assert make('none(clusters=2, sizes="3:1")')(4, 3, Key(0)).tolist() == [[0, 0, 0, 1]] * 3


@given(
    st.integers(4, 30),
    st.integers(1, 6),
    st.sampled_from(["", "50:30:20", "1:1:2"]),
    st.integers(0, 99),
)
def test_random_starts_with_blocks_and_keeps_sizes(
    clients: int, steps: int, sizes: str, seed: int
) -> None:
    schedule = make(f'random(clusters=3, sizes="{sizes}")')
    assignment = schedule(clients, steps, Key(seed))
    assert assignment.shape == (steps, clients)
    assert assignment.dtype == np.int64
    assert (np.diff(assignment[0]) >= 0).all()
    assert (np.sort(assignment, axis=1) == assignment[0]).all()
    assert (assignment == schedule(clients, steps, Key(seed))).all()


def test_random_shuffles_afresh_at_every_step_and_for_every_seed() -> None:
    schedule = make("random(clusters=2)")
    first, second = schedule(40, 5, Key(0)), schedule(40, 5, Key(1))
    assert len({step.tobytes() for step in first}) == 5
    assert not (first[1:] == second[1:]).all(axis=1).any()


def test_a_longer_random_schedule_begins_like_a_shorter_one() -> None:
    assert (make("random")(10, 6, Key(3))[:4] == make("random")(10, 4, Key(3))).all()


def test_rotation_moves_everyone_on() -> None:
    """Blocks 0 0 1 2; every second step each goes one on, and the last returns to the first."""
    assignment = make("rotation(clusters=3, every=2)")(4, 5, Key(0))
    assert assignment.tolist() == [
        [0, 0, 1, 2],
        [0, 0, 1, 2],
        [1, 1, 2, 0],
        [1, 1, 2, 0],
        [2, 2, 0, 1],
    ]


@pytest.mark.parametrize(
    ("clusters", "words"),
    [
        (
            2,
            "0000000000 0000000000 0000000000 1100000000 1111100000 1111110000 1111111100"
            " 1111111100 1111111111 1111111111",
        ),
        (
            4,
            "0000000000 0000000000 1112220000 1112220030 2211222130 2221232130 2321133133"
            " 3323133213 3033313213 0033312223",
        ),
    ],
)
def test_staggered_is_the_published_pattern_and_the_other_ten_repeat_it(
    clusters: int, words: str
) -> None:
    schedule = make(f"staggered(clusters={clusters})")
    assignment = schedule(20, 10, Key(0))
    assert ["".join(map(str, step)) for step in assignment.tolist()] == [
        word * 2 for word in words.split()
    ]
    assert schedule(13, 4, Key(5)).tolist() == assignment[:4, :13].tolist()
    assert schedule(20, 2, Key(0)).max() == 0
    assert schedule.clusters == clusters  # also when the time steps asked for visit cluster 0 alone


def test_who_moved() -> None:
    assert changed_clients(np.array([[0, 1, 2], [0, 2, 1], [0, 2, 2]])).tolist() == [
        [False] * 3,
        [False, True, True],
        [False, False, True],
    ]


@pytest.mark.parametrize(
    "text",
    [
        "0,1\n1,0\n1,2\n",
        "\ufeff0;1\r\n1;0\r\n\r\n1;2",
        "0\t1\n1\t 0\n1\t2\n",
        "time_step,client,cluster\n0,0,0\n0,1,1\n1,0,1\n1,1,0\n2,0,1\n2,1,2\n",
        "Cluster,client,time_step\n2,1,2\n1,0,2\n0,1,1\n1,0,1\n1,1,0\n0,0,0\n",
    ],
)
def test_a_users_table_in_both_forms(tmp_path: Path, text: str) -> None:
    schedule = make(f"table(path='{write(tmp_path, text)}')")
    assert (schedule.clusters, schedule.clients, schedule.steps) == (3, 2, 3)
    assert schedule(2, 3, Key(0)).tolist() == [[0, 1], [1, 0], [1, 2]]
    assert schedule(2, 2, Key(0)).tolist() == [[0, 1], [1, 0]]
    with pytest.raises(InputError, match=r"has 2 clients in .* but 3 are asked for"):
        schedule(3, 3, Key(0))
    with pytest.raises(InputError, match=r"has 3 time steps in .* but 4 are asked for"):
        schedule(2, 4, Key(0))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ("0,1\n0\n", r"line 2 .* has 1 cells where line 1 has 2"),
        ("0,1\n\n0,1,\n", r"line 3 .* has 3 cells"),
        ("0,1\n0,\n", r"line 2 .* has an empty cell"),
        ("0,1\n0,-1\n", r"line 2 .* has '-1' where a number belongs"),
        ("0,1\n0,1.5\n", r"line 2 .* has '1.5'"),
        ("0,1\n0,٣\n", r"line 2 .* where a number belongs"),
        ("0,1\n0,99999999999999999999\n", r"line 2 .* where a number belongs"),
        (
            "step,client\n0,1\n",
            r"line 1 .* has 'step' where a number belongs: .* time_step,client,cluster",
        ),
        ("0,0\n0,2\n2,3\n", r"line 2 .* names cluster 2, but no client is ever in cluster 1"),
        ("1,1\n", r"line 1 .* names cluster 1, but no client is ever in cluster 0"),
        ("time_step,client,cluster\n", r"line 1 .* is a header with nothing below it"),
        (
            "time_step,client,cluster\n0,0,0\n0,1,0\n0,0,0\n",
            r"line 4 .* places client 0 at time step 0 a second time",
        ),
        (
            "time_step,client,cluster\n0,0,0\n1,1,0\n0,1,0\n",
            r"line 4 .* client 0 is nowhere at time step 1",
        ),
        (
            "time_step,client,cluster\n0,0,0\n999999999,999999999,0\n",
            r"line 3 .* client 1 is nowhere at time step 0",
        ),
        (
            "time_step,client,cluster\n0,0,0\n0,1,4\n",
            r"line 3 .* names cluster 4, but no client is ever in cluster 1",
        ),
    ],
)
def test_a_table_that_cannot_be_is_refused_with_its_line(
    tmp_path: Path, text: str, complaint: str
) -> None:
    with pytest.raises(InputError, match=complaint):
        read_table(write(tmp_path, text))


def test_files_that_are_no_table_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="was not found"):
        read_table(tmp_path / "nowhere.csv")
    with pytest.raises(InputError, match="was not found"):
        read_table(tmp_path)
    (tmp_path / "image.csv").write_bytes(b"\xff\xd8\xff\xe0")
    with pytest.raises(InputError, match="is not text"):
        read_table(tmp_path / "image.csv")
    monkeypatch.setattr(schedule_table, "LIMIT", 4)
    assert read_table(write(tmp_path, "0,1\n")).tolist() == [[0, 1]]
    with pytest.raises(InputError, match="is larger than 4 bytes"):
        read_table(write(tmp_path, "0,1\n0,1\n"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("random(clusters=0)", "cannot have 0 clusters"),
        ("random(sizes=half)", "cannot read sizes='half'"),
        ("random(sizes='70:0')", "cannot read sizes='70:0'"),
        ("random(sizes='1:1:2')", "has 3 ratios in sizes='1:1:2' for 2 clusters: write clusters=3"),
        ("rotation(every=0)", "every 0 time steps"),
        ("staggered(clusters=3)", "has no pattern for clusters=3"),
        ("table", "needs a path"),
        ("radnom", "unknown drift 'radnom': did you mean random"),
        ("none(size=3)", "drift 'none' has no option 'size'"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        make(text)


def test_schedules_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="is written for 10 time steps, not 11"):
        make("staggered")(20, 11, Key(0))
    with pytest.raises(InputError, match="without any of 3 clients"):
        make("random(clusters=4)")(3, 2, Key(0))
    # 1.6 and 0.4: the second rounds to none
    with pytest.raises(InputError, match="a cluster of 80:20 without any of 2 clients"):
        make("random(sizes='80:20')")(2, 2, Key(0))
