"""More faults with real processes. They take minutes, because Flower needs more than one to notice
that a node was killed.
"""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from harness import TIMEOUTS, Harness, count_lines, lean, wait_until
from run_states import assert_equals_sequential

from remanence.flower.certificates import make_certificates, make_site_key
from remanence.results.run import Run

pytestmark = [pytest.mark.xdist_group("flower"), pytest.mark.slow, pytest.mark.timeout(900)]
ALL_CLIENTS = {"clients.sample": 6}


def restart(harness: Harness, name: str) -> None:
    """Restart a SuperNode until Flower lets it in, as a supervisor would."""

    def is_connected() -> bool:
        process = harness.federation.processes.get(name)
        if process is None or process.poll() is not None:
            harness.federation.start_site(name, harness.sites[name])
        return "SuperNode ID" in harness.federation.log(name).read_text(errors="replace")[before:]

    before = harness.federation.log(name).stat().st_size
    wait_until(is_connected, 240, f"{name} is let in again")


@pytest.fixture
def all_sites(harness: Harness) -> Harness:
    """The federation with all its sites; another test may have ended one."""
    for name in harness.sites:
        if (
            name not in harness.federation.processes
            or harness.federation.processes[name].poll() is not None
        ):
            restart(harness, name)
    return harness


def test_a_killed_site_comes_back_and_gets_its_work_again(
    all_sites: Harness, tmp_path: Path
) -> None:
    """Without a deadline round 2 waits for it. Its clients' last models are on its disk, so the
    result is that of one machine.
    """
    harness, config = all_sites, lean("fedwavg", 3, **ALL_CLIENTS)
    app = harness.prepare({"experiment": config})
    running = harness.federation.run(
        app,
        "join_timeout=90 reply_timeout=300 ping_after=20 gone_after=280",
        name="killed-and-back",
    )
    wait_until(lambda: count_lines(harness.out(app) / "metrics.jsonl") == 1, 150, "round 1 ends")
    harness.federation.end("site-1", signal.SIGKILL)
    restart(harness, "site-1")
    running.wait(300)
    assert_equals_sequential(Run(harness.out(app)), config, tmp_path, 1e-10)


def test_a_hung_site_gets_no_work_until_it_responds(all_sites: Harness) -> None:
    harness, config = all_sites, lean("fedavg", 8, **ALL_CLIENTS, **{"round.deadline": "20"})
    app = harness.prepare({"experiment": config})
    running = harness.federation.run(app, TIMEOUTS, name="hung")
    wait_until(lambda: count_lines(harness.out(app) / "metrics.jsonl") == 1, 150, "round 1 ends")
    node = psutil.Process(harness.federation.processes["site-2"].pid)
    hung = [node, *node.children(recursive=True)]
    for process in hung:
        process.suspend()
    try:
        wait_until(
            lambda: count_lines(harness.out(app) / "metrics.jsonl") >= 2,
            150,
            "round 2 ends without it",
        )
    finally:
        for process in hung:
            process.resume()
    running.wait(400)
    run = Run(harness.out(app))
    assert run.metrics[1]["replies"] == 4
    assert [
        (rejection["client"], rejection["code"]) for rejection in run.metrics[1]["rejected"]
    ] == [
        (4, "no-answer"),
        (5, "no-answer"),
    ]
    assert run.metrics[-1]["replies"] == 6
    assert "site site-2 did not respond in 20 s: it gets no work" in harness.log(app)
    assert "site site-2 is back with clients 4, 5" in harness.log(app)


def test_a_site_with_a_new_key_and_node_id_keeps_its_state(
    all_sites: Harness, tmp_path: Path
) -> None:
    harness, config = all_sites, lean("scaffold", 3, **ALL_CLIENTS)
    app = harness.prepare({"experiment": config})
    running = harness.federation.run(
        app, "join_timeout=90 reply_timeout=300 ping_after=20 gone_after=280", name="another-key"
    )
    wait_until(lambda: count_lines(harness.out(app) / "metrics.jsonl") == 1, 150, "round 1 ends")
    harness.federation.end("site-0")
    for half in (harness.folder / "keys").glob("site-0.key*"):
        half.unlink()
    harness.federation.add_site("site-0", harness.sites["site-0"])
    running.wait(300)
    log = harness.log(app)
    nodes = {
        line.rpartition("(node ")[2].rstrip(")")
        for line in log.splitlines()
        if "site site-0 joined" in line or "site site-0 is back" in line
    }
    assert len(nodes) == 2, log
    assert_equals_sequential(Run(harness.out(app)), config, tmp_path, 1e-10)


def test_a_node_that_is_not_registered_is_not_let_in(all_sites: Harness) -> None:
    harness = all_sites
    harness.federation.add_site("stranger", harness.sites["site-0"], register=False)
    assert harness.federation.processes["stranger"].wait(90) != 0
    assert "Exit Code: 305" in harness.federation.log("stranger").read_text(errors="replace")
    del harness.federation.processes["stranger"]


def test_a_node_does_not_connect_to_a_wrong_certificate(all_sites: Harness, tmp_path: Path) -> None:
    """It trusts another authority, so it must not authenticate."""
    harness = all_sites
    make_certificates(tmp_path, ["127.0.0.1"])
    make_site_key(harness.folder / "keys", "careful")
    harness.federation.register("careful")
    harness.federation.start_site("careful", harness.sites["site-0"], root=tmp_path / "ca.crt")
    refused = ("CERTIFICATE_VERIFY_FAILED", "Connection attempt failed", "Exit Code")
    log = harness.federation.log("careful")
    wait_until(
        lambda: any(word in log.read_text(errors="replace") for word in refused),
        90,
        "it refuses to connect",
    )
    assert "SuperNode ID" not in log.read_text(errors="replace")
    harness.federation.end("careful")
