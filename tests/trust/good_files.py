"""A small valid input for every reader, from which fuzzing starts."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import torch
from pyarrow import parquet
from reports.conftest import write_comparison
from reports.rich_runs import write_peers_run, write_server_run

from remanence.attacks import parse_attacks
from remanence.config import parse_experiment, read_file
from remanence.core import expressions
from remanence.core.compose import parse_method
from remanence.core.files import sha256
from remanence.core.rng import Key
from remanence.core.types import ModelState
from remanence.data import PARTITIONS
from remanence.data.cifar import PIXELS, _read_binary, _read_python
from remanence.data.concepts import make_concepts
from remanence.data.dataset import ArrayDataset, DatasetSplit
from remanence.data.drift_schedules import DRIFT_SCHEDULES as DRIFTS
from remanence.data.image_folders import folder
from remanence.data.leaf_json import _read_file
from remanence.data.mnist_idx import read_idx
from remanence.data.pfllib import pfllib
from remanence.data.schedule_table import read_table
from remanence.data.svhn_mat import read_mat
from remanence.data.tables import table
from remanence.data.user_data import npz
from remanence.experiment.build import check_names
from remanence.experiment.system import parse_deadline, parse_speed
from remanence.methods import PARTS
from remanence.metrics.groups import group_runs
from remanence.metrics.summary_rows import make_row
from remanence.optimizers import LR_SCHEDULES, OPTIMIZERS
from remanence.peers.availability import parse_availability
from remanence.peers.topology import TOPOLOGIES
from remanence.reports.figures import FIGURES
from remanence.reports.summary_text import summarize_groups
from remanence.results.checkpoint import CheckpointStore
from remanence.results.checkpoint_codec import as_tree, to_bytes
from remanence.results.checkpoint_schema import check_schema
from remanence.results.manifest import MANIFEST, OWN, STATE, ClientFile, bound_to_state
from remanence.results.run import (
    COMPARISON,
    CONFUSIONS,
    EXAMPLES,
    EXPERIMENT,
    LEDGER,
    METRICS,
    PEERS,
    Comparison,
    Run,
)
from remanence.training.server_step import Server
from remanence.training.state import ClientModels, RunState

IMAGES = (np.arange(3 * PIXELS) % 251).astype(np.uint8).reshape(3, PIXELS)


class Case(NamedTuple):
    """A valid file below a folder, and its reader. `place` maps the number of an input to the file
    that is mutated, where there are several.
    """

    write: Callable[[Path], list[Path]]  # writes all files; returns those to mutate
    read: Callable[[Path, int], object]  # (folder, number of the input)
    # after spoiling: what an attacker would do to pass a first check
    mend: Callable[[Path], None] = lambda path: None


def write_bytes(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


# ---------------------------------------------------------------------------------------- data sets


def write_idx(home: Path) -> list[Path]:
    content = bytes((0, 0, 8, 3)) + struct.pack(">3I", 3, 4, 5) + bytes(range(60))
    return [
        write_bytes(home / "plain", content),
        write_bytes(home / "packed.gz", gzip.compress(content, mtime=0)),
    ]


def read_both_idx(home: Path, number: int) -> None:
    for name in ("plain", "packed.gz"):
        read_idx(home / name, 3)


def write_cifar(home: Path) -> list[Path]:
    return [
        write_bytes(
            home / "batch.bin",
            b"".join(bytes((label,)) + IMAGES[label].tobytes() for label in range(3)),
        )
    ]


def write_pickle(home: Path) -> list[Path]:
    content = {b"data": IMAGES, b"labels": [0, 1, 2], b"batch_label": b"one"}
    return [
        write_bytes(home / f"batch-{protocol}", pickle.dumps(content, protocol=protocol))
        for protocol in (4, 5)
    ]


def read_pickles(home: Path, number: int) -> None:
    for path in home.iterdir():
        _read_python([path], 3, "labels", classes=10)


def write_mat(home: Path) -> list[Path]:
    from scipy.io import savemat

    home.mkdir(parents=True, exist_ok=True)
    content = {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([[1], [10]], np.uint8)}
    savemat(home / "plain.mat", content)
    savemat(home / "packed.mat", content, do_compression=True)
    return [home / "plain.mat", home / "packed.mat"]


def write_leaf(home: Path) -> list[Path]:
    image = [round(pixel / 784, 2) for pixel in range(784)]
    users = {"ann": {"x": [image], "y": [3]}, "bob": {"x": [image, image], "y": [1, 2]}}
    content = {"users": list(users), "num_samples": [1, 2], "user_data": users}
    return [write_bytes(home / "all.json", json.dumps(content).encode())]


def write_npz(home: Path) -> list[Path]:
    home.mkdir(parents=True, exist_ok=True)
    arrays = {
        "x": np.arange(48, dtype=np.uint8).reshape(12, 2, 2),
        "y": np.arange(12) % 3,
        "groups": np.array(list("abcabcabcabc")),
    }
    np.savez(home / "plain.npz", **arrays)
    np.savez_compressed(home / "packed.npz", **arrays)
    return [home / "plain.npz", home / "packed.npz"]


TABLE = "age,site,label\n" + "".join(f"{20 + i},{'ab'[i % 2]},{i % 3}\n" for i in range(12))


def write_parquet(home: Path) -> list[Path]:
    columns = {"age": list(range(12)), "site": ["a", "b"] * 6, "label": [0, 1, 2] * 4}
    parquet.write_table(pyarrow.table(columns), home / "table.parquet")
    return [home / "table.parquet"]


def write_pfllib(home: Path) -> list[Path]:
    files = []
    for part in ("train", "test"):
        (home / part).mkdir()
        for client in ("0", "1"):
            content = {"x": np.ones((4, 1, 3, 3), np.float32), "y": np.arange(4) % 2}
            np.savez(home / part / f"{client}.npz", data=content)
            files.append(home / part / f"{client}.npz")
    return files


def read_npzs(home: Path, number: int) -> None:
    for name in ("plain", "packed"):
        npz(None, path=str(home / f"{name}.npz"))


def write_images(home: Path) -> list[Path]:
    from PIL import Image

    written = []
    for place, (kind, suffix) in enumerate(
        (("PNG", "png"), ("JPEG", "jpg"), ("BMP", "bmp"), ("WEBP", "webp"), ("PPM", "ppm"))
    ):
        file = io.BytesIO()
        pixels = (np.arange(6 * 5 * 3).reshape(6, 5, 3) * 3 % 256).astype(np.uint8)
        Image.fromarray(pixels).save(file, kind)
        written.append(
            write_bytes(
                home / ("cat" if place % 2 else "dog") / f"{place}.{suffix}", file.getvalue()
            )
        )
        write_bytes(
            home / ("cat" if place % 2 else "dog") / f"good-{place}.{suffix}", file.getvalue()
        )
    return written


# --------------------------------------------------------------------------- experiments and tables

EXPERIMENT_TEXT = """\
method = "fedprox(mu=0.1)+wsm"
rounds = 3
seed = 4
attack = "sign_flip(fraction=0.1)"
[data]
name = "digits"
partition = "dirichlet(alpha=0.1)"
validation = 0.2
augment = ["crop", "flip"]
[clients]
count = 5
sample = 0.5
availability = "random(offline=0.1)"
[local]
epochs = 2
optimizer = "sgd(lr=0.1, momentum=0.9)"
[round]
deadline = "quantile(share=0.8)"
max_norm = 10.0
"""


def read_experiment(home: Path, number: int) -> None:
    check_names(parse_experiment(read_file(home / "experiment.toml", allow_code=False)))


METHODS = (
    "fedprox(mu=0.1)+wsm", "scaffold+trimmed_mean(fraction=0.2)", "flashback+tce", "hast(peers=3, tau=30, depth=2)", "fedavg+krum(byzantine=1)",
    "feddrift(delta=0.1)", "fedadam(lr=0.01)+fedlc", "moon(mu=1.0, temperature=0.5)",
)  # fmt: skip
SOURCE = ArrayDataset(
    "small",
    "image",
    ("cat", "dog", "ant", "bee"),
    *(DatasetSplit(np.zeros((8, 1, 4, 4), np.uint8), np.arange(8) % 4) for _ in range(2)),
)
EXPRESSIONS: tuple[tuple[str, Callable[[str], Any]], ...] = (
    ("sign_flip(fraction=0.1)+backdoor(target=1, size=2, clients='3 7')", parse_attacks),
    ("label_flip(fraction=0.2, of=1, to='next')", parse_attacks),
    ("random(offline=0.2)", parse_availability),
    ("lognormal(sigma=0.5)", parse_speed),
    ("quantile(share=0.8)", parse_deadline),
    ("dirichlet_by_class(alpha=0.1, minimum=2)", lambda text: expressions.instantiate(expressions.parse_call(text), PARTITIONS, "partition")),
    ("shards(per_client=2)", lambda text: expressions.instantiate(expressions.parse_call(text), PARTITIONS, "partition")),
    ("random(clusters=2, sizes='70:30')", lambda text: expressions.instantiate(expressions.parse_call(text), DRIFTS, "drift")(6, 3, Key(0))),
    ("ring(neighbors=2)", lambda text: expressions.instantiate(expressions.parse_call(text), TOPOLOGIES, "topology")(6, Key(0))),
    ("sgd(lr=0.1, momentum=0.9)", lambda text: expressions.instantiate(expressions.parse_call(text), OPTIMIZERS, "optimizer")),
    ("cosine(final=0.1)", lambda text: expressions.instantiate(expressions.parse_call(text), LR_SCHEDULES, "schedule")),
    ('label(groups="0 1|2 3")', lambda text: make_concepts(text, 2, SOURCE)),
    ("swap(pairs='|0 1')+quantity(shares='1|0.5')", lambda text: make_concepts(text, 2, SOURCE)),
    ("rotate", lambda text: make_concepts(text, 2, SOURCE)),
)  # fmt: skip
TABLES = (
    "time_step,client,cluster\n0,0,0\n0,1,1\n1,0,1\n1,1,0\n",
    "0;1;0\n1;1;0\n",
    "0\t1\n\n1\t0\n",
)


# ---------------------------------------------------------------------------------- what runs leave


def small_state(round: int) -> RunState:
    """A state with two clients and every kind of content."""
    here, both = torch.full((2, 3), float(round)), torch.zeros(2, 2, 3)
    client_models = ClientModels(
        models=ModelState({"w": both}, {"n": torch.zeros(2, dtype=torch.int64)}),
        best=ModelState({"w": both}, {"n": torch.zeros(2, dtype=torch.int64)}),
        best_loss=torch.zeros(2, dtype=torch.float64),
        rounds_since_best=torch.zeros(2, dtype=torch.int64),
        early_stopped=torch.zeros(2, dtype=torch.bool),
        valid_accuracy=torch.zeros(2, dtype=torch.float64),
        peers={"part": {"similarity": torch.zeros(2, 2)}},
        peer_counts=torch.zeros(2, 2, dtype=torch.int64),
    )
    server = Server(ModelState({"w": here}, {"n": torch.tensor(round)}), {"part": {"m": here}})
    return RunState(round, 0, server, {0: {"part": {"kept": here}}}, client_models=client_models)


def write_checkpoints(home: Path) -> list[Path]:
    CheckpointStore(home / "checkpoints", "run").save(small_state(2))
    newest = home / "checkpoints" / "round-0000002"
    return [newest / MANIFEST, newest / STATE, next((home / "checkpoints" / OWN).iterdir())]


def mend_checkpoint(path: Path) -> None:
    """Give half of the mutated tensors a matching digest, so that they pass the first check."""
    content = path.read_bytes()
    if path.name == MANIFEST or sum(content[:64]) % 2:
        return
    manifest = path.parents[1] / "round-0000002" / MANIFEST
    entries = json.loads(manifest.read_text())
    state = path
    if path.name != STATE:
        entries["client_states"]["0"]["sha256"] = sha256(content)
        state = manifest.with_name(STATE)
        clients = {0: ClientFile(**entries["client_states"]["0"])}
        state.write_bytes(to_bytes(as_tree(small_state(2)), bound_to_state(2, 0, clients, ())))
    entries["files"][STATE] = sha256(state.read_bytes())
    manifest.write_text(json.dumps(entries))


def read_checkpoint(home: Path, number: int) -> None:
    CheckpointStore(home / "checkpoints", "run").load(
        torch.device("cpu"), lambda text: None, partial(check_schema, schema=small_state(0))
    )


def write_runs(home: Path) -> None:
    write_server_run(home / "server", rounds=3, clients=4, cohort=2)
    write_peers_run(home / "peers", rounds=2, steps=2, clients=4)


def write_ledgers(home: Path) -> list[Path]:
    write_runs(home)
    return [home / "server" / LEDGER, home / "peers" / LEDGER]


def write_other_records(home: Path) -> list[Path]:
    write_runs(home)
    return [
        home / "server" / CONFUSIONS,
        home / "peers" / PEERS,
        home / "server" / EXAMPLES,
        home / "peers" / PEERS,
    ]


def write_metrics(home: Path) -> list[Path]:
    write_runs(home)
    return [home / "server" / METRICS, home / "peers" / METRICS]


def write_facts(home: Path) -> list[Path]:
    write_runs(home)
    write_comparison(home / "compare", [{"method": "fedavg", "shares": [[0.5, 0.5]]}])
    return [
        home / "server" / EXPERIMENT,
        home / "compare" / COMPARISON,
        home / "peers" / EXPERIMENT,
    ]


def spoiled_runs(home: Path, number: int) -> tuple[str, ...]:
    """The run with the mutated file; all runs if no file is mutated."""
    runs = ("server", "compare", "peers") if (home / "compare").exists() else ("server", "peers")
    return runs if number < 0 else (runs[number % len(runs)],)


def read_runs(home: Path, number: int) -> None:
    """Read runs as a report does: table rows always; text and all figures sometimes, because they
    take longest.
    """
    for name in spoiled_runs(home, number):
        if name == "compare":
            comparison = Comparison(home / "compare")
            group_runs([comparison])
            assert all(home / "compare" in run.folder.resolve().parents for run in comparison.runs)
            continue
        run = Run(home / name)
        groups = group_runs([run])
        rows = [make_row(group) for group in groups]
        assert run.confusions is None or len(run.confusions) >= 0
        assert run.examples is None or len(run.examples) >= 0
        assert run.peers is None or len(run.peers) >= 0
        if number % 100 < 4:
            summarize_groups(groups, rows)
            for draw in FIGURES if number % 100 < 2 else ():
                draw(groups)


def read_ledgers(home: Path, number: int) -> None:
    """A report names a ledger that it cannot read and continues; reading the ledger itself raises
    an error.
    """
    read_runs(home, number)
    for name in ("server", "peers"):
        assert len(Run(home / name).ledger.records) >= 0


FILES: dict[str, Case] = {
    "IDX (MNIST, EMNIST)": Case(write_idx, read_both_idx),
    "CIFAR, binary": Case(
        write_cifar,
        lambda home, number: _read_binary(
            [home / "batch.bin"], 3, label_bytes=1, label_at=0, classes=10
        ),
    ),
    "CIFAR, pickled": Case(write_pickle, read_pickles),
    "MATLAB (SVHN)": Case(
        write_mat,
        lambda home, number: [read_mat(home / name) for name in ("plain.mat", "packed.mat")],
    ),
    "LEAF JSON": Case(write_leaf, lambda home, number: _read_file(home / "all.json", 10)),
    "NPZ": Case(write_npz, read_npzs),
    "NPZ of PFLlib": Case(write_pfllib, lambda home, number: pfllib(None, path=str(home))),
    "tables (CSV)": Case(
        lambda home: [write_bytes(home / "table.csv", TABLE.encode())],
        lambda home, number: table(None, path=str(home / "table.csv")),
    ),
    "tables (Parquet)": Case(
        write_parquet, lambda home, number: table(None, path=str(home / "table.parquet"))
    ),
    "folders of images": Case(
        write_images, lambda home, number: folder(None, path=str(home), size=8)
    ),
    "checkpoints": Case(write_checkpoints, read_checkpoint, mend_checkpoint),
    "ledger.bin": Case(write_ledgers, read_ledgers),
    "confusion.bin, examples.bin, peers.bin": Case(write_other_records, read_runs),
    "metrics.jsonl": Case(write_metrics, read_runs),
    "experiment.toml and compare.toml of a folder": Case(write_facts, read_runs),
    "experiment TOML": Case(
        lambda home: [write_bytes(home / "experiment.toml", EXPERIMENT_TEXT.encode())],
        read_experiment,
    ),
    "drift tables": Case(
        lambda home: [
            write_bytes(home / f"{place}.csv", text.encode()) for place, text in enumerate(TABLES)
        ],
        lambda home, number: [read_table(home / f"{place}.csv") for place in range(len(TABLES))],
    ),
}
TEXTS: dict[str, tuple[tuple[str, Callable[[str], Any]], ...]] = {
    "method expressions": tuple(
        (text, lambda spoiled: parse_method(spoiled, PARTS)) for text in METHODS
    ),
    "expressions of drift, attack, partition and the like": EXPRESSIONS,
}
