"""Small files that ask for much memory: every reader refuses them with a sentence before it allocates
anything large. Limits are set small, so that the tests are fast; the checks are the same.
"""

from __future__ import annotations

import gzip
import io
import json
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rounds.test_resume import seeded_net, small_config
from trust.mutations import bounded

from remanence import exports
from remanence.cli.main import app
from remanence.config import parse_experiment
from remanence.core.errors import InputError, RemanenceError
from remanence.core.rng import Key
from remanence.data import from_dataset, load_dataset, npz_reader
from remanence.data.leaf_json import _read_file
from remanence.data.mnist_idx import read_idx
from remanence.data.restricted_pickle import read_plain_pickle
from remanence.data.schedule_table import read_table
from remanence.data.svhn_mat import read_mat
from remanence.experiment.data_setup import load_data
from remanence.peers.topology import TOPOLOGIES
from remanence.recipes.outcomes import OUTCOME, read_outcome
from remanence.results.checkpoint import MANIFEST, OWN, STATE
from remanence.results.ledger import Ledger
from remanence.results.readers import read_lines
from remanence.results.run import CHECKPOINTS, EXPERIMENT, LEDGER, METRICS, Run
from remanence.rounds.loop import resume_run, start_run

MIB = 1 << 20
LIMIT = 24 * MIB


@pytest.fixture(autouse=True)
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMANENCE_MAX_BYTES", str(LIMIT))


@contextmanager
def refused(
    match: str = r"takes .* of memory", error: type[RemanenceError] = InputError
) -> Iterator[None]:
    """The sentence comes, and no more than the limit has been allocated."""
    tracemalloc.start()
    try:
        with bounded() as begin:
            begin()
            with pytest.raises(error, match=match):
                yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < LIMIT, f"{peak / MIB:.0f} MiB were allocated"


def member(shape: tuple[int, ...], dtype: str, count: int) -> bytes:
    """An array of zeros as an .npy file."""
    head = io.BytesIO()
    about = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, about)
    return head.getvalue() + bytes(count * np.dtype(dtype).itemsize)


def write_npz(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


def read(path: Path) -> Any:
    return load_dataset("npz", {"path": str(path)}, None)


ROWS = 100
Y = member((ROWS,), "|i1", ROWS)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        # ten million bytes that become floats
        (member((ROWS, 100_000), "|u1", ROWS * 100_000), Y),
        # ten million that become tokens
        (member((ROWS, 50_000), "<u2", ROWS * 50_000), Y),
        # floats of images, which are scaled in two copies
        (member((ROWS, 1, 110, 200), "<f4", ROWS * 22_000), Y),
        # half a million labels of a byte
        (member((500_000, 1), "|u1", 500_000), member((500_000,), "|i1", 500_000)),
        # more than all of it
        (member((ROWS, 300_000), "|u1", ROWS * 300_000), Y),
    ],
    ids=["table", "tokens", "images", "labels", "arrays"],
)
def test_arrays_that_grow_when_they_are_converted(tmp_path: Path, x: bytes, y: bytes) -> None:
    path = write_npz(tmp_path / "small.npz", x=x, y=y)
    assert path.stat().st_size < 100_000
    with refused(r"small\.npz takes .* REMANENCE_MAX_BYTES allows 24\.0 MiB: raise"):
        read(path)


def test_one_long_group_name_makes_all_of_them_long(tmp_path: Path) -> None:
    x = member((5000, 2), "|u1", 10_000)
    y = member((5000,), "|i1", 5000)
    path = write_npz(
        tmp_path / "groups.npz", x=x, y=y, groups=member((5000,), "<U1", 5000),
        x_test=member((1, 2), "|u1", 2), y_test=member((1,), "|i1", 1), groups_test=member((1,), "<U5000", 1),
    )  # fmt: skip
    with refused(r"takes .* of it for the groups"):
        read(path)


def test_class_names_without_end(tmp_path: Path) -> None:
    names = member((1_000_000,), "|b1", 1_000_000)
    x = member((ROWS, 2), "|u1", 2 * ROWS)
    with refused("at most 100000 class names, found 1000000"):
        read(write_npz(tmp_path / "names.npz", x=x, y=Y, class_names=names))


def test_a_text_without_characters_has_no_rows_either(tmp_path: Path) -> None:
    """Zero bytes hold any number of empty texts."""
    x = member((ROWS, 2), "|u1", 2 * ROWS)
    path = write_npz(tmp_path / "empty.npz", x=x, y=Y, class_names=member((10**8,), "<U0", 0))
    with refused("of plain numbers or text, found type <U0"):
        read(path)


