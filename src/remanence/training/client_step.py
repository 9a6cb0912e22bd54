"""Local training of one client: the step, and what comes before and after it.

The only place a gradient is taken, and the only one where losses are averaged. Everything here is a
pure function of one client's tensors; `sequential` calls it client by client with plain autograd,
`vectorized` maps it over a stack with `torch.func`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remanence.core import pytree
from remanence.core.compose import ComposedMethod
from remanence.core.model import Model
from remanence.core.pytree import Params, Tree, weighted_mean
from remanence.core.slots import Accept, ClientOps, Context, Forward, Optimizer, Phase, Predict
from remanence.core.types import Batch, ModelState, Output, TaskInfo
from remanence.data.batches import Examples
from remanence.data.population import FederatedPopulation
from remanence.training.per_example import make_per_example_grad, no_regularizer

# (function, argument) -> gradient, aux; where function(argument) -> scalar, aux
Differentiate = Callable[[Callable[[Any], tuple[Tensor, Any]], Any], tuple[Any, Any]]

PERSONAL = "personal"  # in what a client keeps: the parameters and buffers that are its own
PREDICTION_ROWS = 1000  # rows a model sees at once when it looks at a whole split


class EngineCache(dict[str, Any]):
    """What engines keep of a task from round to round; it does not travel with it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return EngineCache, ()


@dataclass(frozen=True)
class TrainingTask:
    """What an engine needs once, at the start of a run."""

    model: Model
    method: ComposedMethod
    optimizer: Optimizer
    info: TaskInfo
    phases: tuple[Phase, ...]
    batch_size: int
    drop_last: bool
    train: Examples
    test: Examples
    public: Tensor  # ids of training rows kept by the server
    population: FederatedPopulation
    average_buffers: bool
    clients_remote: bool = (
        # do clients keep their state and facts for themselves? What is known of a state here is
        # then the round it is from
        False
    )
    engine_cache: EngineCache = field(default_factory=EngineCache, compare=False, repr=False)

    def trained_params(self, phase: Phase) -> tuple[str, ...]:
        """The parameters this phase changes; what is frozen stays so, whatever a phase asks for."""
        frozen = {*self.method.frozen(self.info), *self.model.fixed}
        names = [name for name in self.model.initial.params if name not in frozen]
        wanted = set(names if phase.trainable is None else phase.trainable(self.info, names))
        return tuple(name for name in names if name in wanted)

    def communicated_params(self) -> tuple[str, ...]:
        """The parameters that travel: all that are trained and not personal."""
        personal = self.method.personal(self.info)
        trained = {name for phase in self.phases for name in self.trained_params(phase)}
        return tuple(
            name for name in self.model.initial.params if name in trained and name not in personal
        )

    def communicated_buffers(self) -> tuple[str, ...]:
        """The buffers that travel."""
        personal = self.method.personal(self.info)
        return tuple(
            name
            for name in self.model.initial.buffers
            if self.average_buffers and name not in personal
        )

    def personal_state(self, model: ModelState) -> Tree:
        """What of a model stays with its client; empty where nothing does."""
        names = self.method.personal(self.info)
        params = {name: value for name, value in model.params.items() if name in names}
        buffers = {name: value for name, value in model.buffers.items() if name in names}
        return {kind: part for kind, part in (("params", params), ("buffers", buffers)) if part}

    @property
    def is_stateful(self) -> bool:
        """Does any client keep something between rounds?"""
        return self.method.is_stateful or bool(self.method.personal(self.info))

    def payload_spec(self) -> Tree:
        """The form of what one client sends up besides the model, by part."""
        start = self.model.initial
        return {
            p.name: p.payload(start, self.info) for p in self.method.parts if p.payload is not None
        }

    def hparam_tensors(self) -> Any:
        """The parts' numbers, by part; a context is narrowed to one part's before anyone reads
        them.
        """
        return {part: self.tensors(numbers) for part, numbers in self.method.hyper.items()}

    def tensors(self, numbers: dict[str, float]) -> dict[str, Tensor]:
        """Numbers in the parameters' precision; filled in on the device, because a copy to it
        would be waited for.
        """
        return {
            name: torch.full((), value, dtype=self.info.dtype, device=self.info.device)
            for name, value in numbers.items()
        }


