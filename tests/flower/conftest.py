"""One federation for all tests of a file that need processes: a SuperLink and three SuperNodes
on loopback, with TLS and authentication of nodes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ground import FAST, Ground
from indoors import write_site

from remanence.flower.processes import Federation


# its processes look for work several times a second: not beside the rest of the tests
@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    pytest.importorskip(
        "flwr", reason="the package flwr is not installed (the extra remanence[flower])"
    )
    folder = tmp_path_factory.mktemp("federation")
    federation = Federation(folder, environment=FAST)
    sites = {
        f"site-{number}": write_site(folder, f"site-{number}", range(2 * number, 2 * number + 2))
        for number in range(3)
    }
    try:
        federation.start()
        for name, path in sites.items():
            federation.add_site(name, path)
        yield Ground(folder, federation, sites)
    finally:
        federation.stop()