def test_a_header_is_bounded_before_it_is_read(tmp_path: Path) -> None:
    header = b"\x93NUMPY\x02\x00" + struct.pack("<I", 64 * MIB) + b" " * (64 * MIB)
    with refused(r"in numpy's format, found something else \(a header of 67108864 bytes\)"):
        read(write_npz(tmp_path / "header.npz", x=header, y=Y))


def test_a_list_of_many_members_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "many.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(5000):
            archive.writestr(f"{number}.npy", b"")
    with refused(r"a list of a few arrays, found one of \d+ bytes"):
        npz_reader.read_npz(path)


@pytest.mark.parametrize("which", ["x", "groups"])
def test_what_reading_takes_is_what_was_stated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    stated = []
    monkeypatch.setattr(
        npz_reader, "check_memory", lambda thing, parts: stated.append(sum(parts.values()))
    )
    rows = 2000
    x = np.linspace(0, 1, rows * 600, dtype=np.float32).reshape(rows, 20, 30)
    groups = {"groups": np.array([f"g{row:040d}" for row in range(rows)])}
    path = tmp_path / "known.npz"
    np.savez(path, x=x if which == "x" else x[:, 0, :2], y=np.arange(rows) % 3, **groups if which == "groups" else {})  # fmt: skip
    read(path)  # what it imports takes memory once
    tracemalloc.start()
    try:
        read(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert stated[0] / 3 < peak < stated[0]


def test_labels_of_idx_files(tmp_path: Path) -> None:
    folder = tmp_path / "mnist"
    folder.mkdir()
    count = 400_000
    for part in ("train", "t10k"):
        images = bytes((0, 0, 8, 3)) + struct.pack(">3I", count, 1, 1) + bytes(count)
        labels = bytes((0, 0, 8, 1)) + struct.pack(">I", count) + bytes(count)
        for name, raw in (("images-idx3", images), ("labels-idx1", labels)):
            (folder / f"{part}-{name}-ubyte.gz").write_bytes(gzip.compress(raw))
    with refused(r"mnist takes .* of it for the labels"):
        load_dataset("mnist", {}, tmp_path)


def sparse(path: Path, size: int, begin: bytes = b"") -> Path:
    """A file with holes: it has no blocks on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(begin)
        file.truncate(size)
    return path


@pytest.mark.parametrize("names", ["data_batch_{}.bin", "data_batch_{}"])
def test_cifar(tmp_path: Path, names: str) -> None:
    binary = names.endswith(".bin")
    folder = tmp_path / ("cifar-10-batches-bin" if binary else "cifar-10-batches-py")
    for number in range(1, 6):
        sparse(folder / names.format(number), 30_730_000)
    sparse(folder / ("test_batch.bin" if binary else "test_batch"), 30_730_000)
    with refused(r"cifar-10-batches-\w+ takes"):
        load_dataset("cifar10", {}, tmp_path)


def test_matlab_files(tmp_path: Path) -> None:
    """An element that declares and holds 64 MiB, in 64 KiB, is not unpacked."""
    content = struct.pack("<2I", 14, 64 * MIB) + bytes(64 * MIB)
    packed = zlib.compress(content)
    path = tmp_path / "train_32x32.mat"
    path.write_bytes(
        b"MATLAB".ljust(124) + b"\x00\x01IM" + struct.pack("<2I", 15, len(packed)) + packed
    )
    with refused(r"train_32x32\.mat takes"):
        read_mat(path)
    with refused(r"train_32x32\.mat takes"):
        read_mat(sparse(path, 10**11))


@pytest.mark.parametrize(
    "text",
    [
        '{"users": [' + ",".join(["[]"] * 300_000) + "]}",
        '{"users": ["a"], "hierarchies": [{"a": ' + ",".join(["[]"] * 300_000) + "]}",
        '{"user_data": {"a": {"x": [' + ",".join(["[0]"] * 250_000) + '], "y": []}}}',
        '{"user_data": {"a": {"y": [' + ",".join(["{}"] * 300_000) + "]}}}",
        "{[" + ",".join(["[]"] * 400_000) + "]: 1}",
    ],
    ids=["lists", "in an object", "images", "labels", "a name"],
)
def test_nested_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "all_data_0.json"
    path.write_text(text)
    with refused(r"all_data_0\.json takes .* several smaller files|no name at character 1"):
        _read_file(path, 62)


def test_a_character_that_makes_a_text_four_times_as_large(tmp_path: Path) -> None:
    path = tmp_path / "all_data_0.json"
    path.write_text('{"\U0001f600": "' + "a" * (5 * MIB) + '"}', encoding="utf-8")
    with refused(r"all_data_0\.json takes 30\.0 MiB .* its text"):
        _read_file(path, 62)


def test_a_few_images_of_many_pixels(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(4):
            Image.new("RGB", (900, 900)).save(tmp_path / name / f"{number}.png")
    with refused(r"reading 8 images such as .* give a smaller size"):
        load_dataset("folder", {"path": str(tmp_path)}, None)


@pytest.mark.parametrize("begin", [b"RIFF\xf8\xff\xff\x03WEBPVP8 ", b"P6\n1 1\n255\n"])
def test_an_image_file_that_is_read_when_it_is_opened(tmp_path: Path, begin: bytes) -> None:
    for name in ("a", "b"):
        sparse(tmp_path / name / "0.webp", 64 * MIB, begin)
    with refused(r"reading 2 images such as .* decoding one"):
        load_dataset("folder", {"path": str(tmp_path), "size": 8}, None)


IDX = bytes((0, 0, 8, 3)) + struct.pack(">3I", 100_000, 1000, 1000)


@pytest.mark.parametrize(
    ("name", "begin", "read_file"),
    [
        ("images", IDX, lambda path: read_idx(path, 3)),
        ("users.json", b"{", lambda path: _read_file(path, 62)),
        ("extra_32x32.mat", b"MATLAB", read_mat),
        ("data_batch_1", b"\x80\x02", lambda path: read_plain_pickle(path, 1 << 50)),
        ("arrays.npz", b"PK\x03\x04", npz_reader.read_npz),
        ("edges.csv", b"0,1\n", lambda path: TOPOLOGIES["edges"](path=str(path))(2, Key(0))),
        ("drift.csv", b"0,1\n", read_table),
        ("ledger.bin", b"{}\n", Ledger.read),
        ("metrics.jsonl", b"{}\n", read_lines),
    ],
)
def test_a_file_of_100_gigabytes_that_takes_no_disk(
    tmp_path: Path, name: str, begin: bytes, read_file: Callable[[Path], Any]
) -> None:
    with refused(r"takes .* of memory|a complete \.npz file|larger than 64000000 bytes"):
        read_file(sparse(tmp_path / name, 100 * 10**9 + len(IDX), begin))


def test_tables_and_edges_of_text(tmp_path: Path) -> None:
    table = tmp_path / "drift.csv"
    table.write_text(",".join(["0"] * 500_000))  # half a million columns
    with refused(r"the drift table .*drift\.csv takes"):
        read_table(table)
    edges = tmp_path / "edges.csv"
    edges.write_text("0,1\n" * 300_000)
    with refused(r"edges\.csv takes"):
        TOPOLOGIES["edges"](path=str(edges))(2, Key(0))


@pytest.mark.parametrize(
    "name",
    [
        "synthetic(samples=1000000000)",
        "synthetic(samples=1000, features=1000000)",
        "synthetic(samples=600000, classes=100000, features=1)",
        "synthetic(samples=100, shape='3x9999x9999')",
        "synthetic(samples=1000, classes=100, features=100000, test=0.5)",
        "tokens(samples=1000000000)",
        "tokens(samples=1000, classes=10, vocabulary=1000000)",
    ],
)
def test_generated_data(name: str) -> None:
    with refused(r"dataset '\w+' takes .* give fewer samples, classes or columns or (raise|use)"):
        load_data(parse_experiment({}, {"data.name": name, "data.max_bytes": LIMIT}))


class Endless(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 10**12

    def __getitem__(self, row: int) -> Any:
        return torch.zeros(3, 32, 32, dtype=torch.uint8), 0


def test_a_dataset_that_says_it_is_long() -> None:
    with refused("dataset 'dataset' takes .* of it for the examples"):
        from_dataset(Endless())


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    folder = tmp_path / "run"
    with monkeypatch.context() as context:
        context.delenv("REMANENCE_MAX_BYTES")
        start_run(small_config(rounds=2), folder, module=seeded_net())
    return Run(folder)


@pytest.mark.parametrize("name", [STATE, MANIFEST])
def test_checkpoints_with_holes(run: Run, name: str) -> None:
    newest = sorted((run.folder / CHECKPOINTS).glob("round-*"))[-1]
    path = newest / name
    sparse(path, 64 * MIB, path.read_bytes())
    with refused(rf"reading .*{'manifest' if name == MANIFEST else 'round-'}.* takes"):
        resume_run(run.folder, rounds=4, module=seeded_net())
    with refused(r"reading .* takes"):
        exports.evaluate(run, module=seeded_net())


def test_a_folder_sets_no_limit_for_its_own_files(run: Run) -> None:
    text = (run.folder / EXPERIMENT).read_text()
    assert text.count("max_bytes = 0\n") == 1
    (run.folder / EXPERIMENT).write_text(text.replace("max_bytes = 0\n", "max_bytes = 1e18\n"))
    state = sorted((run.folder / CHECKPOINTS).glob("round-*"))[-1] / STATE
    content = state.read_bytes()
    sparse(state, 64 * MIB, content)
    with refused(r"reading .* REMANENCE_MAX_BYTES allows 24\.0 MiB"):
        resume_run(run.folder, rounds=4, module=seeded_net())
    state.write_bytes(content)  # and the setting is no part of the run's identity
    assert resume_run(run.folder, rounds=4, module=seeded_net()).finished


def test_one_file_that_a_checkpoint_names_for_many_clients(run: Run) -> None:
    newest = sorted((run.folder / CHECKPOINTS).glob("round-*"))[-1]
    own = run.folder / CHECKPOINTS / OWN / "client-0000000.round-0000002.safetensors"
    own.parent.mkdir(exist_ok=True)
    own.write_bytes(bytes(MIB))
    manifest = json.loads((newest / MANIFEST).read_text())
    entry = {"file": own.name, "sha256": "0" * 64}
    manifest["client_states"] = {str(client): entry for client in range(1000)}
    (newest / MANIFEST).write_text(json.dumps(manifest))
    with refused(r"takes .* of it for the clients' states"):
        resume_run(run.folder, rounds=4, module=seeded_net())


def test_records_and_lines_of_a_run(run: Run) -> None:
    ledger = run.folder / LEDGER
    sparse(ledger, 64 * MIB, ledger.read_bytes())
    with refused(r"ledger\.bin takes"):
        Ledger.read(ledger)
    ledger.write_text('{"class_names": [' + ",".join(["[]"] * 200_000) + "]}\n")
    with refused(r"ledger\.bin takes"):
        Ledger.read(ledger)
    metrics = run.folder / METRICS
    metrics.write_text('{"round": 1, "rejected": [' + ",".join(["[]"] * 200_000) + "]}\n")
    with refused(r"metrics\.jsonl takes"):
        read_lines(metrics)


def test_a_folder_that_names_a_large_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    with monkeypatch.context() as context:
        context.delenv("REMANENCE_MAX_BYTES")
        start_run(small_config(rounds=1), folder)
    path = folder / EXPERIMENT
    lines = path.read_text().splitlines()
    at = next(place for place, line in enumerate(lines) if line.startswith("model = "))
    lines[at] = "model = \"mlp(hidden='99999,99999')\""
    path.write_text("\n".join(lines))
    with refused(r"run takes .* of it for its model"):
        exports.evaluate(Run(folder))


def test_tables_of_a_run(run: Run) -> None:
    (run.folder / EXPERIMENT).write_text("\n".join(f"[a{number}.b]" for number in range(30_000)))
    with refused(r"experiment\.toml takes"):
        Run(run.folder).config  # noqa: B018


def test_stored_outcomes(tmp_path: Path) -> None:
    (tmp_path / OUTCOME).write_text('{"numbers": [' + ",".join(["[]"] * 200_000) + "]}")
    with refused(r"outcome\.json takes"):
        read_outcome(tmp_path)


def test_the_command_says_how_to_allow_more(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "small.npz", x=member((ROWS, 100_000), "|u1", ROWS * 100_000), y=Y)
    command = ["run", "--data", str(path), "--out", str(tmp_path / "out"), "--set"]
    with pytest.raises(InputError):  # what it imports takes memory once
        app([*command, "data.max_bytes=2e7"], standalone_mode=False)
    with refused(
        r"takes 87\.\d MiB .* data\.max_bytes allows 19\.1 MiB: raise data\.max_bytes, such as"
        r" data\.max_bytes=9\.3e\+07"
    ):
        app([*command, "data.max_bytes=2e7"], standalone_mode=False)
