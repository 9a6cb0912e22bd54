"""What we measure ourselves against: the plain loop over clients that simulators usually are, and
the floor that no simulator can go under.

Written with nn.Module, autograd and torch.optim alone. Data lie on the device and batches are
picked there, which flatters the loop; it shares only the plan of batches with our engines, so that
both can be compared number by number.
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

BATCH_OF_SCORES = 500


def train_clients(experiment: BuiltExperiment, state: RunState, job: ClientWork) -> nn.Module:
    """One round of federated averaging (or of Flashback), client by client. -> the new global
    model
    """
    task, device = experiment.task, experiment.task.info.device
    distilling = task.method.part_filling("server_train")  # Flashback
    rows_of = task.population.at(job.time_step).train
    received = plain_model(experiment)
    pi = None if distilling is None else state.server.state[distilling.name]["pi"]
    models, sizes, counts = [], [], []
    for client in job.clients.tolist():
        rows = torch.from_numpy(rows_of.for_client(client)).to(device)
        model = copy.deepcopy(received)
        plan = plan_batches(
            job.key.fold_in("client", client, "plan", 0),
            len(rows),
            task.batch_size,
            experiment.config.local.epochs,
            experiment.config.local.steps,
        )
        own = torch.bincount(task.train.y[rows], minlength=task.info.num_classes).to(
            task.info.dtype
        )
        teacher = (
            None
            if pi is None
            else (
                lambda x, place: received(x).unsqueeze(0),
                (pi / (own + pi)).nan_to_num().unsqueeze(0),
            )
        )
        fit(model, experiment, job, rows, plan.indices, plan.batch_sizes, teacher)
        models.append(model)
        sizes.append(len(rows))
        counts.append(own)
    merged = average(models, sizes)
    if pi is not None:
        distil_at_server(merged, received, models, torch.stack(counts), pi, experiment, job)
    return merged


def plain_model(experiment: BuiltExperiment) -> nn.Module:
    return copy.deepcopy(experiment.task.model.source_module).train()


# (x, place) -> logits [m, B, C]; alpha [m, C]
Teacher = tuple[Callable[[Tensor, Tensor], Tensor], Tensor]


def fit(
    model: nn.Module,
    experiment: BuiltExperiment,
    job: ClientWork,
    rows: Tensor,
    plan: np.ndarray,
    widths: np.ndarray,
    teacher: Teacher | None,
) -> None:
    task, optimizer = experiment.task, make_optimizer(model, experiment, job)
    for step, width in enumerate(widths.tolist()):
        place = torch.from_numpy(plan[step, :width]).to(rows.device)
        batch = rows[place]
        x, y = task.train.inputs(batch), task.train.y[batch]
        with autocast(experiment):
            logits = model(x)
            if teacher is not None:
                with torch.no_grad():
                    said = teacher[0](x, place)
        loss = cross_entropy(logits.float() if logits.dtype == torch.bfloat16 else logits, y)
        if teacher is not None:
            log_p = torch.log_softmax(said.to(task.info.dtype), dim=2)
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
    job: ClientWork,
) -> None:
    task = experiment.task
    public = task.public.to(task.info.device)
    with torch.no_grad(), autocast(experiment):
        said = torch.stack(
            [
                torch.cat(
                    [
                        model(task.train.inputs(some))
                        for some in torch.split(public, BATCH_OF_SCORES)
                    ]
                )
                for model in [*models, received]
            ]
        )
    mu = torch.cat([counts, pi.unsqueeze(0)])
    alpha = (mu / (pi + mu.sum(dim=0))).nan_to_num()
    distilling = task.method.part_filling("server_train")
    assert distilling is not None
    epochs = distilling.arguments["server_epochs"]
    key = job.key.fold_in("server", "fit").fold_in("call", 0, "plan")
    plan = plan_batches(key, len(public), task.batch_size, epochs)
    fit(
        merged,
        experiment,
        job,
        public,
        plan.indices,
        plan.batch_sizes,
        (lambda x, place: said[:, place], alpha),
    )


def average(models: list[nn.Module], sizes: list[int]) -> nn.Module:
    """By numbers of examples; counters of batch norm are equal for clients of equal size."""
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
    model: nn.Module, experiment: BuiltExperiment, job: ClientWork
) -> torch.optim.Optimizer:
    rule, name = job.optimizer_hparams, experiment.task.optimizer.name
    if name == "adam":
        return torch.optim.Adam(
            model.parameters(),
            rule["lr"],
            (rule["beta1"], rule["beta2"]),
            eps=rule["eps"],
            weight_decay=rule["weight_decay"],
        )
    return torch.optim.SGD(
        model.parameters(), rule["lr"], momentum=rule["momentum"], weight_decay=rule["weight_decay"]
    )


def autocast(experiment: BuiltExperiment) -> torch.autocast:
    bf16 = experiment.config.precision == "bf16"
    return torch.autocast(experiment.task.info.device.type, dtype=torch.bfloat16, enabled=bf16)


@torch.no_grad()
def score_models(experiment: BuiltExperiment, models: list[nn.Module]) -> Tensor:
    """Each model on the whole test set. -> correct answers [m]"""
    return torch.stack(
        [
            _count_right(experiment, model.eval(), BATCH_OF_SCORES, torch.contiguous_format)
            for model in models
        ]
    )


def _count_right(
    experiment: BuiltExperiment,
    judge: Callable[[Tensor], Tensor],
    batch: int,
    layout: torch.memory_format,
) -> Tensor:
    test, device = experiment.task.test, experiment.task.info.device
    right = torch.zeros((), dtype=torch.int64, device=device)
    for ids in torch.split(torch.arange(len(test.y), device=device), batch):
        with autocast(experiment):
            logits = judge(test.inputs(ids).contiguous(memory_format=layout))
        right += (logits.argmax(dim=1) == test.y[ids]).sum()
    return right


def make_scoring_floor(
    experiment: BuiltExperiment, model: nn.Module, times: int
) -> Callable[[], None]:
    """One model on the whole test set, so many times: compiled where torch can, channels
    innermost, on a GPU all rows at once.
    """
    device = experiment.task.info.device
    quick = copy.deepcopy(model).eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    judge = torch.compile(quick, dynamic=False) if compiler_works(device) else quick
    batch = len(experiment.task.test.y) if device.type == "cuda" else BATCH_OF_SCORES

    @torch.no_grad()
    def run() -> None:
        for _ in range(times):
            _count_right(experiment, judge, batch, torch.channels_last)

    return run


def make_floor(experiment: BuiltExperiment, job: ClientWork) -> Callable[[], None]:
    """As many examples through one model, in batches as large as the whole stack's: the arithmetic
    alone.

    Compiled where torch can, and on CUDA the whole step, with its optimizer, is one CUDA graph.
    """
    task, device = experiment.task, experiment.task.info.device
    rows = np.concatenate(
        [
            task.population.at(job.time_step).train.for_client(client)
            for client in job.clients.tolist()
        ]
    )
    batch = min(task.batch_size * len(job.clients), len(rows))
    steps = max(1, round(experiment.config.local.epochs * len(rows) / batch))
    order = np.concatenate(
        [
            Key(0).fold_in(epoch).permutation(len(rows))
            for epoch in range(-(-steps * batch // len(rows)))
        ]
    )
    ids = torch.from_numpy(rows[order[: steps * batch]].reshape(steps, batch)).to(device)
    model = plain_model(experiment)
    optimizer = make_optimizer(model, experiment, job)
    if device.type == "cuda":
        for group in optimizer.param_groups:
            group["capturable"] = True
    forward = torch.compile(model, dynamic=False) if compiler_works(device) else model
    number = torch.zeros(1, dtype=torch.int64, device=device)

    def step() -> None:
        some = ids.index_select(0, number)[0]
        x, y = task.train.inputs(some), task.train.y[some]
        with autocast(experiment):
            logits = forward(x)
        loss = cross_entropy(logits.float() if logits.dtype == torch.bfloat16 else logits, y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        number.add_(1).remainder_(steps)

    take = capture(step) if device.type == "cuda" else step

    def run() -> None:
        for _ in range(steps):
            take()

    return run


def capture(step: Callable[[], None]) -> Callable[[], None]:
    """A CUDA graph of a function without arguments, after some plain calls in which libraries
    choose their kernels.
    """
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    torch.backends.cudnn.benchmark = before

    # a graph reads memory that only the closure of its function keeps alive
    def replay(needed: Callable[[], None] = step) -> None:
        graph.replay()

    return replay


def compiler_works(device: torch.device) -> bool:
    """torch.compile needs a C++ compiler, or Triton on a GPU."""
    try:
        return bool((torch.compile(lambda x: x + 1)(torch.zeros(2, device=device)) == 1).all())
    except Exception:  # whatever stands in its way, the floor is then measured without it
        return False
