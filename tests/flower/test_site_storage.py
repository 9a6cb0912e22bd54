"""A site's files: the named state and the newest ones, and the replies to repeated requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from core.unsafe_files import assert_untouched, link_to_file, link_to_folder, make_outside, pipe

from remanence.core.errors import UnsafeFile
from remanence.flower.refusals import Declined
from remanence.flower.site_storage import REPLIES_A_ROUND, RUNS, SiteStorage
from remanence.flower.wire import WireMessage

RUN = "0123abcd-run"


def state_of(round: int) -> dict[str, object]:
    return {
        "scaffold": {
            "c": {
                "weight": torch.full((2,), float(round), dtype=torch.float64),
                "seen": torch.tensor(True),
            }
        }
    }


def test_a_state_comes_back_with_types_and_order(tmp_path: Path) -> None:
    SiteStorage(tmp_path, RUN).store(3, 1, state_of(1), -1)
    back = SiteStorage(tmp_path, RUN).load(3, 1)
    assert back is not None
    assert list(back["scaffold"]["c"]) == ["weight", "seen"]
    assert back["scaffold"]["c"]["weight"].dtype == torch.float64
    assert back["scaffold"]["c"]["seen"].dtype == torch.bool
    assert SiteStorage(tmp_path, RUN).load(3, 2) is None
    assert SiteStorage(tmp_path, "another-run").load(3, 1) is None


def test_the_named_state_stays_while_replies_are_not_used(tmp_path: Path) -> None:
    """Rounds 2 to 5 all start from round 1, because the coordinator used none of them: 1 and the two
    newest are kept.
    """
    storage = SiteStorage(tmp_path, RUN)
    storage.store(0, 1, state_of(1), -1)
    for round in (2, 3, 4, 5):
        storage.store(0, round, state_of(round), start_round=1)
    assert storage.rounds(0) == [1, 4, 5]
    storage.store(0, 6, state_of(6), start_round=5)
    assert storage.rounds(0) == [5, 6]


def test_a_damaged_state_is_a_lost_one(tmp_path: Path) -> None:
    storage = SiteStorage(tmp_path, RUN)
    storage.store(0, 1, state_of(1), -1)
    file = next(tmp_path.rglob("round-*.safetensors"))
    file.write_bytes(file.read_bytes()[:-3])
    assert storage.load(0, 1) is None


def test_a_repeated_request_gets_its_reply(tmp_path: Path) -> None:
    storage = SiteStorage(tmp_path, RUN)
    storage.store_reply(1, "a" * 64, WireMessage({"kind": "trained"}, {"w": np.arange(3.0)}))
    found = SiteStorage(tmp_path, RUN).find_reply(1, "a" * 64)
    assert found is not None
    assert found.arrays["w"].tolist() == [0, 1, 2]
    assert storage.find_reply(1, "b" * 64) is None


def test_old_replies_and_old_runs_go(tmp_path: Path) -> None:
    for number in range(RUNS + 3):
        storage = SiteStorage(tmp_path, f"run-number-{number:02d}")
        for round in (1, 2, 3):
            storage.store_reply(round, f"{round}" * 64, WireMessage({}, {}))
    assert len(list(tmp_path.iterdir())) == RUNS
    assert sorted(
        path.name[:13] for path in (tmp_path / f"run-number-{RUNS + 2:02d}").iterdir()
    ) == ["reply-0000002", "reply-0000003"]


def test_a_round_whose_replies_are_gone_is_declined(tmp_path: Path) -> None:
    """A repeated request of round 1 would be trained a second time. Round 2 may be requested again:
    a coordinator whose newest checkpoint is damaged continues from the one before.
    """
    storage = SiteStorage(tmp_path, RUN)
    for round in (1, 2, 3):
        storage.check_round(round)
        storage.store_reply(round, f"{round}" * 64, WireMessage({}, {}))
    for digest in ("a", "b", "c"):  # more requests of one round do not push out another round
        storage.store_reply(3, digest * 64, WireMessage({}, {}))
    assert storage.find_reply(2, "2" * 64) is not None
    storage.check_round(2)
    storage.check_round(3)
    with pytest.raises(Declined, match="keeps no reply of that round") as declined:
        storage.check_round(1)
    assert declined.value.code == "wrong-round"


def test_the_replies_of_one_round_are_bounded(tmp_path: Path) -> None:
    storage = SiteStorage(tmp_path, RUN)
    for number in range(REPLIES_A_ROUND + 3):
        storage.store_reply(1, f"{number:064d}"[::-1], WireMessage({}, {}))
    assert len(list((tmp_path / RUN).glob("reply-*"))) == REPLIES_A_ROUND


def test_the_files_of_a_run_belong_to_one_experiment(tmp_path: Path) -> None:
    SiteStorage(tmp_path, RUN, "a" * 64).store(0, 1, state_of(1), -1)
    assert SiteStorage(tmp_path, RUN, "a" * 64).load(0, 1) is not None
    with pytest.raises(Declined, match="has another experiment") as declined:
        SiteStorage(tmp_path, RUN, "b" * 64)
    assert declined.value.code == "wrong-run"
    SiteStorage(tmp_path, "another-run", "b" * 64)


@pytest.mark.parametrize("name", ["../../etc", "", "a/b", "A" * 10, "None"])
def test_a_run_cannot_name_another_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(Declined, match="not the name of a run"):
        SiteStorage(tmp_path, name)


USES: dict[str, Callable[[SiteStorage], object]] = {
    "load": lambda storage: storage.load(0, 1),
    "store": lambda storage: storage.store(0, 1, state_of(1), -1),
    "rounds": lambda storage: storage.rounds(0),
    "find_reply": lambda storage: storage.find_reply(1, "a" * 64),
    "store_reply": lambda storage: storage.store_reply(1, "a" * 64, WireMessage({}, {})),
}


@pytest.mark.parametrize("plant", [link_to_folder, pipe])
@pytest.mark.parametrize("use", USES)
def test_no_file_is_opened_through_a_link(
    tmp_path: Path, use: str, plant: Callable[[Path, Path], None]
) -> None:
    outside = make_outside(tmp_path / "outside")
    (tmp_path / "state").mkdir()
    plant(tmp_path / "state" / RUN, outside)
    with pytest.raises(UnsafeFile, match=f"{RUN} is a (link|named pipe) where a folder belongs"):
        USES[use](SiteStorage(tmp_path / "state", RUN))
    assert_untouched(outside)


@pytest.mark.parametrize("plant", [link_to_file, pipe])
@pytest.mark.parametrize("use", ["load", "store", "find_reply", "store_reply"])
def test_a_link_in_the_place_of_a_state_or_reply(
    tmp_path: Path, use: str, plant: Callable[[Path, Path], None]
) -> None:
    outside, storage = make_outside(tmp_path / "outside"), SiteStorage(tmp_path / "state", RUN)
    storage.store(0, 1, state_of(1), -1)
    storage.store_reply(1, "a" * 64, WireMessage({}, {}))
    for path in (tmp_path / "state").rglob("*.safetensors"):
        path.unlink()
        plant(path, outside)
    with pytest.raises(UnsafeFile, match=r"safetensors is a "):
        USES[use](storage)
    assert_untouched(outside)


def test_old_runs_are_not_deleted_through_links(tmp_path: Path) -> None:
    outside = make_outside(tmp_path / "outside")
    for number in range(RUNS + 3):
        storage = SiteStorage(tmp_path / "state", f"run-number-{number:02d}")
        storage.store_reply(1, "a" * 64, WireMessage({}, {}))
        if number == 0:
            (tmp_path / "state" / "run-number-aa").symlink_to(outside)
    assert (tmp_path / "state" / "run-number-aa").is_symlink()
    assert_untouched(outside)
