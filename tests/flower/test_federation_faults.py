"""More faults with real processes. They take minutes, because Flower itself takes more than one
to notice that a node is dead.
"""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from ground import PATIENCE, Ground, count_lines, lean, wait_until
from states import assert_equals_loop

from remanence.flower.certificates import make_certificates, make_site_key
from remanence.results.run import Run

pytestmark = [pytest.mark.xdist_group("flower"), pytest.mark.slow, pytest.mark.timeout(900)]
WHOLE = {"clients.sample": 6}


def start_again(ground: Ground, name: str) -> None:
    """As a supervisor would: until Flower lets the node in again."""

    def is_in() -> bool:
        process = ground.federation.processes.get(name)
        if process is None or process.poll() is not None:
            ground.federation.start_site(name, ground.sites[name])
        return "SuperNode ID" in ground.federation.log(name).read_text(errors="replace")[before:]

    before = ground.federation.log(name).stat().st_size
    wait_until(is_in, 240, f"{name} is let in again")


@pytest.fixture
def all_sites(ground: Ground) -> Ground:
    """The shared federation with all its sites; another test may have ended one."""
    for name in ground.sites:
        if (
            name not in ground.federation.processes
            or ground.federation.processes[name].poll() is not None
        ):
            start_again(ground, name)
    return ground


def test_a_killed_site_comes_back_and_gets_its_work_again(
    all_sites: Ground, tmp_path: Path
) -> None:
    """No deadline: round 2 waits for it. Its clients' last models are on its disk, so the end
    is the same as on one machine.
    """
    ground, spec = all_sites, lean("fedwavg", 3, **WHOLE)
    app = ground.prepare({"experiment": spec})
    running = ground.federation.run(
        app,
        "join_timeout=90 reply_timeout=300 ping_after=20 gone_after=280",
        name="killed-and-back",
    )
    wait_until(lambda: count_lines(ground.out(app) / "metrics.jsonl") == 1, 150, "round 1 ends")
    ground.federation.end("site-1", signal.SIGKILL)
    start_again(ground, "site-1")
    running.wait(300)
    assert_equals_loop(Run(ground.out(app)), spec, tmp_path, 1e-10)


def test_a_hung_site_is_left_alone_until_it_answers(all_sites: Ground) -> None:
    ground, spec = all_sites, lean("fedavg", 8, **WHOLE, **{"round.deadline": "20"})
    app = ground.prepare({"experiment": spec})
    running = ground.federation.run(app, PATIENCE, name="hung")
    wait_until(lambda: count_lines(ground.out(app) / "metrics.jsonl") == 1, 150, "round 1 ends")
    node = psutil.Process(ground.federation.processes["site-2"].pid)
    hung = [node, *node.children(recursive=True)]
    for process in hung:
        process.suspend()
    try:
        wait_until(
            lambda: count_lines(ground.out(app) / "metrics.jsonl") >= 2,
            150,
            "round 2 ends without it",
        )
    finally:
        for process in hung:
            process.resume()
    running.wait(400)
    run = Run(ground.out(app))
    assert run.metrics[1]["replies"] == 4
    assert [(refused["client"], refused["code"]) for refused in run.metrics[1]["rejected"]] == [
        (4, "no-answer"),
        (5, "no-answer"),
    ]
    assert run.metrics[-1]["replies"] == 6
    assert "site site-2 did not answer in 20 s: it is left alone" in ground.log(app)
    assert "site site-2 is back with clients 4, 5" in ground.log(app)


def test_a_site_with_a_new_key_and_node_id_goes_on_with_its_state(
    all_sites: Ground, tmp_path: Path
) -> None:
    ground, spec = all_sites, lean("scaffold", 3, **WHOLE)
    app = ground.prepare({"experiment": spec})
    running = ground.federation.run(
        app, "join_timeout=90 reply_timeout=300 ping_after=20 gone_after=280", name="another-key"
    )
    wait_until(lambda: count_lines(ground.out(app) / "metrics.jsonl") == 1, 150, "round 1 ends")
    ground.federation.end("site-0")
    for half in (ground.folder / "keys").glob("site-0.key*"):
        half.unlink()
    ground.federation.add_site("site-0", ground.sites["site-0"])
    running.wait(300)
    log = ground.log(app)
    nodes = {
        line.rpartition("(node ")[2].rstrip(")")
        for line in log.splitlines()
        if "site site-0 is " in line
    }
    assert len(nodes) == 2, log
    assert_equals_loop(Run(ground.out(app)), spec, tmp_path, 1e-10)


def test_a_node_that_is_not_registered_is_not_let_in(all_sites: Ground) -> None:
    ground = all_sites
    ground.federation.add_site("stranger", ground.sites["site-0"], register=False)
    assert ground.federation.processes["stranger"].wait(90) != 0
    assert "Exit Code: 305" in ground.federation.log("stranger").read_text(errors="replace")
    del ground.federation.processes["stranger"]


def test_a_node_does_not_talk_to_a_link_with_a_wrong_certificate(
    all_sites: Ground, tmp_path: Path
) -> None:
    """It trusts another authority: it must not even say who it is."""
    ground = all_sites
    make_certificates(tmp_path, ["127.0.0.1"])
    make_site_key(ground.folder / "keys", "careful")
    ground.federation.register("careful")
    ground.federation.start_site("careful", ground.sites["site-0"], root=tmp_path / "ca.crt")
    refused = ("CERTIFICATE_VERIFY_FAILED", "Connection attempt failed", "Exit Code")
    log = ground.federation.log("careful")
    wait_until(
        lambda: any(word in log.read_text(errors="replace") for word in refused),
        90,
        "it refuses to connect",
    )
    assert "SuperNode ID" not in log.read_text(errors="replace")
    ground.federation.end("careful")
