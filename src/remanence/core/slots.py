"""`Part`, the slots of a method, and what its functions can read and call.

A method is made of parts; a part is a named set of pure functions and numbers, one field for each
slot. Client-side functions are written for one client, with tensors that have no client axis: an
engine runs them client by client or maps them over a stack. Shapes: B examples in a batch, C
classes, K clients in the experiment, k clients in a cohort.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from remanence.core.declarations import UNDECLARED, Disclosure, Mechanism, Remedy
from remanence.core.pytree import SEPARATOR, Params, Tree
from remanence.core.rng import Key
from remanence.core.types import Batch, ClientStats, ModelState, Output, Reply, TaskInfo


class Context(NamedTuple):
    """What a client-side function can read. `broadcast`, `client_state`, `tracker_state` and
    `hyper` are those of the function's own part.
    """

    client: Tensor  # int64
    round: Tensor  # int64, from 1
    # the model this client starts from: the one it received, with its personal parts in place
    start: ModelState
    broadcast: Tree  # what the server sent besides the model
    client_state: Tree  # what this client keeps
    tracker_state: Tree  # what the part's tracker holds after the steps so far
    stats: ClientStats
    step: Tensor  # int64, from 0, within the phase
    steps: Tensor  # int64: local steps of the phase; in on_client_end, of all phases
    hyper: dict[str, Tensor]  # the part's numbers
    optimizer_hparams: dict[str, Tensor]  # the optimizer's numbers: lr, momentum, weight_decay ...
    key: Tensor  # of this client and step: fold in a word of your own before you draw
    info: TaskInfo


class Grad(Protocol):
    """The gradient of the whole objective at `params`, with respect to them or to the inputs;
    the batch may have soft targets.
    """

    def __call__(self, params: Params, batch: Batch, wrt: str = "params") -> Any: ...


class PerExampleGrad(Protocol):
    """The gradient of every example of a batch, each tensor [B, ...], and that of the
    regularizers, which read no example.

    An example's gradient must not depend on the client's other examples: parts that read label
    counts are refused.
    """

    def __call__(self, params: Params, batch: Batch) -> tuple[Params, Params]: ...


class Forward(Protocol):
    """Another model on the batch's inputs, or on `x`: evaluation mode, no gradient, no buffer
    update; cached within a step.
    """

    def __call__(self, model: ModelState, x: Tensor | None = None) -> Output: ...


class Predict(Protocol):
    """A model on all of the client's examples of a split ("train" or "valid"), in evaluation
    mode.
    """

    def __call__(self, model: ModelState, split: str = "train") -> tuple[Output, Batch]: ...


class ClientOps(NamedTuple):
    """What a client-side function can have computed for it."""

    grad: Grad
    forward: Forward
    predict: Predict
    # (None) -> first state, (state) -> next: see `client_ops._make_effective_steps`
    effective_steps: Callable[[Tree | None], Tree]
    per_example_grad: PerExampleGrad


Loss = Callable[[Output, Batch, Context], Tensor]  # -> [B]


LossTerm = Callable[[Output, Batch, ClientOps, Context], Tensor]  # -> [B], added to the loss


Regularizer = Callable[[Params, Context], Tensor]  # -> scalar, added to the weighted mean


Gradient = Callable[[Params, Batch, ClientOps, Context], Params]


# -> client_state, payload; before the first local step, where ctx.start is the received model. The
# state is merged into what the client keeps; names that the part's first value does not have live
# until the end of the round
OnClientStart = Callable[[Context, ClientOps], tuple[Tree, Tree]]


# -> client_state, payload; the model is the trained one, ctx.steps those of all phases
OnClientEnd = Callable[[Context, ModelState, ClientOps], tuple[Tree, Tree]]


# (old, new) -> bool scalar: is the phase's result kept?
Accept = Callable[[Context, ModelState, ModelState, ClientOps], Tensor]


STAGES = ("correct", "clip", "noise")  # transforms do not commute: they run in this order


class Transform(NamedTuple):
    """A change to the gradient before the optimizer sees it."""

    stage: str
    function: Callable[[Params, Params, Context], Params]  # (grads, params, ctx) -> grads


class StepTracker(NamedTuple):
    """Accumulates a value over the local steps, which functions read as ctx.tracker_state: in
    the next step, and in on_client_end.
    """

    init: Callable[[Context, ClientOps], Tree]  # -> tracker_state
    # (tracker_state, model before, model after, batch, ops, ctx) -> tracker_state
    step: Callable[[Tree, ModelState, ModelState, Batch, ClientOps, Context], Tree]


class Phase(NamedTuple):
    """A stretch of local training. Exactly one of epochs and steps is positive."""

    epochs: int = 0
    steps: int = 0
    # all names -> those trained; None: all
    trainable: Callable[[TaskInfo, Sequence[str]], Sequence[str]] | None = None
    accept: Accept | None = None


class Optimizer(NamedTuple):
    """What a client does with a gradient."""

    name: str
    hparams: Mapping[str, float]  # lr and the others, which functions read as ctx.optimizer_hparams
    init: Callable[[Params], Tree]  # -> opt_state
    # (params, grads, opt_state, ctx) -> params, opt_state
    step: Callable[[Params, Params, Tree, Context], tuple[Params, Tree]]


class ServerContext(NamedTuple):
    """What a server-side function can read. `state` and `hyper` are those of the function's own
    part.
    """

    round: int  # from 1
    start: ModelState  # the model the clients received
    state: Tree
    hyper: dict[str, Tensor]
    key: Key
    info: TaskInfo


class Aggregate(NamedTuple):
    """How replies become one step of the global model, in two halves so that it can stream over
    chunks and workers.
    """

    # (weights [k], replies, srv) -> a tree that can be summed
    partial: Callable[[Tensor, Reply, ServerContext], Tree]
    finalize: Callable[[Tree, ServerContext], Params]  # (sum, srv) -> delta
    # (current, sent [k, ...], weights [k]) -> buffers; None: averaged
    buffers: Callable[[Params, Params, Tensor], Params] | None = None
    # is `partial` over all replies the sum of `partial` over pieces of them? Then it may run where
    # the replies lie
    is_decomposable: bool = False


ClientWeights = Callable[[Reply, ServerContext], Tensor]  # -> [k]; the round normalizes it to sum 1


# (params, delta, srv) -> params, state
ServerUpdate = Callable[[Params, Params, ServerContext], tuple[Params, Tree]]


UpdateServerState = Callable[[Reply, ServerContext], Tree]  # -> state, after the new model is made


# (output, batch, index, loss_args) -> loss [B]; `index` [B] are positions in the public set,
# `loss_args` what `fit` was called with
PublicLoss = Callable[[Output, Batch, Tensor, Tree], Tensor]


class Fit(Protocol):
    """Server-side training on the public set: minimizes the mean of `loss(out, batch, index,
    loss_args)`.

    All that the loss reads of the round comes through the loss's arguments, because the steps are
    captured once and replayed in every round. The clients' optimizer, batch size and learning
    rates are the defaults; frozen parameters stay. `patience` steps without a better accuracy on
    the `validation` share of the set end the training, and the best model is kept.
    """

    def __call__(
        self,
        model: ModelState,
        loss: PublicLoss,
        given: Tree,
        *,
        epochs: int = 0,
        steps: int = 0,
        batch: int = 0,
        optimizer: Optimizer | None = None,
        cosine: bool = False,
        validation: float = 0.0,
        patience: int = 0,
    ) -> ModelState: ...


class ServerOps(NamedTuple):
    """What a server-side function can have computed on the public set."""

    fit: Fit
    # stacked models [m, ...] -> logits on the whole public set [m, n, C]
    predict_logits: Callable[[ModelState], Tensor]
    labels: Tensor  # of the public set [n]; -1 where it has none
    local_models: Callable[[Reply], ModelState]  # the clients' complete models, stacked


# (merged, previous, replies, ops, srv) -> model
ServerTrain = Callable[[ModelState, ModelState, Reply, ServerOps, ServerContext], ModelState]


class PeerContext(NamedTuple):
    """What a function that selects peers can read: all K clients at once, so that it needs no
    loop over them.
    """

    round: int  # from 1, within the time step
    state: Tree  # the part's state of all clients, [K, ...]
    adjacency: Tensor  # [K, K] bool: can client k reach client j in this round? Never itself
    # [K] int64: whose data are alike; no client of a real federation knows it
    true_cluster: Tensor
    hyper: dict[str, Tensor]
    key: Key
    info: TaskInfo


class PeerAverage(NamedTuple):
    """An average of a client's model with those of some peers, weighted by their numbers of
    training examples.

    Peers enter as they were at the end of the round before, the client's own model as averaged so
    far: averages follow each other.
    """

    peers: Tensor  # [K, m] int64, -1: no peer
    names: tuple[str, ...] | None = None  # parameters it covers; None: all, and the buffers


class PeerSelection(NamedTuple):
    """Which peers clients average with where there is no server."""

    init: Callable[[TaskInfo], Tree]  # -> state [K, ...]
    # -> [K, m]: peers whose models each client evaluates on its training examples; -1: none
    candidates: Callable[[PeerContext], Tensor]
    # (candidates, losses [K, m], ctx) -> averages, state
    select: Callable[[Tensor, Tensor, PeerContext], tuple[tuple[PeerAverage, ...], Tree]]
    extra_bytes: int = 0  # bytes a candidate sends for every client there is, besides its model
    # the leaf [K, K] of the state that holds how similar two clients seem, which is recorded
    similarity: str = ""


class AssignmentDecision(NamedTuple):
    """Which of several global models each client uses from now on, and how they are made.

    Row i of `mixing_matrix` holds the shares of the old models in the new model i.
    """

    model_of_client: np.ndarray  # [K] int64: a row of the mixing matrix
    mixing_matrix: np.ndarray  # [new models, old models] float64, rows summing to 1
    state: Tree


class ModelAssignment(NamedTuple):
    """Several global models, and which client uses which: decided at the start of every time
    step.
    """

    init: Callable[[TaskInfo], Tree]  # -> state
    # (loss or error of every model on every client's training examples [K, models], the model of
    # each client [K], examples of each client [K], state, hyper) -> decision
    decide: Callable[
        [np.ndarray, np.ndarray, np.ndarray, Tree, dict[str, Tensor]], AssignmentDecision
    ]
    # "loss" or "accuracy": what the first argument is made of (accuracy as 1 - accuracy)
    measure: str = "loss"


@dataclass(frozen=True)
class Part:
    """One named set of slots: what stands between two `+`."""

    name: str
    # as constructed; each is in `hyper`, in `static`, or never reaches a function
    arguments: Mapping[str, Any] = field(default_factory=dict)
    # numbers, which reach the functions as tensors: ctx.hyper, srv.hyper
    hyper: Mapping[str, float] = field(default_factory=dict)
    # arguments that decide the shape of the program, and that functions read as Python values
    static: tuple[str, ...] = ()
    # one of each in a whole method
    loss: Loss | None = None
    gradient: Gradient | None = None
    optimizer: Optimizer | None = None
    client_weights: ClientWeights | None = None
    aggregate: Aggregate | None = None
    server_update: ServerUpdate | None = None
    server_train: ServerTrain | None = None
    # the experiment's phase -> those of this method
    phases: Callable[[Phase], tuple[Phase, ...]] | None = None
    peers: PeerSelection | None = None  # no server: every client has a model of its own
    model_assignment: ModelAssignment | None = None  # several global models
    # (a client's label counts [C], a key for it) -> the counts that all functions read
    privatize_stats: Callable[[Tensor, Key], Tensor] | None = None
    # fine-tuning by which a client makes its personal model, for evaluation alone; see
    # `rounds/personalization.py`
    personalize: Phase | None = None
    # any number
    loss_terms: tuple[LossTerm, ...] = ()
    regularizers: tuple[Regularizer, ...] = ()
    transforms: tuple[Transform, ...] = ()
    on_client_start: OnClientStart | None = None
    on_client_end: OnClientEnd | None = None
    step_tracker: StepTracker | None = None
    update_server_state: UpdateServerState | None = None
    # parameters that keep their initial values everywhere
    frozen: Callable[[TaskInfo], Sequence[str]] | None = None
    # parameters and buffers that every client keeps for itself
    personal: Callable[[TaskInfo], Sequence[str]] | None = None
    # a client's first state; fixes names, shapes and types
    client_state: Callable[[ModelState, ClientStats, TaskInfo], Tree] | None = None
    # names, shapes and types of what one client sends besides the model
    payload: Callable[[ModelState, TaskInfo], Tree] | None = None
    server_state: Callable[[ModelState, TaskInfo], Tree] | None = None  # the server's first state
    broadcast: Callable[[ServerContext], Tree] | None = (
        None  # what the server sends besides the model
    )
    # before a run
    # (network, classes) -> the network this method needs
    modify_model: Callable[[Any, int], Any] | None = None
    # raises InputError where the method cannot work
    validate: Callable[[Optimizer, TaskInfo], None] | None = None
    centralized: bool = False  # all data in one place: the centralized baseline
    # declarations, which the rest of the program reads instead of names
    # by path of a payload leaf, or of a subtree of it; see `disclosure`
    discloses: Mapping[str, Disclosure] = field(default_factory=dict)
    mechanisms: tuple[Mechanism, ...] = ()  # protective noise that its functions draw
    addresses: tuple[Remedy, ...] = ()  # the kinds of forgetting that it reduces
    reads_label_counts: bool = False  # do its functions read ctx.stats.label_counts?
    reads_inputs: bool = True  # does `loss` read more of a batch than labels and weights?
    payload_description: str = ""  # what clients send besides the model, in words
    needs_public_data: bool = False

    def __add__(self, other: Part | Method) -> Method:
        return Method((self,)) + other

    def disclosure(self, path: str) -> Disclosure:
        """What a leaf of the payload reveals: by the longest declared path that holds it.

        Args:
            path: of the leaf within this part's payload, such as "change/fc.weight".

        Returns:
            The declaration; `UNDECLARED` where there is none.
        """
        names = path.split(SEPARATOR)
        for depth in range(len(names), 0, -1):
            found = self.discloses.get(SEPARATOR.join(names[:depth]))
            if found is not None:
                return found
        return UNDECLARED


@dataclass(frozen=True)
class Method:
    """Parts joined by `+`. Whether they fit together is checked by `compose.check`."""

    parts: tuple[Part, ...]

    def __add__(self, other: Part | Method) -> Method:
        return Method(self.parts + (other.parts if isinstance(other, Method) else (other,)))
