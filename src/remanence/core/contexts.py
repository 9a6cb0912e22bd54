"""What the functions of a part can read, and what they can have the engine compute.

The slots that these functions fill are in `slots.py`. Shapes: B examples in a batch, C classes, K
clients in the experiment, k clients in a cohort.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from remanence.core.pytree import Params, Tree
from remanence.core.rng import Key
from remanence.core.types import Batch, ClientStats, ModelState, Output, Reply, TaskInfo

if TYPE_CHECKING:
    from remanence.core.slots import Optimizer


class Context(NamedTuple):
    """What a client-side function can read. `broadcast`, `client_state`, `tracker_state` and
    `hyper` are those of the function's own part.
    """

    client: Tensor  # int64
    round: Tensor  # int64, from 1
    # the model this client starts from: the received one, with the parameters and buffers that the
    # client keeps in place
    start: ModelState
    broadcast: Tree  # what the server sent besides the model
    client_state: Tree  # what this client keeps
    tracker_state: Tree  # what the part's tracker holds after the steps so far
    stats: ClientStats
    step: Tensor  # int64, from 0, within the phase
    steps: Tensor  # int64: local steps of the phase; in on_client_end, of all phases
    hyper: dict[str, Tensor]  # the part's hyper-parameters
    optimizer_hparams: dict[str, Tensor]  # of the optimizer: lr, momentum, weight_decay ...
    key: Tensor  # of this client and step; call fold_in with a word of your own before drawing
    info: TaskInfo


class Grad(Protocol):
    """The gradient of the whole objective at `params`, with respect to them; the batch may have
    soft targets.

    With respect to the inputs (`wrt="inputs"`) it is that of the model in evaluation mode, in which
    an example's loss depends on no other example.
    """

    def __call__(self, params: Params, batch: Batch, wrt: str = "params") -> Any: ...


class PerExampleGrad(Protocol):
    """The gradient of every example of a batch, each tensor [B, ...], and that of the
    regularizers, which read no example.

    An example's gradient must not depend on the client's other examples: parts that read label
    counts are rejected.
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
    """What a client-side function can have the engine compute."""

    grad: Grad
    # the gradient of the whole objective over all of the client's training examples
    full_grad: Callable[[Params], Params]
    forward: Forward
    predict: Predict
    # counts, step by step, the plain gradient steps that have the same effect as the local steps:
    # (None) -> first state, (state) -> next state
    effective_steps: Callable[[Tree | None], Tree]
    per_example_grad: PerExampleGrad


class ServerContext(NamedTuple):
    """What a server-side function can read. `state` and `hyper` are those of the function's own
    part.

    Server-side functions run in this order: `broadcast`; then, with the accepted replies,
    `client_weights`, `aggregate`, `server_update`, `server_train`, `update_server_state`. Each
    reads the state that the functions before it returned.
    """

    round: int  # from 1
    start: ModelState  # the model the clients received
    num_replies: int  # accepted replies; 0 in `broadcast`
    state: Tree
    hyper: dict[str, Tensor]
    key: Key
    info: TaskInfo


# (output, batch, index, loss_args) -> loss [B]; `index` [B] are positions in the public set,
# `loss_args` those of the call of `fit`
PublicLoss = Callable[[Output, Batch, Tensor, Tree], Tensor]


class Fit(Protocol):
    """Server-side training on the public set: minimizes the mean of `loss(out, batch, index,
    loss_args)`.

    Steps are captured once and replayed in every round, so the loss must read everything that
    changes between rounds from `loss_args`. Frozen parameters do not change.

    Args:
        model: The model to start from.
        loss: The loss of each example.
        loss_args: Tensors that `loss` reads.
        epochs: Epochs over the public set, if `steps` is 0.
        steps: Steps.
        batch: Batch size; 0: that of the clients.
        optimizer: None: that of the clients, with their learning rate.
        cosine: Whether the learning rate decreases to 0 by half a cosine.
        validation: Fraction of the public set on which the accuracy is evaluated.
        patience: Stop after this many steps without a better accuracy and return the best model;
            0: never.
    """

    def __call__(
        self,
        model: ModelState,
        loss: PublicLoss,
        loss_args: Tree,
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
    """What a server-side function can have the engine compute on the public set."""

    fit: Fit
    # one model, or stacked models [m, ...] -> logits on the whole public set, [n, C] or [m, n, C]
    predict_logits: Callable[[ModelState], Tensor]
    labels: Tensor  # of the public set [n]; -1 where it has none
    # the clients' models, stacked, with the parameters that clients do not send
    local_models: Callable[[Reply], ModelState]


class PeerContext(NamedTuple):
    """What a function that selects peers can read: all K clients at once, so that it needs no
    loop over them.
    """

    round: int  # from 1, within the time step
    state: Tree  # the part's state of all clients, [K, ...]
    # [K, K] bool: can client k reach client j in this round? False on the diagonal
    adjacency: Tensor
    # [K] int64: the cluster of each client's data, which no client of a real federation knows
    true_cluster: Tensor
    hyper: dict[str, Tensor]
    key: Key
    info: TaskInfo
