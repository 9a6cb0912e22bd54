"""The baselines of the benchmark: a plain loop over clients, and a lower bound on the time of a
round.

They use nn.Module, autograd and torch.optim alone. The data are on the device and batches are
selected there, which favors the loop. It shares only the plan of batches with the engines, so that
results can be compared number by number.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from remanence.core.engine import ClientWork
from remanence.core.rng import Key
from remanence.data.batches import plan_batches
from remanence.experiment.build import BuiltExperiment
from remanence.training.state import RunState

EVAL_BATCH = 500


def train_clients(experiment: BuiltExperiment, state: RunState, work: ClientWork) -> nn.Module:
    """One round of FedAvg, client by client; of Flashback if the method fills `server_train`.

    Returns:
        The new global model.
    """
    task, device = experiment.task, experiment.task.info.device
    indices = task.population.at(work.time_step).train
    received = plain_model(experiment)
    distiller = task.method.part_filling("server_train")
    pi = None if distiller is None else state.server.state[distiller.name]["pi"]
    models, sizes, counts = [], [], []
    for client in work.clients.tolist():
        ids = torch.from_numpy(indices.for_client(client)).to(device)
        model = copy.deepcopy(received)
        plan = plan_batches(
            work.key.fold_in("client", client, "plan", 0),
            len(ids),
            task.batch_size,
            experiment.config.local.epochs,
            experiment.config.local.steps,
        )
        label_counts = torch.bincount(task.train.y[ids], minlength=task.info.num_classes).to(
            task.info.dtype
        )
        teacher = (
            None
            if pi is None
            else (
                lambda x, place: received(x).unsqueeze(0),
                (pi / (label_counts + pi)).nan_to_num().unsqueeze(0),
            )
        )
        fit(model, experiment, work, ids, plan.indices, plan.batch_sizes, teacher)
        models.append(model)
        sizes.append(len(ids))
        counts.append(label_counts)
    merged = average(models, sizes)
    if pi is not None:
        distil_at_server(merged, received, models, torch.stack(counts), pi, experiment, work)
    return merged


def plain_model(experiment: BuiltExperiment) -> nn.Module:
    """A copy of the experiment's network with its initial parameters."""
    return copy.deepcopy(experiment.task.model.source_module).train()


# (x, place) -> logits [m, B, C]; alpha [m, C]
Teacher = tuple[Callable[[Tensor, Tensor], Tensor], Tensor]


def fit(
    model: nn.Module,
    experiment: BuiltExperiment,
    work: ClientWork,
    ids: Tensor,
    plan: np.ndarray,
    batch_sizes: np.ndarray,
    teacher: Teacher | None,
) -> None:
    """Train a model in place on the examples `ids` [n], by a plan [steps, batch] of positions."""
    task, optimizer = experiment.task, make_optimizer(model, experiment, work)
    for step, width in enumerate(batch_sizes.tolist()):
        place = torch.from_numpy(plan[step, :width]).to(ids.device)
        batch = ids[place]
        x, y = task.train.inputs(batch), task.train.y[batch]
        with autocast(experiment):
            logits = model(x)
            if teacher is not None:
                with torch.no_grad():
                    teacher_logits = teacher[0](x, place)
        loss = cross_entropy(logits.float() if logits.dtype == torch.bfloat16 else logits, y)
        if teacher is not None:
            log_p = torch.log_softmax(teacher_logits.to(task.info.dtype), dim=2)
            log_q = torch.log_softmax(logits.to(task.info.dtype), dim=1)
            loss = (
                loss
                + (teacher[1].unsqueeze(1) * log_p.exp() * (log_p - log_q)).sum(dim=(0, 2)).mean()
            )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def distil_at_server(
    merged: nn.Module,
    received: nn.Module,
    models: list[nn.Module],
    counts: Tensor,
    pi: Tensor,
    experiment: BuiltExperiment,
    work: ClientWork,
) -> None:
    """Flashback's distillation at the server, from the clients' models and the received one."""
    task = experiment.task
    public = task.public.to(task.info.device)
    with torch.no_grad(), autocast(experiment):
        teacher_logits = torch.stack(
            [
                torch.cat(
                    [model(task.train.inputs(chunk)) for chunk in torch.split(public, EVAL_BATCH)]
                )
                for model in [*models, received]
            ]
        )
    mu = torch.cat([counts, pi.unsqueeze(0)])
    alpha = (mu / (pi + mu.sum(dim=0))).nan_to_num()
    distiller = task.method.part_filling("server_train")
    assert distiller is not None
    epochs = distiller.arguments["server_epochs"]
    key = work.key.fold_in("server", "fit").fold_in("call", 0, "plan")
    plan = plan_batches(key, len(public), task.batch_size, epochs)
    fit(
        merged,
        experiment,
        work,
        public,
        plan.indices,
        plan.batch_sizes,
        (lambda x, place: teacher_logits[:, place], alpha),
    )


