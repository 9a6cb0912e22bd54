"""`Part` and the slots of a method. What its functions can read and call: `contexts.py`.

A method is made of parts; a part is a named set of pure functions and numbers, one field for each
slot. Client-side functions are written for one client, with tensors that have no client axis: an
engine runs them client by client or maps them over a stack. Shapes: B examples in a batch, C
classes, K clients in the experiment, k clients in a cohort.

Which parameters a dictionary holds:

    ctx.start.params, the trained model      all
    params and grads of a local step         those that the phase trains, personal ones included
    delta, reply.params                      those that clients send: `info.communicated`
    the params of server_update              all; it returns all
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from remanence.core.contexts import ClientOps, Context, PeerContext, ServerContext, ServerOps
from remanence.core.declarations import AT_CLIENT, UNDECLARED, Disclosure, Mechanism, Remedy
from remanence.core.pytree import SEPARATOR, Params, Tree
from remanence.core.rng import Key
from remanence.core.types import Batch, ClientStats, ModelState, Output, Reply, TaskInfo

Loss = Callable[[Output, Batch, Context], Tensor]  # -> [B]

LossTerm = Callable[[Output, Batch, ClientOps, Context], Tensor]  # -> [B], added to the loss

# (params trained in this phase, ctx) -> scalar, added to the mean loss of the batch. Personal
# parameters are among them, so they get the term, too, as in fedprox. It must loop over the names
# of `params` and must not look up others in ctx.client_state, because `ops.effective_steps` calls
# it with a model of a single parameter. A term that needs client state by name is a transform; the
# recorded loss and `ops.grad` then leave it out
Regularizer = Callable[[Params, Context], Tensor]

Gradient = Callable[[Params, Batch, ClientOps, Context], Params]

# (params after the optimizer's step, ...) -> those that the next step starts from
Project = Callable[[Params, Batch, ClientOps, Context], Params]

# -> client_state, payload; before the first local step. The returned entries replace those of the
# client's state; names that `Part.client_state` does not have are dropped at the end of the round
OnClientStart = Callable[[Context, ClientOps], tuple[Tree, Tree]]

# -> client_state, payload; the model is the trained one, ctx.steps those of all phases. The state
# has only names that `Part.client_state` has
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
    """Consecutive local steps that train the same parameters. Exactly one of epochs and steps is
    positive.
    """

    epochs: int = 0
    steps: int = 0
    # (info, all parameter names) -> those trained; None: all
    trainable: Callable[[TaskInfo, Sequence[str]], Sequence[str]] | None = None
    accept: Accept | None = None


class Optimizer(NamedTuple):
    """An optimizer of the clients, as pure functions."""

    name: str
    hparams: Mapping[str, float]  # lr and others; functions read them as ctx.optimizer_hparams
    init: Callable[[Params], Tree]  # -> opt_state
    # (params, grads, opt_state, ctx) -> params, opt_state
    step: Callable[[Params, Params, Tree, Context], tuple[Params, Tree]]


class Aggregate(NamedTuple):
    """The aggregation of replies to one update of the global model, in two halves so that workers
    can compute partial sums. Both halves receive the same key: draw noise in one of them, or fold
    in a word of your own.
    """

    # (weights [k], replies, srv) -> a tree that can be summed
    partial: Callable[[Tensor, Reply, ServerContext], Tree]
    finalize: Callable[[Tree, ServerContext], Params]  # (sum, srv) -> delta
    # (current, sent [k, ...], weights [k]) -> buffers; None: averaged
    buffers: Callable[[Params, Params, Tensor], Params] | None = None
    # is `partial` of all replies the sum of `partial` over subsets? Then workers may compute it
    is_decomposable: bool = False


# -> [k]; later multiplied by the factor of late replies (`round.staleness`) and normalized to sum
# 1. `aggregators.mean.uniform_weights` weights all clients equally. Aggregations that ignore
# weights (median, trimmed_mean, krum) cannot be joined with a part that fills this slot
ClientWeights = Callable[[Reply, ServerContext], Tensor]

# (all params, delta of those that clients send, srv) -> all params, the part's complete state.
# A server optimizer updates its state, such as momentum, here: update_server_state runs too late.
# `delta` is the aggregated update: with `uniform_weights` and the mean, srv.num_replies * delta is
# the sum of the clients' updates. A part whose server_update relies on the mean fills
# `aggregate=mean`, so that it cannot be joined with another aggregation,
# and declares `equal_weights` if late replies must not have less weight
ServerUpdate = Callable[[Params, Params, ServerContext], tuple[Params, Tree]]

# -> the part's complete state. It runs after the new model is made, too late to change it
UpdateServerState = Callable[[Reply, ServerContext], Tree]

# (merged, previous, replies, ops, srv) -> model
ServerTrain = Callable[[ModelState, ModelState, Reply, ServerOps, ServerContext], ModelState]


class PeerAverage(NamedTuple):
    """An average of a client's model with those of some peers, weighted by their numbers of
    training examples.

    The averages of a round are computed one after the other: the client's model is the result of
    the one before, and the peers' models are those at the end of the previous round.
    """

    peers: Tensor  # [K, m] int64, -1: no peer
    names: tuple[str, ...] | None = None  # parameters it covers; None: all, and the buffers


class PeerSelection(NamedTuple):
    """The choice of the peers that clients average with, where there is no server."""

    init: Callable[[TaskInfo], Tree]  # -> state [K, ...]
    # -> [K, m]: peers whose models each client evaluates on its training examples; -1: none
    candidates: Callable[[PeerContext], Tensor]
    # (candidates, losses [K, m], ctx) -> averages, state
    select: Callable[[Tensor, Tensor, PeerContext], tuple[tuple[PeerAverage, ...], Tree]]
    # bytes that a candidate sends besides its whole model, for each client of the experiment
    extra_bytes: int = 0
    # name of the leaf [K, K] of the state with estimated similarities, which is recorded
    similarity: str = ""


class AssignmentDecision(NamedTuple):
    """The global model that each client uses from now on, and the new models as averages of the
    old ones.
    """

    model_of_client: np.ndarray  # [K] int64: a new model
    # [new models, old models] float64, rows summing to 1: new model i is the average of the old
    # models with the weights of row i
    mixing_matrix: np.ndarray
    state: Tree


class ModelAssignment(NamedTuple):
    """Several global models: which client uses which is decided at the start of every time step."""

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
    """A named set of functions and numbers, one field for each slot; an empty slot means FedAvg's
    behavior.
    """

    name: str
    # arguments of the constructor, recorded by `@part`
    arguments: Mapping[str, Any] = field(default_factory=dict)
    # numbers that functions read as tensors: ctx.hyper, srv.hyper; runs that differ only in these
    # can train in one stack
    hyper: Mapping[str, float] = field(default_factory=dict)
    # arguments that change which operations run; functions read them as Python values
    static: tuple[str, ...] = ()
    # slots that at most one part of a method fills
    loss: Loss | None = None
    gradient: Gradient | None = None
    optimizer: Optimizer | None = None
    project: Project | None = None
    client_weights: ClientWeights | None = None
    aggregate: Aggregate | None = None
    server_update: ServerUpdate | None = None
    server_train: ServerTrain | None = None
    # the experiment's phase -> those of this method
    phases: Callable[[Phase], tuple[Phase, ...]] | None = None
    peers: PeerSelection | None = None  # without a server: every client has its own model
    model_assignment: ModelAssignment | None = None  # several global models
    # (a client's label counts [C], a key for it) -> the counts that all functions read
    privatize_stats: Callable[[Tensor, Key], Tensor] | None = None
    # fine-tuning of a client's personal model, which is evaluated and then discarded
    personalize: Phase | None = None
    # slots that any number of parts fill
    loss_terms: tuple[LossTerm, ...] = ()
    regularizers: tuple[Regularizer, ...] = ()
    transforms: tuple[Transform, ...] = ()
    on_client_start: OnClientStart | None = None
    on_client_end: OnClientEnd | None = None
    step_tracker: StepTracker | None = None
    update_server_state: UpdateServerState | None = None
    # parameters that keep their initial values everywhere
    frozen: Callable[[TaskInfo], Sequence[str]] | None = None
    # parameters and buffers that every client keeps and never sends
    personal: Callable[[TaskInfo], Sequence[str]] | None = None
    # a client's first state
    client_state: Callable[[ModelState, ClientStats, TaskInfo], Tree] | None = None
    # names, shapes and dtypes of what one client sends besides the model
    payload: Callable[[ModelState, TaskInfo], Tree] | None = None
    server_state: Callable[[ModelState, TaskInfo], Tree] | None = None  # the server's first state
    # what the server sends besides the model
    broadcast: Callable[[ServerContext], Tree] | None = None
    # before a run: (network, classes) -> the network this method needs
    modify_model: Callable[[Any, int], Any] | None = None
    # raises InputError where the method cannot work
    validate: Callable[[Optimizer, TaskInfo], None] | None = None
    centralized: bool = False  # trains on the examples of all clients in one place
    # declarations, which the rest of the program reads instead of the names of methods
    # by path of a payload leaf, or of a subtree of it; see `disclosure`
    discloses: Mapping[str, Disclosure] = field(default_factory=dict)
    mechanisms: tuple[Mechanism, ...] = ()  # protective noise that its functions draw
    addresses: tuple[Remedy, ...] = ()  # the kinds of forgetting that it reduces
    # do its functions read ctx.stats.label_counts? Undeclared, reading them raises an InputError
    reads_label_counts: bool = False
    # do ctx.stats.label_counts, as all parts of the method read them, include validation examples?
    counts_validation_labels: bool = False
    # is its loss constant, and its gradient 0, for a client whose examples have a single class?
    needs_two_classes: bool = False
    reads_inputs: bool = True  # does `loss` read more of a batch than labels and weights?
    payload_description: str = ""  # what clients send besides the model, in words
    needs_public_data: bool = False
    # is it wrong where late replies have less weight? Experiments with `round.late=use` and
    # `round.staleness` above 0 are then refused
    equal_weights: bool = False

    def __add__(self, other: Part | Method) -> Method:
        return Method((self,)) + other

    def disclosure(self, path: str) -> Disclosure:
        """The declaration of a leaf of the payload.

        Args:
            path: The path of the leaf within this part's payload, such as "change/fc.weight".

        Returns:
            The declaration of the path, or of the smallest subtree that contains it and is
            declared; `UNDECLARED` where there is none.
        """
        names = path.split(SEPARATOR)
        for depth in range(len(names), 0, -1):
            found = self.discloses.get(SEPARATOR.join(names[:depth]))
            if found is not None:
                return found
        return UNDECLARED

    def protects(self, path: str) -> bool:
        """Whether the part adds noise to a leaf of its payload before it leaves the client."""
        return any(
            mechanism.noise > 0
            and mechanism.drawn_at == AT_CLIENT
            and f"{path}{SEPARATOR}".startswith(f"{mechanism.covers}{SEPARATOR}")
            for mechanism in self.mechanisms
        )


@dataclass(frozen=True)
class Method:
    """Parts joined by `+`. Whether they fit together is checked by `compose_checks.check`."""

    parts: tuple[Part, ...]

    def __add__(self, other: Part | Method) -> Method:
        return Method(self.parts + (other.parts if isinstance(other, Method) else (other,)))
