"""FedJAX: its federated averaging, with our networks written once more in JAX (images with
channels last, which suits XLA on a CPU).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fedjax
import jax
import jax.numpy as jnp
import numpy as np
from driver import PeerJob, begin

if not hasattr(jax, "tree_map"):
    # FedJAX still calls it by the name that newer releases of JAX have dropped
    jax.tree_map = jax.tree_util.tree_map

Params = dict[str, jax.Array]
# Where the layers with weights stand in our networks: convolutions, then dense layers; the head
# comes after them.
LAYERS = {
    "cnn": (("body.0", "body.3"), ("body.7",)),
    "lenet": (("body.0", "body.3"), ("body.7", "body.9")),
}
PADDING = {"cnn": "SAME", "lenet": "VALID"}


def apply(model: str, params: Params, x: jax.Array) -> jax.Array:
    """x: [B, h, w, c] -> logits [B, classes]"""
    convolutions, dense = LAYERS[model]
    for name in convolutions:
        x = jax.lax.conv_general_dilated(
            x,
            params[f"{name}.weight"],
            (1, 1),
            PADDING[model],
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        x = jax.nn.relu(x + params[f"{name}.bias"])
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = x.reshape(len(x), -1)
    for name in dense:
        x = jax.nn.relu(x @ params[f"{name}.weight"] + params[f"{name}.bias"])
    return x @ params["head.weight"] + params["head.bias"]


def from_torch(model: str, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """PyTorch's layouts to ours here: [out, in, h, w] -> [h, w, in, out]; [out, in] -> [in,
    out], the first one reading pixels before channels.
    """
    (*_, last), (first, *_) = LAYERS[model]
    channels = len(weights[f"{last}.bias"])
    turned = {}
    for name, value in weights.items():
        if value.ndim == 4:
            value = value.transpose(2, 3, 1, 0)
        elif name == f"{first}.weight":
            value = (
                value.reshape(len(value), channels, -1).transpose(2, 1, 0).reshape(-1, len(value))
            )
        elif value.ndim == 2:
            value = value.T
        turned[name] = np.ascontiguousarray(value)
    return turned


def to_torch(model: str, params: Params) -> dict[str, np.ndarray]:
    """The way back."""
    (*_, last), (first, *_) = LAYERS[model]
    channels = len(params[f"{last}.bias"])
    turned = {}
    for name, array in params.items():
        value = np.asarray(array)
        if value.ndim == 4:
            value = value.transpose(3, 2, 0, 1)
        elif name == f"{first}.weight":
            value = (
                value.reshape(-1, channels, value.shape[1])
                .transpose(2, 1, 0)
                .reshape(value.shape[1], -1)
            )
        elif value.ndim == 2:
            value = value.T
        turned[name] = value
    return turned


class PlannedDataset(fedjax.ClientDataset):
    """A client whose batches come in the order of the plan; FedJAX would fill the last batch up
    with rows of the next epoch.
    """

    def __init__(self, job: PeerJob, client: int):
        x, y = job.examples(client)
        super().__init__(
            {"x": np.ascontiguousarray(x.transpose(0, 2, 3, 1)), "y": y.astype(np.int32)}
        )
        self._orders, self._batch = job.orders(client), job.batch

    def shuffle_repeat_batch(
        self, hparams: Any = None, **kwargs: Any
    ) -> Iterator[dict[str, np.ndarray]]:
        for order in self._orders:
            for first in range(0, len(order), self._batch):
                rows = order[first : first + self._batch]
                yield {name: values[rows] for name, values in self.raw_examples.items()}


def make_optimizer(job: PeerJob) -> fedjax.Optimizer:
    if job.optimizer == "Adam":
        beta1, beta2 = job.optimizer_hparams["betas"]
        return fedjax.optimizers.adam(
            job.optimizer_hparams["lr"], b1=beta1, b2=beta2, eps=job.rule["eps"]
        )
    return fedjax.optimizers.sgd(job.optimizer_hparams["lr"])


def main() -> None:
    job, turns = begin()

    def loss(params: Params, batch: dict[str, jax.Array], key: jax.Array) -> jax.Array:
        said = jax.nn.log_softmax(apply(job.model, params, batch["x"]))
        return -jnp.take_along_axis(said, batch["y"][:, None], axis=1).mean()

    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        jax.grad(loss),
        make_optimizer(job),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=job.batch),
    )
    state = algorithm.init(jax.tree_util.tree_map(jnp.asarray, from_torch(job.model, job.start())))
    clients = [
        (str(client).encode(), PlannedDataset(job, client), jax.random.PRNGKey(client))
        for client in job.cohort
    ]
    turns.ready("fedjax", "jax", note="1 process, threads as XLA likes")
    while True:
        turns.wait()
        state, _ = algorithm.apply(state, clients)
        jax.block_until_ready(state.params)
        turns.done(lambda: to_torch(job.model, state.params))  # noqa: B023 called at once


if __name__ == "__main__":
    main()