def average(models: list[nn.Module], sizes: list[int]) -> nn.Module:
    """The mean of models, weighted by numbers of examples; counters are those of the first."""
    merged, total = copy.deepcopy(models[0]), sum(sizes)
    states = [model.state_dict() for model in models]
    with torch.no_grad():
        for name, value in merged.state_dict().items():
            if value.is_floating_point():
                value.copy_(
                    sum(
                        state[name] * (size / total)
                        for state, size in zip(states, sizes, strict=True)
                    )
                )
    return merged


def make_optimizer(
    model: nn.Module, experiment: BuiltExperiment, work: ClientWork
) -> torch.optim.Optimizer:
    hparams, name = work.optimizer_hparams, experiment.task.optimizer.name
    if name == "adam":
        return torch.optim.Adam(
            model.parameters(),
            hparams["lr"],
            (hparams["beta1"], hparams["beta2"]),
            eps=hparams["eps"],
            weight_decay=hparams["weight_decay"],
        )
    return torch.optim.SGD(
        model.parameters(),
        hparams["lr"],
        momentum=hparams["momentum"],
        weight_decay=hparams["weight_decay"],
    )


def autocast(experiment: BuiltExperiment) -> torch.autocast:
    bf16 = experiment.config.precision == "bf16"
    return torch.autocast(experiment.task.info.device.type, dtype=torch.bfloat16, enabled=bf16)


@torch.no_grad()
def score_models(experiment: BuiltExperiment, models: list[nn.Module]) -> Tensor:
    """Each model on the whole test set. -> correct answers [m]"""
    return torch.stack(
        [
            _count_correct(experiment, model.eval(), EVAL_BATCH, torch.contiguous_format)
            for model in models
        ]
    )


def _count_correct(
    experiment: BuiltExperiment,
    predict: Callable[[Tensor], Tensor],
    batch: int,
    layout: torch.memory_format,
) -> Tensor:
    test, device = experiment.task.test, experiment.task.info.device
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for ids in torch.split(torch.arange(len(test.y), device=device), batch):
        with autocast(experiment):
            logits = predict(test.inputs(ids).contiguous(memory_format=layout))
        correct += (logits.argmax(dim=1) == test.y[ids]).sum()
    return correct


def make_scoring_lower_bound(
    experiment: BuiltExperiment, model: nn.Module, times: int
) -> Callable[[], None]:
    """One model on the whole test set, `times` times: compiled where possible, channels last, on a
    GPU all examples in one batch.
    """
    device = experiment.task.info.device
    network = copy.deepcopy(model).eval()
    network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    predict = torch.compile(network, dynamic=False) if compiler_works(device) else network
    batch = len(experiment.task.test.y) if device.type == "cuda" else EVAL_BATCH

    @torch.no_grad()
    def run() -> None:
        for _ in range(times):
            _count_correct(experiment, predict, batch, torch.channels_last)

    return run


def make_lower_bound(experiment: BuiltExperiment, work: ClientWork) -> Callable[[], None]:
    """The lower bound: one model trains on as many examples, in batches as large as those of all
    clients together, so that only the arithmetic remains.

    It is compiled where possible, and on CUDA the whole step with its optimizer is one CUDA graph.
    """
    task, device = experiment.task, experiment.task.info.device
    indices = np.concatenate(
        [
            task.population.at(work.time_step).train.for_client(client)
            for client in work.clients.tolist()
        ]
    )
    batch = min(task.batch_size * len(work.clients), len(indices))
    steps = max(1, round(experiment.config.local.epochs * len(indices) / batch))
    order = np.concatenate(
        [
            Key(0).fold_in(epoch).permutation(len(indices))
            for epoch in range(-(-steps * batch // len(indices)))
        ]
    )
    ids = torch.from_numpy(indices[order[: steps * batch]].reshape(steps, batch)).to(device)
    model = plain_model(experiment)
    optimizer = make_optimizer(model, experiment, work)
    if device.type == "cuda":
        for group in optimizer.param_groups:
            group["capturable"] = True
    forward = torch.compile(model, dynamic=False) if compiler_works(device) else model
    number = torch.zeros(1, dtype=torch.int64, device=device)

    def step() -> None:
        chosen = ids.index_select(0, number)[0]
        x, y = task.train.inputs(chosen), task.train.y[chosen]
        with autocast(experiment):
            logits = forward(x)
        loss = cross_entropy(logits.float() if logits.dtype == torch.bfloat16 else logits, y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        number.add_(1).remainder_(steps)

    run_step = capture(step) if device.type == "cuda" else step

    def run() -> None:
        for _ in range(steps):
            run_step()

    return run


def capture(step: Callable[[], None]) -> Callable[[], None]:
    """A CUDA graph of a function without arguments, after some calls in which libraries choose
    their kernels.
    """
    warmup = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    warmup.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warmup):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(warmup)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    torch.backends.cudnn.benchmark = before

    # the default argument keeps the tensors alive that the graph reads
    def replay(needed: Callable[[], None] = step) -> None:
        graph.replay()

    return replay


def compiler_works(device: torch.device) -> bool:
    """Whether torch.compile works here: it needs a C++ compiler, or Triton on a GPU."""
    try:
        return bool((torch.compile(lambda x: x + 1)(torch.zeros(2, device=device)) == 1).all())
    except Exception:  # for any reason: the lower bound is then measured without it
        return False
