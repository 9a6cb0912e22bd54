"""pfl (pfl-research): FederatedAveraging on a SimulatedBackend, set as in its own benchmark; with
PEER_WORKERS, in several processes that share the cohort.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "peers"))
from pfl_followers import start_followers

FOLLOWERS = start_followers()

from pfl.aggregate.simulate import SimulatedBackend  # noqa: E402
from pfl.aggregate.weighting import WeightByUser  # noqa: E402
from pfl.algorithm.base import NNAlgorithmParams  # noqa: E402
from pfl.algorithm.federated_averaging import FederatedAveraging  # noqa: E402
from pfl.callback.base import TrainingProcessCallback  # noqa: E402
from pfl.data.dataset import Dataset  # noqa: E402
from pfl.data.federated_dataset import FederatedDataset  # noqa: E402
from pfl.data.sampling import get_user_sampler  # noqa: E402
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams  # noqa: E402
from pfl.metrics import Metrics, Weighted  # noqa: E402
from pfl.model.pytorch import PyTorchModel  # noqa: E402
from published_networks import make_network, set_precision  # noqa: E402
from published_task import PublishedTask, Reports, begin, versions_of  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

EVAL_BATCH = 10_000


class WithLoss(nn.Module):
    """What pfl asks of a module."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.train()
        return cross_entropy(self.net(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        self.eval()
        logits = self.net(x)
        correct = int((logits.argmax(dim=1) == y).sum())
        loss = float(cross_entropy(logits, y, reduction="sum"))
        return {"loss": Weighted(loss, len(y)), "accuracy": Weighted(correct, len(y))}


class ReportRounds(TrainingProcessCallback):
    """Evaluates on the test set as often as the job does, and reports."""

    def __init__(self, task: PublishedTask, reports: Reports, test: Dataset):
        self._task, self._reports, self._test = task, reports, test

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        number, found = central_iteration + 1, []
        if self._task.evaluates(number):
            values = model.evaluate(
                self._test, eval_params=NNEvalHyperParams(local_batch_size=EVAL_BATCH)
            ).to_simple_dict()
            found = [
                next(value for name, value in values.items() if str(name).lower().endswith(word))
                for word in ("loss", "accuracy")
            ]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._reports.round(number, *found)
        return False, Metrics()


def main() -> None:
    task, reports = begin()
    set_precision(task.precision)
    device = torch.device(task.device)

    def examples(x: object, y: object) -> list[Tensor]:
        return [torch.tensor(task.normalize(x), device=device), torch.tensor(y, device=device)]

    users = {
        client: Dataset(examples(*task.client(client)), user_id=str(client))
        for client in range(task.clients)
    }
    net = WithLoss(make_network(task.network, task.classes)).to(device)
    model = PyTorchModel(
        net,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
    )
    data = FederatedDataset(users.__getitem__, get_user_sampler("random", range(task.clients)))
    backend = SimulatedBackend(data, data, postprocessors=[WeightByUser()])
    test = Dataset(examples(task.test_x, task.test_y))
    reports.start(
        versions_of("pfl", "torch"),
        f"processes: {len(FOLLOWERS) + 1}, threads of each: {torch.get_num_threads()}",
    )
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=task.rounds,
            evaluation_frequency=task.every,
            train_cohort_size=task.cohort,
            val_cohort_size=0,
        ),
        backend,
        model,
        NNTrainHyperParams(
            local_num_epochs=task.epochs,
            local_learning_rate=task.lr,
            local_batch_size=task.batch,
        ),
        NNEvalHyperParams(local_batch_size=EVAL_BATCH),
        callbacks=[ReportRounds(task, reports, test)],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main()
