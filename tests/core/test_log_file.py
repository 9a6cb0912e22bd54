from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from remanence.core import log_file
from remanence.core.log_file import FULL, LOG, LogFile, LoggedProgress
from remanence.core.progress import NullProgress
from remanence.core.safe_path import SafePath


def line(number: int, **more: Any) -> dict[str, Any]:
    return {"round": number, "accuracy": 0.5, "rejected": [], "abandoned": False} | more


def test_messages_before_training_wait_for_the_folder(tmp_path: Path) -> None:
    progress = LoggedProgress(NullProgress(), SafePath(tmp_path / "run"))
    progress.log("Using engine 'sequential'")
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    progress.start("fedavg", 0, 2)
    rejection = {"client": 3, "code": "not_finite", "reason": "its model holds NaN"}
    progress.round(line(1, rejected=[rejection]))
    progress.prepare("compiling")
    progress.note("compiling")  # shown once
    progress.round(line(2))
    progress.finish()
    lines = (tmp_path / "run" / LOG).read_text().splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d ", text) for text in lines)
    assert [text[9:].partition(", accuracy")[0] for text in lines] == [
        "Using engine 'sequential'",
        "fedavg: from round 1 to 2",
        "fedavg: round 1/2",
        "round 1: client 3 rejected (not_finite): its model holds NaN",
        "compiling",
        "fedavg: round 2/2",
    ]


def test_a_log_has_an_end(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(log_file, "LARGEST", 200)
    for _ in range(2):  # a command, and one that resumes it
        log = LogFile(SafePath(tmp_path))
        log.start("fedavg", 0, 10)
        for number in range(50):
            log.log(f"message {number}")
    text = (tmp_path / LOG).read_text()
    assert len(text) < 200 + 3 * len(FULL)
    assert text.count(FULL) == 2
