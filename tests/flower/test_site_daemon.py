"""A site's daemon: started by the first message, used by the next, ends with its owner."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from in_process import small_config, write_site

from remanence.flower import daemon_client
from remanence.flower.client_app import answer_message, find_site, handle
from remanence.flower.deployment import build_coordinator, describe_examples, site_config
from remanence.flower.settings import read_site
from remanence.flower.wire import WireMessage


def ping() -> WireMessage:
    experiment, _ = build_coordinator(small_config("fedavg"))
    header = {
        "run": "a-test-run",
        "experiment": site_config(experiment.config),
        "examples": describe_examples(experiment),
    }
    return WireMessage({**header, "kind": "ping"}, {})


def test_the_daemon_serves_the_next_message_and_ends_with_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = read_site(write_site(tmp_path, "site", (0, 1)))
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(daemon_client.os, "getppid", lambda: owner.pid)
    started: list[subprocess.Popen[bytes]] = []
    start = daemon_client.start_daemon

    def remember(file: Any) -> subprocess.Popen[bytes]:
        started.append(start(file))
        return started[-1]

    monkeypatch.setattr(daemon_client, "start_daemon", remember)
    try:
        first, second = (handle(site, ping()).header for _ in range(2))
        assert first["sizes"] == second["sizes"]
        assert first["clients_here"] == [0, 1]
        assert len(started) == 1
    finally:
        owner.kill()
        owner.wait()
    assert started[0].wait(20) == 0


def test_without_a_daemon_the_response_is_the_same(tmp_path: Path) -> None:
    site = read_site(
        write_site(
            tmp_path, "site", (0, 1), compute={"device": "cpu", "threads": 1, "daemon": False}
        )
    )
    assert handle(site, ping()).header["clients_here"] == [0, 1]


def test_a_message_imports_nothing_heavy() -> None:
    """Flower starts a new process for every message, and importing torch takes seconds."""
    code = (
        "import sys, remanence.flower.client_app, remanence.flower.daemon_client;"
        " print('torch' in sys.modules, 'scipy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_node_without_a_site_file_raises_an_error() -> None:
    with pytest.raises(Exception, match="started without a site file"):
        find_site({})


def test_a_message_survives_flower_and_damage_is_declined(tmp_path: Path) -> None:
    pytest.importorskip(
        "flwr", reason="the package flwr is not installed (the extra remanence-fl[flower])"
    )
    import numpy as np
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    from remanence.flower.transport import from_record, to_record

    message = WireMessage(
        {"kind": "train"},
        {"mine": np.arange(3.0)},
        {"start": np.zeros((2, 2), dtype=np.float32), "n": np.array(4)},
    )
    back = from_record(to_record(message))
    assert back.header == message.header
    assert {name: array.tolist() for name, array in back.shared_arrays.items()} == {
        "start": [[0, 0], [0, 0]],
        "n": 4,
    }
    assert back.site_arrays["mine"].tolist() == [0, 1, 2]
    damaged = Array("float64", (3,), "numpy.ndarray", b"no array at all")
    disguised = RecordDict(
        {
            "header": to_record(message).config_records["header"],
            "site_arrays": ArrayRecord({"float64": damaged}),
        }
    )
    for content in (
        RecordDict({}),
        RecordDict({"header": ConfigRecord({"text": "{}"})}),
        disguised,
    ):
        answer = answer_message(content, {"site": str(tmp_path / "site.toml")})
        assert answer.header["kind"] == "declined"
