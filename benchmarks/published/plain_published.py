"""A plain PyTorch loop: one network, client after client, then the average. All data are on the
device, and a batch is selected, augmented and normalized there, which favors the loop. On a CPU it takes the number of threads that
is fastest for one client.
"""

from __future__ import annotations

import time

import torch
from published_networks import make_network, set_precision
from published_task import PublishedTask, begin
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

EVAL_BATCH = 1000
PADDING = 4


class PlainData:
    """The examples on the device, as pixels until a batch is needed."""

    def __init__(self, task: PublishedTask):
        self.device, self.augment = torch.device(task.device), task.augment
        self.mean, self.std = (
            torch.from_numpy(values).to(self.device) for values in (task.mean, task.std)
        )
        self.clients = [self._load(*task.client(client)) for client in range(task.clients)]
        self.test = self._load(task.test_x, task.test_y)

    def _load(self, x: object, y: object) -> tuple[Tensor, Tensor]:
        return torch.tensor(x, device=self.device), torch.tensor(y, device=self.device)

    def inputs(self, x: Tensor) -> Tensor:
        return (x.float() - self.mean) / self.std

    def training_inputs(self, x: Tensor) -> Tensor:
        return self.inputs(flip_and_crop(x) if self.augment else x)


def flip_and_crop(x: Tensor) -> Tensor:
    """Every image is mirrored or not, padded with black by four pixels, and cut to its size at a
    random place. x: [B, c, h, w]
    """
    many, channels, height, width = x.shape
    mirrored = torch.rand(many, 1, 1, 1, device=x.device) < 0.5
    padded = pad(torch.where(mirrored, x.flip(3), x), [PADDING] * 4)
    top, left = torch.randint(2 * PADDING + 1, (2, many, 1), device=x.device)
    rows = top + torch.arange(height, device=x.device)
    columns = left + torch.arange(width, device=x.device)
    return padded[
        torch.arange(many, device=x.device)[:, None, None, None],
        torch.arange(channels, device=x.device)[None, :, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]


def train_client(network: nn.Module, task: PublishedTask, data: PlainData, client: int) -> None:
    optimizer = torch.optim.SGD(network.parameters(), task.lr)
    x, y = data.clients[client]
    for _ in range(task.epochs):
        for rows in torch.randperm(len(y), device=y.device).split(task.batch):
            optimizer.zero_grad()
            cross_entropy(network(data.training_inputs(x[rows])), y[rows]).backward()
            optimizer.step()


def train_round(
    server: nn.Module, local: nn.Module, task: PublishedTask, data: PlainData, cohort: list[int]
) -> None:
    """One round of FedAvg, weighted by numbers of examples; counters are those of the last."""
    total = sum(len(data.clients[client][1]) for client in cohort)
    merged: dict[str, Tensor] = {}
    local.train()
    for client in cohort:
        local.load_state_dict(server.state_dict())
        train_client(local, task, data, client)
        share = len(data.clients[client][1]) / total
        for name, value in local.state_dict().items():
            if value.is_floating_point():
                merged[name] = merged.get(name, 0) + value * share
            else:
                merged[name] = value
    server.load_state_dict(merged)


@torch.no_grad()
def evaluate(network: nn.Module, data: PlainData) -> tuple[float, float]:
    """-> mean loss and accuracy on the test set"""
    network.eval()
    loss, correct = 0.0, 0
    for x, y in zip(*(part.split(EVAL_BATCH) for part in data.test), strict=True):
        logits = network(data.inputs(x))
        loss += float(cross_entropy(logits, y, reduction="sum"))
        correct += int((logits.argmax(dim=1) == y).sum())
    return loss / len(data.test[1]), correct / len(data.test[1])


def choose_threads(network: nn.Module, task: PublishedTask, data: PlainData) -> None:
    """Threads that wait for each other cost a small network more than they gain."""
    seconds = {}
    for threads in (torch.get_num_threads(), 1):
        torch.set_num_threads(threads)
        begin = time.perf_counter()
        train_client(network, task, data, 0)
        seconds[threads] = time.perf_counter() - begin
    torch.set_num_threads(min(seconds, key=seconds.__getitem__))


def main() -> None:
    task, reports = begin()
    set_precision(task.precision)
    torch.manual_seed(1)
    data = PlainData(task)
    server, local = (make_network(task.network, task.classes).to(data.device) for _ in range(2))
    if data.device.type == "cpu":
        choose_threads(local, task, data)
    reports.start(f"torch {torch.__version__}", f"threads on the host: {torch.get_num_threads()}")
    for number in range(1, task.rounds + 1):
        cohort = torch.randperm(task.clients)[: task.cohort].tolist()
        train_round(server, local, task, data, cohort)
        if data.device.type == "cuda":
            torch.cuda.synchronize(data.device)
        reports.round(number, *(evaluate(server, data) if task.evaluates(number) else ()))


if __name__ == "__main__":
    main()
