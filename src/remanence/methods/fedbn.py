"""FedBN: normalization layers stay with their client, so that clients whose inputs differ in
appearance share everything else.

Li, Jiang, Zhang, Kamp, Dou, "FedBN: federated learning on non-IID features via local batch
normalization", ICLR 2021.

    algorithm 1: average all layers but normalization   slot personal   normalization_params
"""

from __future__ import annotations

from remanence.core.compose import part
from remanence.core.errors import InputError
from remanence.core.slots import Optimizer, Part
from remanence.core.types import TaskInfo


@part
def fedbn() -> Part:
    """Weights and statistics of the normalization layers are trained, but never leave their client;
    the server averages the rest.

    The paper treats batch norm; group and layer norm are kept local as well. In the global model
    these layers keep their initial values: evaluate the personal models (`model = "personal"` in
    the metrics), which are the method's result.
    """
    return Part("fedbn", personal=normalization_params, validate=require_normalization)


def normalization_params(info: TaskInfo) -> tuple[str, ...]:
    return info.norms + info.buffers


def require_normalization(optimizer: Optimizer, info: TaskInfo) -> None:
    # with affine=False a batch norm layer has statistics and no parameters
    if not info.norms and not any(name.endswith("running_mean") for name in info.buffers):
        raise InputError(
            "fedbn keeps normalization layers local, and this model has none: choose one"
            " with them, such as resnet18, or use fedavg"
        )
