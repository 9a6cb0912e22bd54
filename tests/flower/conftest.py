"""One federation of processes for all tests of a file: a SuperLink and three SuperNodes on
loopback, with TLS and node authentication.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import ENVIRONMENT, Harness
from in_process import write_site

from remanence.flower.processes import Federation


# one per file: its processes poll several times a second, which would slow other tests down
@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    pytest.importorskip(
        "flwr", reason="the package flwr is not installed (the extra remanence-fl[flower])"
    )
    folder = tmp_path_factory.mktemp("federation")
    federation = Federation(folder, environment=ENVIRONMENT)
    sites = {
        f"site-{number}": write_site(folder, f"site-{number}", range(2 * number, 2 * number + 2))
        for number in range(3)
    }
    try:
        federation.start()
        for name, path in sites.items():
            federation.add_site(name, path)
        yield Harness(folder, federation, sites)
    finally:
        federation.stop()
