"""Sites with tables of their own for tests of what leaves them, and messages of a coordinator that
chooses its models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from in_process import InProcessTransport, make_site, run_in_process

from remanence.config import Experiment, parse_experiment
from remanence.flower.site import Site
from remanence.flower.wire import WireMessage

CLASSES, FEATURES = 3, 3
TRAIN, VALID, TEST = 18, 2, 10  # examples of a client; a tenth of 20 is for validation
DESCRIPTION = "sites(kind='table', shape='3', classes='a b c', mean='0 0 0', std='1 1 1')"
BIAS = "head.bias"


def make_config(method: str = "fedavg", **changes: Any) -> Experiment:
    settings = {
        "method": method,
        "data.name": DESCRIPTION,
        "clients.count": 2,
        "rounds": 1,
        "model": "mlp(hidden='4')",
        "local.batch_size": 4,
        "local.optimizer": "sgd(lr=0.1)",
        "device": "cpu",
        "precision": "fp64",
    }
    return parse_experiment({}, settings | changes)


def tables(client: int) -> dict[str, np.ndarray]:
    """A client's examples; the classes are not balanced."""
    draw = np.random.default_rng(client)
    rows = TRAIN + VALID
    return {
        "x": draw.normal(size=(rows, FEATURES)).astype(np.float32),
        "y": draw.choice(CLASSES, size=rows, p=[0.6, 0.3, 0.1]),
        "x_test": draw.normal(size=(TEST, FEATURES)).astype(np.float32),
        "y_test": draw.choice(CLASSES, size=TEST, p=[0.1, 0.2, 0.7]),
        "class_names": np.array(["a", "b", "c"]),
    }


def site_of(folder: Path, policy: dict[str, Any], **more: Any) -> Site:
    """A site with clients 0 and 1. The files stay as they are where there are any."""
    (folder / "ward").mkdir(parents=True, exist_ok=True)
    for client in (0, 1):
        path = folder / "ward" / f"{client}.npz"
        if not path.exists():
            np.savez(path, **tables(client))  # type: ignore[arg-type]
    data = {str(client): f"npz(path='{client}.npz')" for client in (0, 1)}
    return make_site(folder, "ward", (), policy, data=data, **more)


def record_training(folder: Path, config: Experiment | None = None) -> WireMessage:
    """The first training message of a real run, to a site that allows everything."""
    config = make_config() if config is None else config
    transport = InProcessTransport({1: site_of(folder, {"label_counts": True})})
    run_in_process(config, transport, folder / "run")
    return next(m for _, m in transport.sent if m.header["kind"] == "train")


def constant_models(training: WireMessage, wanted: int) -> dict[str, np.ndarray]:
    """A model that predicts one class for every example, as a stack of one."""
    arrays = {}
    for name, array in training.arrays.items():
        if name.startswith("start/"):
            arrays["models" + name.removeprefix("start")] = np.zeros((1, *array.shape))
    arrays[f"models/params/{BIAS}"][0, wanted] = 1.0
    return arrays


def score(training: WireMessage, split: str, wanted: int = 0, client: int = 0) -> WireMessage:
    """A request for counts of a constant model."""
    names = ("run", "experiment", "examples")
    header = {name: training.header[name] for name in names} | {
        "kind": "score",
        "split": split,
        "time_step": 0,
        "which": [0],
        "owners": [client],
    }
    return WireMessage(header, constant_models(training, wanted))
