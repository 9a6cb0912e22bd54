"""Every kind of message that a coordinator can send to a site, also ones that a site must decline:
for `remanence flower audit` and for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from remanence.core.engine import ClientWork
from remanence.core.rng import Key
from remanence.core.types import ClientStats, ModelState
from remanence.experiment.build import BuiltExperiment
from remanence.flower.array_codec import as_arrays
from remanence.flower.deployment import describe_examples, site_config
from remanence.flower.wire import WireArrays, WireMessage
from remanence.flower.work_header import work_header
from remanence.training.server_step import init_server, make_broadcast

RUN = "an-audited-run"


def make_requests(
    experiment: BuiltExperiment, clients: Sequence[int], foreign: int
) -> dict[str, WireMessage]:
    """The messages of a coordinator before and in the first two rounds.

    Args:
        experiment: As the coordinator builds it.
        clients: Clients of the site.
        foreign: A client of another site.

    Returns:
        By a name for the message. Each can be sent alone; "train again" repeats "train".
    """
    common: dict[str, Any] = {
        "run": RUN,
        "experiment": site_config(experiment.config),
        "examples": describe_examples(experiment),
    }
    first, second = (_training(experiment, common, clients, round) for round in (1, 2))
    models = as_arrays({"models": ModelState.stack([experiment.task.model.initial])._asdict()})

    def score(split: str, owners: Sequence[int]) -> WireMessage:
        header = {"split": split, "time_step": 0, "which": [0] * len(owners)}
        return WireMessage({**common, "kind": "score", **header, "owners": [*owners]}, models)

    def change(message: WireMessage, **header: Any) -> WireMessage:
        return message._replace(header={**message.header, **header})

    return {
        "ping": WireMessage({**common, "kind": "ping"}, {}),
        "train": first,
        "train again": first,
        "train and validate": change(second, validate=True),
        **{f"score {split}": score(split, clients) for split in ("train", "valid", "test")},
        "personal": change(first, kind="personal"),
        "train a client of another site": _training(experiment, common, [foreign], 1),
        "score a client of another site": score("valid", [foreign]),
        "score an unknown split": score("private", clients),
        "unknown kind": change(first, kind="read"),
        "unknown run": change(first, run="../elsewhere"),
        "no arrays": first._replace(site_arrays={}, shared_arrays={}),
        "no experiment": WireMessage({"kind": "ping"}, {}),
    }


def _training(
    experiment: BuiltExperiment, common: dict[str, Any], clients: Sequence[int], round: int
) -> WireMessage:
    task, count = experiment.task, len(clients)
    key, server = Key(experiment.config.seed), init_server(task)
    stacked = experiment.is_decentralized
    work = ClientWork(
        round=round,
        time_step=0,
        clients=np.array(clients, dtype=np.int64),
        start=ModelState.stack([server.model] * count) if stacked else server.model,
        per_client_start=stacked,
        broadcast={} if stacked else make_broadcast(task, server, round, key),
        client_state={},
        stats=ClientStats(torch.zeros(count), torch.zeros(count, task.info.num_classes)),
        optimizer_hparams=experiment.optimizer_hparams(round),
        key=key.fold_in("round", round),
    )
    arrays: WireArrays = as_arrays({"start": work.start._asdict(), "broadcast": work.broadcast})
    header = work_header(work, np.arange(count)) | {"validate": False}
    return WireMessage({**common, "kind": "train", **header}, arrays)
