from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from remanence.core import progress
from remanence.core.progress import (
    BarProgress,
    LogProgress,
    NullProgress,
    SharedProgress,
    TimeLeft,
    describe_round,
    duration,
    make_progress,
)


def line(
    number: int,
    accuracy: float | None = None,
    rejected: tuple[int, ...] = (),
    abandoned: bool = False,
) -> dict[str, Any]:
    rejections = [
        {"client": client, "code": "weight", "reason": "its weight is [red]0[/]"}
        for client in rejected
    ]
    return {"round": number, "accuracy": accuracy, "rejected": rejections, "abandoned": abandoned}


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "1 s"),
        (1.4, "1 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (61, "1 min 1 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 0 min"),
        (7260, "2 h 1 min"),
        (360_000, "100 h 0 min"),
    ],
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_the_end_of_a_line() -> None:
    assert describe_round(line(1)) == ""
    assert describe_round(line(1, 0.5)) == ", accuracy 50.0%"
    assert describe_round(line(1, 0.5, (3,))) == ", accuracy 50.0%, rejected: client 3 (weight)"
    assert (
        describe_round(line(1, None, (1, 2, 3)))
        == ", rejected: client 1 (weight), client 2 (weight), client 3 (weight)"
    )
    assert describe_round(line(1, None, (1, 2, 3, 4, 5), True)).endswith(
        "client 3 (weight) and 2 more, round abandoned"
    )


def run_lines(
    capsys: pytest.CaptureFixture[str], total: int, done: int = 0, **special: dict[str, Any]
) -> list[str]:
    shown = LogProgress()
    shown.start("fedavg", done, total)
    for number in range(done + 1, total + 1):
        shown.round(special.get(f"round{number}", line(number, 0.25)))
    shown.finish()
    out, err = capsys.readouterr()
    assert out == ""  # standard output belongs to results
    return err.splitlines()


@pytest.mark.parametrize("total", [1, 2, 19, 20, 21, 100, 1000, 12345])
def test_about_twenty_lines_whatever_the_length(
    capsys: pytest.CaptureFixture[str], total: int
) -> None:
    lines = run_lines(capsys, total)
    assert min(total, 19) <= len(lines) <= 22
    assert lines[0].startswith(f"fedavg: round 1/{total}, accuracy 25.0%")
    assert lines[-1].startswith(f"fedavg: round {total}/{total}")
    assert [text.endswith(" left") for text in lines] == [True] * (len(lines) - 1) + [False]


def test_a_rejection_is_always_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert any(
        "round 503/1000, rejected: client 9 (weight)" in text
        for text in run_lines(capsys, 1000, round503=line(503, None, (9,)))
    )


def test_the_time_left_counts_rounds_since_the_start_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resumed after 80 of 100: one round took 3 s, so the 19 left take 57 s."""
    shown = LogProgress()
    clock = iter([1000.0, 1003.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    shown.start("wsm", 80, 100)
    shown.round(line(81, 0.5))
    assert capsys.readouterr().err == "wsm: round 81/100, accuracy 50.0%, 57 s left\n"


def test_rounds_in_which_something_is_prepared_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Round 1 compiles for 70 s, rounds 2 and 4 take 1 and 3 s, and round 3 captures for 9."""
    clock = iter([0.0, 70.0, 71.0, 80.0, 83.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    left, shown = TimeLeft(0, 104), []
    for number in range(1, 5):
        if number in (1, 3):
            left.prepare()
        shown.append(left.round(number))
    assert shown == ["", "1 min 42 s left", "1 min 41 s left", "3 min 20 s left"]


def test_a_line_without_an_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    shown = LogProgress()
    shown.start("fedavg", 0, 3)
    shown.prepare("compiling")
    shown.prepare("compiling")  # shown once
    shown.prepare("")
    shown.round(line(1, 0.5))
    shown.round(line(2, 0.5))
    compiling, first, second = capsys.readouterr().err.splitlines()
    assert compiling == "compiling"
    assert first == "fedavg: round 1/3, accuracy 50.0%"
    assert second == "fedavg: round 2/3, accuracy 50.0%, 1 s left"


def test_a_second_run_starts_afresh(capsys: pytest.CaptureFixture[str]) -> None:
    shown = LogProgress()
    for title in ("a", "b"):
        shown.start(title, 0, 1000)
        shown.round(line(1))
    assert [text[0] for text in capsys.readouterr().err.splitlines()] == ["a", "b"]


def test_silence(capsys: pytest.CaptureFixture[str]) -> None:
    quiet = NullProgress()
    quiet.start("fedavg", 0, 3)
    quiet.round(line(1, 0.5, (2,)))
    quiet.log("something")
    quiet.finish()
    assert capsys.readouterr() == ("", "")


def test_a_bar_shows_what_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    bar = BarProgress()
    bar.console = Console(file=screen, force_terminal=True, width=120, color_system=None)
    bar.start("fedprox[mu]", 2, 4)
    bar.round(line(3, 0.5))
    bar.round(line(4, None, (7,)))
    bar.log("[bold]checkpoint[/bold]")
    assert bar.bar.tasks[0].completed == 4
    bar.finish()
    bar.finish()  # a run that fails early finishes twice or before it began
    text = screen.getvalue()
    assert "fedprox[mu]" in text
    assert "4/4" in text
    assert "accuracy 50.0%" in text
    assert "round 4: client 7 rejected (weight): its weight is [red]0[/]" in text
    assert "[bold]checkpoint[/bold]" in text


def test_a_bar_that_never_started_can_be_finished() -> None:
    BarProgress().finish()


def test_terminals_get_a_bar_and_files_get_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(make_progress(quiet=True), NullProgress)
    for terminal, kind in ((True, BarProgress), (False, LogProgress)):
        monkeypatch.setattr(
            progress.sys.stderr, "isatty", lambda terminal=terminal: terminal, raising=False
        )
        assert isinstance(make_progress(quiet=False), kind)


def test_a_note_of_several_runs_is_logged_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Also of runs that train together; a message that is logged appears each time."""
    one, two = LogProgress(), BarProgress()
    two.console = Console(file=io.StringIO(), width=80)
    for shown in (one, two):
        shared = SharedProgress(shown, "two runs")
        for run in (shown, shared.for_run(), shared.for_run()):
            run.note("momentum has no effect")
            run.log("round 1 diverged")
    assert isinstance(two.console.file, io.StringIO)
    for said in (capsys.readouterr().err, two.console.file.getvalue()):
        assert said.count("momentum has no effect") == 1
        assert said.count("round 1 diverged") == 3


def test_the_time_left_counts_the_runs_that_come_later(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round of 3 runs took 6 s: 9 rounds of these and 60 of single runs take 54 and 120 s."""
    shown = LogProgress()
    clock = iter([0.0, 6.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    shown.start("three seeds", 0, 10, 3, 60)
    shown.round(line(1, 0.5))
    assert capsys.readouterr().err.endswith(", 2 min 54 s left in all\n")


def test_verbose_shows_every_round_and_why_replies_were_rejected(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = make_progress(quiet=False, verbose=True)
    shown.start("fedavg", 0, 1000)
    for number in range(1, 51):
        shown.round(line(number, 0.5, (9,) if number == 7 else ()))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 51
    assert "round 7: client 9 rejected (weight): its weight is [red]0[/]" in lines