class ClientIndices(NamedTuple):
    """A client's rows, as functions that look at all of them need them; weight 0 marks padding."""

    train: Tensor  # [n] ids
    train_weight: Tensor  # [n]
    valid: Tensor  # [v]
    valid_weight: Tensor  # [v]


def grad_autograd(function: Callable[[Any], tuple[Tensor, Any]], argument: Any) -> tuple[Any, Any]:
    """By autograd's tape: the oracle."""
    single = isinstance(argument, Tensor)
    tree = {"": argument} if single else argument
    leaves = {name: value.detach().requires_grad_() for name, value in tree.items()}
    value, aux = function(leaves[""] if single else leaves)
    gradients = torch.autograd.grad(
        value, list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    aux = pytree.detach(aux)
    return (gradients[0] if single else dict(zip(leaves, gradients, strict=True))), aux


def grad_func(function: Callable[[Any], tuple[Tensor, Any]], argument: Any) -> tuple[Any, Any]:
    """By torch.func: works inside vmap."""
    return torch.func.grad(function, has_aux=True)(argument)  # type: ignore[no-any-return]


def predict_logits_stacked(
    task: TrainingTask, models: ModelState, x: Tensor, dim: int | None
) -> Tensor:
    """Stacked models on the same rows (dim None) or each on its own (dim 0). -> logits [m, n, C]

    One by one where a stack gains nothing: a single model, and convolutions on a CPU, which are
    three times as slow grouped.
    """
    judge, many = task.model.predict, models.num_models
    if many == 1 or (task.info.device.type == "cpu" and task.model.has_convolutions):
        return torch.stack(
            [
                judge(models.select(number), x if dim is None else x[number]).logits
                for number in range(many)
            ]
        )
    logits: Tensor = torch.func.vmap(
        lambda model, rows: judge(model, rows).logits, in_dims=(0, dim)
    )(models, x)
    return logits


class TrainState(NamedTuple):
    """What one local step hands to the next."""

    params: Params  # those that are trained
    buffers: Params
    opt_state: Tree  # the optimizer's
    tracker_state: Tree  # the trackers', by part


def init_train_state(
    task: TrainingTask,
    differentiate: Differentiate,
    params: Params,
    fixed: Params,
    buffers: Params,
    rows: ClientIndices,
    ctx: Context,
) -> TrainState:
    """Before the first step of a phase; memory goes on from the phase before."""
    lent = make_client_ops(task, differentiate, fixed, buffers, None, rows, ctx)
    memory = {
        hook.name: ctx.tracker_state[hook.name]
        if hook.name in ctx.tracker_state
        else hook(ctx, lent)
        for hook in task.method.trackers("init")
    }
    return TrainState(params, buffers, task.optimizer.init(params), memory)


def train_step(
    task: TrainingTask,
    differentiate: Differentiate,
    now: TrainState,
    fixed: Params,
    batch: Batch,
    rows: ClientIndices,
    ctx: Context,
) -> tuple[TrainState, Tensor]:
    """One local step: forward, objective, gradient, rule. -> progress, loss"""
    ctx = ctx._replace(tracker_state=now.tracker_state)
    lent = make_client_ops(task, differentiate, fixed, now.buffers, batch.x, rows, ctx)
    objective = make_loss_fn(task, fixed, now.buffers, lent, ctx)
    gradient = task.method.hook("gradient")
    if gradient is None:
        grads, aux = differentiate(lambda p: objective(p, batch), now.params)
    else:
        grads = gradient(now.params, batch, lent, ctx)
        # such a rule may look at other points and rows: buffers and loss are those of the batch
        # itself
        with torch.no_grad():
            _, aux = objective(now.params, batch)
    for transform in task.method.transforms():
        grads = transform(grads, now.params, ctx)
    params, slots = task.optimizer.step(now.params, grads, now.opt_state, ctx)
    before, after = (
        ModelState({**fixed, **now.params}, now.buffers),
        ModelState({**fixed, **params}, aux["buffers"]),
    )
    memory = {
        hook.name: hook(now.tracker_state[hook.name], before, after, batch, lent, ctx)
        for hook in task.method.trackers("step")
    }
    return TrainState(params, aux["buffers"], slots, memory), aux["loss"]


def make_loss_fn(
    task: TrainingTask,
    fixed: Params,
    buffers: Params,
    lent: ClientOps,
    ctx: Context,
    penalized: bool = True,
) -> Callable[[Params, Batch], tuple[Tensor, dict[str, Any]]]:
    """The whole objective: base and terms averaged over the rows, plus penalties."""
    base = task.method.hook("loss")
    terms = task.method.hooks("loss_terms")
    penalties = task.method.hooks("regularizers") if penalized else []

    def objective(params: Params, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
        out, new_buffers = task.model.apply({**fixed, **params}, buffers, batch.x, ctx.key)
        rows = cross_entropy(out, batch, ctx) if base is None else base(out, batch, ctx)
        for term in terms:
            rows = rows + term(out, batch, lent, ctx)
        loss = weighted_mean(rows, batch.weight)
        for penalty in penalties:
            loss = loss + penalty(params, ctx)
        return loss, {"buffers": new_buffers, "loss": loss.detach()}

    return objective


def make_client_ops(
    task: TrainingTask,
    differentiate: Differentiate,
    fixed: Params,
    buffers: Params,
    x: Tensor | None,
    rows: ClientIndices,
    ctx: Context,
) -> ClientOps:
    """The functions a part may call at this point; `x` are the rows of the step, where there is
    one.
    """

    def grad(params: Params, batch: Batch, wrt: str = "params") -> Any:
        # terms look at the rows the gradient is asked for
        mine = make_client_ops(task, differentiate, fixed, buffers, batch.x, rows, ctx)
        objective = make_loss_fn(task, fixed, buffers, mine, ctx)
        if wrt == "inputs":
            return differentiate(
                lambda inputs: objective(params, batch._replace(x=inputs)), batch.x
            )[0]
        return differentiate(lambda p: objective(p, batch), params)[0]

    def objective_of_row(
        now: Context, x: Tensor
    ) -> Callable[[Params, Batch], tuple[Tensor, dict[str, Any]]]:
        mine = make_client_ops(task, grad_func, fixed, buffers, x, rows, now)
        return make_loss_fn(task, fixed, buffers, mine, now, penalized=False)

    def penalize(params: Params) -> Params:
        penalties = task.method.hooks("regularizers")
        gradient: Params = differentiate(
            lambda p: (torch.stack([penalty(p, ctx) for penalty in penalties]).sum(), {}), params
        )[0]
        return gradient

    penalty = penalize if task.method.hooks("regularizers") else no_regularizer
    each = make_per_example_grad(
        objective_of_row,
        penalty,
        ctx,
        shown=task.method.part_filling("privatize_stats") is not None,
    )
    return ClientOps(
        grad,
        _make_forward(task, x),
        _make_predict(task, rows),
        make_effective_steps(task, differentiate, ctx),
        each,
    )


def make_effective_steps(
    task: TrainingTask, differentiate: Differentiate, ctx: Context
) -> Callable[[Tree | None], Tree]:
    """The same optimizer and the same penalties on a single number that starts at 0 and always
    feels a gradient of 1.

    After the local steps its distance from 0, divided by the learning rate, is how many plain steps
    they amounted to: what FedNova divides by.
    """
    penalties = task.method.hooks("regularizers")

    def walk(state: Tree | None) -> Tree:
        if state is None:
            zero = {"u": torch.zeros_like(ctx.optimizer_hparams["lr"])}
            return {"at": zero, "slots": task.optimizer.init(zero)}
        origin = ctx._replace(start=ModelState(pytree.zeros_like(state["at"]), {}))

        def pull(at: Params) -> tuple[Tensor, dict[str, Any]]:
            return torch.stack([at["u"], *(penalty(at, origin) for penalty in penalties)]).sum(), {}

        grads, _ = differentiate(pull, state["at"])
        at, slots = task.optimizer.step(state["at"], grads, state["slots"], ctx)
        return {"at": at, "slots": slots}

    return walk


def _make_forward(task: TrainingTask, rows: Tensor | None) -> Forward:
    cache: dict[int, tuple[ModelState, Output]] = {}

    def forward(model: ModelState, x: Tensor | None = None) -> Output:
        if x is not None or rows is None:
            assert x is not None, "outside a step there is no batch: pass x"
            with torch.no_grad():
                return task.model.predict(model, x)
        # the model is kept beside its output, so that its id stays its own
        if id(model.params) not in cache:
            with torch.no_grad():
                cache[id(model.params)] = (model, task.model.predict(model, rows))
        return cache[id(model.params)][1]

    return forward


def cross_entropy(out: Output, batch: Batch, ctx: Context) -> Tensor:
    """The loss where no part brings its own; soft targets are allowed."""
    return torch.nn.functional.cross_entropy(out.logits, batch.y, reduction="none")


def _make_predict(task: TrainingTask, rows: ClientIndices) -> Predict:
    def predict(model: ModelState, split: str = "train") -> tuple[Output, Batch]:
        ids, weight = (
            (rows.train, rows.train_weight) if split == "train" else (rows.valid, rows.valid_weight)
        )
        x, y = task.train.inputs(ids), task.train.labels(ids)
        with torch.no_grad():
            outputs = [task.model.predict(model, part) for part in torch.split(x, PREDICTION_ROWS)]
        out = Output(
            torch.cat([o.logits for o in outputs]), torch.cat([o.features for o in outputs])
        )
        return out, Batch(x, y, weight, ids)

    return predict


def client_init(
    task: TrainingTask, differentiate: Differentiate, rows: ClientIndices, ctx: Context
) -> tuple[ModelState, Tree, Tree]:
    """What a client does before its first step. -> the model it starts from, own, extras"""
    own, extras = dict(ctx.client_state), {}
    lent = make_client_ops(task, differentiate, {}, ctx.start.buffers, None, rows, ctx)
    for hook in task.method.hooks("on_client_start"):
        changed, extras[hook.name] = hook(ctx._replace(client_state=own), lent)
        own[hook.name] = {**own.get(hook.name, {}), **changed}
    mine = own.get(PERSONAL, {})
    start = ModelState(
        {**ctx.start.params, **mine.get("params", {})},
        {**ctx.start.buffers, **mine.get("buffers", {})},
    )
    return start, own, extras


def client_final(
    task: TrainingTask,
    differentiate: Differentiate,
    rows: ClientIndices,
    trained: ModelState,
    extras: Tree,
    kept: Tree,
    ctx: Context,
) -> tuple[Tree, Tree]:
    """What a client does after its last step; `kept` has the form of what it keeps. -> own,
    extras
    """
    own, extras = dict(ctx.client_state), dict(extras)
    lent = make_client_ops(task, differentiate, {}, trained.buffers, None, rows, ctx)
    for hook in task.method.hooks("on_client_end"):
        changed, more = hook(ctx._replace(client_state=own), trained, lent)
        own[hook.name] = {**own.get(hook.name, {}), **changed}
        extras[hook.name] = {**extras.get(hook.name, {}), **more}
    own[PERSONAL] = task.personal_state(trained)
    return _check_client_state(own, kept), _check_payload(
        {name: tree for name, tree in extras.items() if tree}, task
    )


def _check_client_state(own: Tree, kept: Tree) -> Tree:
    """What lasts: the names of the first value, in its shapes and types; anything else was for
    this round.
    """

    def check(place: str, new: Tensor, old: Tensor) -> Tensor:
        if new.shape != old.shape or new.dtype != old.dtype:
            was, now = f"{tuple(old.shape)} {old.dtype}", f"{tuple(new.shape)} {new.dtype}"
            raise TypeError(
                f"what a client keeps must not change its form: {place} was {was} and became {now}"
            )
        return new

    flat = pytree.flatten(own)
    return pytree.unflatten(
        {place: check(place, flat[place], old) for place, old in pytree.flatten(kept).items()}
    )


def _check_payload(extras: Tree, task: TrainingTask) -> Tree:
    """What goes up must have been announced: the gate, the byte count and the reader of
    `remanence list methods` rely on it.
    """
    announced, sent = set(pytree.flatten(task.payload_spec())), set(pytree.flatten(extras))
    if announced != sent:
        odd = sorted(announced ^ sent)[0]
        problem = (
            "is announced in the part's extras but not returned"
            if odd in announced
            else "is returned but not announced in the part's extras"
        )
        raise TypeError(f"what a part sends must be what it announces: {odd} {problem}")
    return extras


def accept_or_rollback(
    task: TrainingTask,
    differentiate: Differentiate,
    accept: Accept,
    rows: ClientIndices,
    old: ModelState,
    new: ModelState,
    ctx: Context,
) -> ModelState:
    """The result of a phase, if its `accept` says so, else what was there before."""
    kept = accept(
        ctx, old, new, make_client_ops(task, differentiate, {}, new.buffers, None, rows, ctx)
    )
    return ModelState(
        pytree.where(kept, new.params, old.params), pytree.where(kept, new.buffers, old.buffers)
    )
