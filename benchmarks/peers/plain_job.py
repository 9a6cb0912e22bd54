"""The plain loop: one nn.Module, client after client, then the average. What every other
contender's first round is compared with.
"""

from __future__ import annotations

import torch
from driver import begin
from torch_job import Epochs, fit, make_model, weights_of


def main() -> None:
    job, turns = begin()
    server, local = make_model(job), make_model(job)
    data = {client: Epochs(job, client) for client in job.cohort}
    turns.ready("torch", note=f"{torch.get_num_threads()} threads")
    while True:
        turns.wait()
        merged = {name: torch.zeros_like(value) for name, value in server.state_dict().items()}
        for client, size in zip(job.cohort, job.sizes, strict=True):
            local.load_state_dict(server.state_dict())
            fit(local, job, data[client])
            for name, value in local.state_dict().items():
                merged[name] += value * (size / sum(job.sizes))
        server.load_state_dict(merged)
        turns.done(lambda: weights_of(server))


if __name__ == "__main__":
    main()
