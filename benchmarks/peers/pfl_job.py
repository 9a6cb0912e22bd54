"""pfl (pfl-research): FederatedAveraging on a SimulatedBackend; with PEER_WORKERS, in several
processes that share the cohort.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from driver import PeerJob, Turns, begin
from pfl_followers import start_followers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch_job import Epochs, make_model, make_optimizer, weights_of

FOLLOWERS = start_followers()

from pfl.aggregate.simulate import SimulatedBackend  # noqa: E402
from pfl.aggregate.weighting import WeightByDatapoints  # noqa: E402
from pfl.algorithm.base import NNAlgorithmParams  # noqa: E402
from pfl.algorithm.federated_averaging import FederatedAveraging  # noqa: E402
from pfl.callback.base import TrainingProcessCallback  # noqa: E402
from pfl.data.dataset import Dataset  # noqa: E402
from pfl.data.federated_dataset import FederatedDataset  # noqa: E402
from pfl.data.sampling import get_user_sampler  # noqa: E402
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams  # noqa: E402
from pfl.metrics import Metrics, Weighted  # noqa: E402
from pfl.model.pytorch import PyTorchModel  # noqa: E402

ENDLESS = 1_000_000


class WithLoss(nn.Module):
    """What pfl asks of a module."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.net(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        return {"loss": Weighted(float(self.loss(x, y)) * len(y), len(y))}


class PlannedDataset(Dataset):
    """A user whose batches come in the order of the plan."""

    def __init__(self, job: PeerJob, client: int):
        self._epochs, self._batch = Epochs(job, client), job.batch
        super().__init__((self._epochs.x, self._epochs.y), user_id=str(client))

    def iter(self, batch_size: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._epochs) if batch_size == self._batch else super().iter(batch_size)


class TakeTurns(TrainingProcessCallback):
    def __init__(self, turns: Turns):
        self._turns = turns

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self._turns.wait()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self._turns.done(lambda: weights_of(model.pytorch_model, "net."))
        self._turns.wait()
        return False, Metrics()


def count_processes() -> int:
    """As pfl sees it: with followers that it did not find, it would do all the work alone."""
    found = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if FOLLOWERS and found == 1:
        raise RuntimeError(
            f"pfl has not found the {len(FOLLOWERS)} processes it was to share the work with"
        )
    return found


def main() -> None:
    job, turns = begin(FOLLOWERS)
    net = WithLoss(make_model(job))
    model = PyTorchModel(
        net,
        local_optimizer_create=lambda parameters, lr: make_optimizer(job, parameters, lr=lr),
        central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
    )
    users = {client: PlannedDataset(job, client) for client in job.cohort}
    data = FederatedDataset(
        users.__getitem__,
        get_user_sampler("minimize_reuse", job.cohort),
        dict(zip(job.cohort, job.sizes, strict=True)),
    )
    backend = SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()])
    turns.ready(
        "pfl",
        "torch",
        note=f"processes: {count_processes()}, threads of each: {torch.get_num_threads()}",
    )
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=ENDLESS,
            evaluation_frequency=ENDLESS,
            train_cohort_size=len(job.cohort),
            val_cohort_size=None,
        ),
        backend,
        model,
        NNTrainHyperParams(
            local_num_epochs=job.epochs,
            local_learning_rate=job.optimizer_hparams["lr"],
            local_batch_size=job.batch,
        ),
        # pfl evaluates in its first round, which does not count; a batch size of its own tells that
        # apart from training.
        NNEvalHyperParams(local_batch_size=ENDLESS),
        callbacks=[TakeTurns(turns)],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main()
