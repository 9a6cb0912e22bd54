from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich_runs import write_comparison, write_peers_run
from test_report_tables import printed
from test_report_words import say

from remanence.experiment.data_setup import PartitionTable
from remanence.metrics.groups import group_runs
from remanence.metrics.summary_rows import make_row
from remanence.reports import setup_table
from remanence.reports.clusters import draw_clusters, draw_previous_concepts
from remanence.reports.network import draw_network
from remanence.reports.page import render_report, write_partition
from remanence.reports.partition import draw_partition
from remanence.reports.peers import draw_peer_usage, draw_same_cluster
from remanence.reports.schedule import draw_drift, draw_schedule
from remanence.reports.table_columns import columns_for
from remanence.reports.tables import render_markdown, rounds_to_target
from remanence.results.ledger import PEER_COUNTS, SIMILARITY, peers_type
from remanence.results.run import PEERS, Run


def test_schedule_is_a_row_a_time_step() -> None:
    figure = draw_schedule(
        [[0, 0, 1], [0, 1, 1]], "My drift", concepts=["labels 0 1", "<b>labels 2 3</b>"]
    )
    [cells] = figure.plot.data
    assert ([list(row) for row in cells.z], figure.title) == ([[0, 0, 1], [0, 1, 1]], "My drift")
    assert [list(row) for row in cells.text] == [["0", "0", "1"], ["0", "1", "1"]]
    assert "cluster 1: <b>labels 2 3</b>" in figure.caption  # the page escapes it
    assert (
        "1 of them change cluster at least once. In the last step, cluster 0 has 1, cluster 1"
        " has 2."
    ) in figure.alt


def test_many_clients_have_no_numbers_in_their_cells() -> None:
    assert draw_schedule([[0] * 61]).plot.data[0].texttemplate is None
    assert draw_schedule([[0] * 60]).plot.data[0].texttemplate == "%{text}"


def test_a_page_shows_schedule_and_partition(tmp_path: Path) -> None:
    table = PartitionTable(
        title="digits",
        classes=["cat", "dog"],
        label_counts=np.array([[8, 2], [1, 9]]),
        validation=[0, 0],
        public=0,
        clusters=[[0, 1], [1, 0]],
        concepts=["<i>a</i>", "b"],
        notes=[],
    )
    text = write_partition(table, tmp_path / "data.html").read_text("utf-8")
    assert text.index('id="schedule"') < text.index('id="partition"')
    assert "&lt;i&gt;a&lt;/i&gt;" in text
    assert "<i>a</i>" not in text
    assert "2 clients, 2 classes, 2 time steps." in text


def write_peers(run: Run, *tables: tuple[int, int, int, list[list[float]]]) -> Run:
    made = (
        np.array([tables[0]], dtype=peers_type(4))
        if len(tables) == 1
        else np.array(list(tables), dtype=peers_type(4))
    )
    (run.folder / PEERS).write_bytes(made.tobytes())
    return Run(run.folder)


@pytest.fixture
def four(tmp_path: Path) -> Run:
    """Four clients; in step 0 the clusters are 1 1 0 0 and in step 1 they are 1 0 0 1, as the
    builder moves them. Round 3 is the first of step 1.
    """
    run = write_peers_run(tmp_path / "four", clients=4, rounds=2, steps=2)
    assert run.metadata["clusters"] == [[1, 1, 0, 0], [1, 0, 0, 1]]
    counts = [[0, 3, 1, 0], [2, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]]
    likes = [[0, 0.5, 0.25, 0.125], [1, 0, 1, 1], [1, 1, 0, 1], [1, 1, 1, 0]]
    return write_peers(run, (3, 1, PEER_COUNTS, counts), (3, 1, SIMILARITY, likes))


def test_clients_are_sorted_by_cluster_and_rows_are_shares(four: Run) -> None:
    """In step 1 the order is 1, 2 (cluster 0), then 0, 3 (cluster 1). Client 0 listened 3 of 4
    times to client 1; client 2 selected no peer.
    """
    figure = draw_peer_usage(group_runs([four]))
    assert figure is not None
    counts, alike = figure.plot.data
    assert list(counts.x) == list(counts.y) == ["1", "2", "0", "3"]
    assert [list(row) for row in counts.z] == [
        [0, 0, 1, 0],
        [0, 0, 0, 0],
        [0.75, 0.25, 0, 0],
        [0.333, 0.333, 0.333, 0],
    ]
    assert list(alike.z[2]) == [0.5, 0.25, 0, 0.125]
    assert {line.x0 for line in figure.plot.layout.shapes if line.x0 == line.x1} == {1.5}
    # 1/3 of client 3's, of three clients' shares: 0.333 / 3
    assert "11% of the selections are within clusters" in figure.alt


