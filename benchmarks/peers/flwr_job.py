"""Flower: a ServerApp with the strategy FedAvg and a ClientApp, simulated by Ray, one client a
core; local training is the plain loop.
"""

from __future__ import annotations

import contextlib
import functools
import os
import traceback
from collections.abc import Iterable

from driver import PeerJob, Turns, begin, open_job
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn
from torch_job import Epochs, fit, make_model

ENDLESS = 1_000_000


@functools.cache
def hold_data(folder: str, client: int) -> Epochs:
    """A client's data stay with the worker that has seen them once."""
    return Epochs(open_job(folder), client)


@functools.cache
def hold_model(folder: str) -> nn.Module:
    """One network a worker, into which each message's weights are put."""
    return make_model(open_job(folder))


def train(message: Message, context: Context) -> Message:
    """What a client does with the model it is sent; runs in a worker of Ray."""
    # a worker gets this function without its module, where the caches have to live
    from flwr_job import hold_data, hold_model

    config = message.content["config"]
    folder, client = str(config["folder"]), int(config["client"])
    model, data = hold_model(folder), hold_data(folder, client)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    fit(model, open_job(folder), data)
    metrics = MetricRecord({"num-examples": len(data.y)})
    return Message(
        RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}),
        reply_to=message,
    )


class TakeTurns(FedAvg):
    """FedAvg whose messages say which client of the job a node plays, so that every round
    trains the same cohort.
    """

    def __init__(self, job: PeerJob, turns: Turns):
        super().__init__(
            fraction_train=len(job.cohort) / job.clients,
            fraction_evaluate=0.0,
            min_available_nodes=job.clients,
        )
        self._job, self._turns = job, turns

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._turns.wait()
        nodes = [
            message.metadata.dst_node_id
            for message in super().configure_train(server_round, arrays, config, grid)
        ]
        for node, client in zip(nodes, self._job.cohort, strict=True):
            order = ConfigRecord({"folder": str(self._job.folder), "client": client})
            yield Message(
                RecordDict({"arrays": arrays, "config": order}),
                dst_node_id=node,
                message_type="train",
            )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        arrays, metrics = super().aggregate_train(server_round, replies)
        if arrays is None:
            raise RuntimeError("no client answered")
        self._turns.done(
            lambda: {name: value.numpy() for name, value in arrays.to_torch_state_dict().items()}
        )
        return arrays, metrics


def main() -> None:
    job, turns = begin()
    server, client = ServerApp(), ClientApp()
    client.train()(train)

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        turns.ready(
            "flwr",
            "ray",
            "torch",
            note=f"{os.cpu_count()} workers of Ray, one client each at a time",
        )
        # no more turns: this thread is not the main one, and ends by returning
        with contextlib.suppress(SystemExit):
            TakeTurns(job, turns).start(
                grid, ArrayRecord(make_model(job).state_dict()), num_rounds=ENDLESS
            )

    # Without an address Ray would join whatever cluster it finds on this machine.
    backend = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"address": "local"},
    }
    try:
        run_simulation(server, client, num_supernodes=job.clients, backend_config=backend)
    except Exception:
        traceback.print_exc()
        os._exit(1)  # the thread of the ServerApp would wait for answers for ever


if __name__ == "__main__":
    main()