def test_network_joins_clients_to_the_peers_they_use(four: Run) -> None:
    """Three clients listened, to 1 and 2, to 0, and to 0, 1 and 2: six lines, of which only 3
    -> 0 stays within a cluster.
    """
    figure = draw_network(group_runs([four]))
    assert figure is not None
    lines = [trace for trace in figure.plot.data if trace.mode == "lines"]
    count = {
        name: sum(len(trace.x or ()) // 3 for trace in lines if trace.name == name)
        for name in ("within a cluster", "between clusters")
    }
    assert count == {"within a cluster": 1, "between clusters": 5}
    dots = {trace.name: len(trace.x) for trace in figure.plot.data if trace.mode == "markers"}
    assert dots == {"cluster 0": 2, "cluster 1": 2}
    assert not figure.saves_data
    assert "89% of the selections are between clusters" in figure.alt


def test_selections_within_clusters_are_compared_with_random_peers(tmp_path: Path) -> None:
    figure = draw_same_cluster(
        group_runs([write_peers_run(tmp_path / "run", clients=6, skill=0.9)])
    )
    assert figure is not None
    own, chance = figure.plot.data
    assert chance.name == "random peers"
    assert set(chance.y) == {0.4}  # each has two peers of its cluster among five
    assert np.mean(own.y) > np.mean(chance.y) + 0.2


def test_a_method_without_similarity_says_so(tmp_path: Path) -> None:
    cells = [{"label": "random", "similarity": False}, {"label": "hast"}]
    figure = draw_peer_usage(
        group_runs([write_comparison(tmp_path / "both", cells, write_peers_run)])
    )
    assert figure is not None
    assert figure.methods == ["hast", "random"]  # what is seen first has both maps
    titles = {choice.method: choice.axes["annotations"][1]["text"] for choice in figure.states}
    assert titles == {
        "random": "<b>This method estimates no similarity</b>",
        "hast": "<b>Similarity estimated by the client</b>",
    }
    alone = draw_peer_usage(group_runs([write_peers_run(tmp_path / "alone", similarity=False)]))
    assert alone is not None
    assert len(alone.plot.data) == 1


def test_every_cluster_has_a_line(tmp_path: Path) -> None:
    figure = draw_clusters(group_runs([write_peers_run(tmp_path / "run", rounds=4, steps=3)]))
    assert figure is not None
    assert [line.name for line in figure.plot.data] == ["cluster 0", "cluster 1"]
    assert list(figure.plot.data[0].x) == list(range(1, 13))
    assert len(figure.plot.layout.shapes) == 2


def test_what_clients_left_behind_starts_with_the_first_drift(tmp_path: Path) -> None:
    """The builder's clients lose 0.02 a round of what they do not train: one round after the
    drift they have lost that much, but for rounding to examples.
    """
    figure = draw_previous_concepts(
        group_runs([write_peers_run(tmp_path / "run", rounds=4, steps=3)])
    )
    assert figure is not None
    assert list(figure.plot.data[0].x) == list(range(5, 13))
    assert figure.plot.data[0].y[0] == pytest.approx(0.02, abs=0.011)


def test_the_three_numbers_of_drift_have_columns_and_words(tmp_path: Path) -> None:
    run = write_peers_run(tmp_path / "run")
    row = make_row(group_runs([run])[0])
    headings = [column.heading for column in columns_for([row])]
    assert {
        "Performance, %",
        "Robustness, points",
        "Convergence, rounds",
        "Recovery, rounds",
        "Worst client, %",
        "Same cluster, %",
    } <= set(headings)
    assert all(
        number is not None
        for number in (
            row.performance,
            row.robustness,
            row.convergence,
            row.worst_client,
            row.same_cluster,
        )
    )
    text = say(run)
    assert (
        f"hast has {100 * (row.performance or 0):.1f} % at the end of a time step (performance),"
        " reaches 90 % of a time step's gain after"
    ) in text
    assert "points at worst (robustness)." in text
    assert text.startswith("hast has an accuracy of ")
    assert "Share of peer selections within a client's own cluster: hast" in text
    assert "randomly drawn peers" in text
    assert "(the clients' own models, on test examples of their own cluster) after round 12" in text
    assert "Performance, %" in render_markdown([row])
    assert max(map(len, printed([row]).splitlines())) <= 80


def test_without_drift_there_are_no_such_columns(make_run: Callable[..., Run]) -> None:
    row = make_row(group_runs([make_run([[0.5, 0.5]])])[0])
    assert not [column.heading for column in columns_for([row]) if column.theme]
    assert draw_drift(group_runs([make_run([[0.5, 0.5]], "other")])) is None


def test_drift_has_a_table_of_its_own_in_the_page(tmp_path: Path) -> None:
    text = render_report([write_peers_run(tmp_path / "run")])
    assert "<caption>The clients&#39; own models, mean over seeds</caption>" in text
    assert "<caption>Drift and peers</caption>" in text
    assert "Rounds to a target" not in text


def test_a_target_is_no_measure_of_curves_that_fall_at_every_drift(tmp_path: Path) -> None:
    cells = [{"label": "random"}, {"label": "hast"}]
    assert (
        rounds_to_target(group_runs([write_comparison(tmp_path / "both", cells, write_peers_run)]))
        is None
    )


def test_conditions_tell_the_drift(tmp_path: Path) -> None:
    run = write_peers_run(tmp_path / "run", rounds=4, steps=3)
    setup = dict(setup_table.describe(group_runs([run])))
    assert setup["Rounds"] == "4 in each of 3 time steps"
    assert setup["Drift"] == "random(clusters=2) (cluster 0: labels 0 1; cluster 1: labels 2 3)"
    assert (
        setup["Evaluation"]
        == "the clients' own models, the best on validation so far, each on test examples of"
        " its own cluster, every round"
    )
    figure = draw_partition(group_runs([run]))
    assert figure is not None
    assert "before any drift (time step 0)" in figure.caption
