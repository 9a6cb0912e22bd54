"""Compiled steps of LeNet and ResNet-18 on the GPU against `sequential` on the CPU, in float64.

The methods of a network together fill every slot that a local step reads (`STEP_SLOTS`); FedBN
needs norms, which LeNet does not have, and FedReg's three gradients a step would take minutes to
compile in a ResNet. All clients have two full batches: one form of the step is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from gpu.cases import Case, compare_with_sequential, counted
from gpu.engine_cases import many_steps

from remanence.engines import frozen_prefix
from remanence.experiment.build import BuiltExperiment
from remanence.kernels import conv_channels_last, conv_per_client
from remanence.testing.toy_task import small_experiment

# What a local step calls or reads; a registered part fills each of them.
STEP_SLOTS = (
    "loss",
    "loss_terms",
    "regularizers",
    "gradient",
    "project",
    "transforms",
    "step_tracker",
    "phases",
    "frozen",
    "personal",
    "client_state",
    "broadcast",
    "modify_model",
)

HAST = "hast(peers=2, depth=2, finetune_epochs=2)"
COMPILED = {
    "lenet": (
        "scaffold+wsm",
        "fednova+fedprox(mu=0.1)",
        "fedreg(ascent=1)",
        "moon(projection=8)",
        "fedbabu+fedntd",
        HAST,
    ),
    "resnet18": (
        "scaffold+wsm",
        "fednova+fedprox(mu=0.1)",
        "fedbn+tce",
        "moon(projection=8)",
        "fedbabu+fedntd",
        HAST,
    ),
}
# Seconds on an H200: estimated, with a compiler that starts cold beside seven others.
SECONDS = {"lenet": 30, "resnet18": 100}


def compiled_experiment(network: str, method: str, device: str, **changes: Any) -> BuiltExperiment:
    """Three clients of 8 images each, two of them in a round, in batches of 4."""
    keys = {
        "data.name": "synthetic(samples=60, classes=4, shape='3x18x18', test=0.25)",
        "data.partition": "dirichlet(alpha=0.5, samples=10)",
        "clients.count": 3,
        "clients.sample": 2,
        "model": network,
        "device": device,
    }
    return small_experiment(method, {**keys, **changes})


def compiled_method(network: str, method: str, device: str) -> float:
    """Two rounds; on a GPU the wide layers of a ResNet go through the kernels for that layout."""
    make = partial(compiled_experiment, network, method)
    with (
        counted(conv_channels_last, "convolve") as wide,
        counted(conv_per_client, "_for_each_client") as strided,
        counted(frozen_prefix.PrefixSplit, "stack_with_cached_features") as cached,
    ):
        largest = compare_with_sequential(make, device, "compiled", rounds=2)
    expected = network == "resnet18" and device != "cpu"
    assert (bool(wide), bool(strided)) == (expected, expected), "other kernels than expected"
    assert cached or (network, method) != ("lenet", HAST), "no frozen prefix was cached"
    return largest


def cases() -> Iterator[Case]:
    for network, methods in COMPILED.items():
        for method in methods:
            yield Case(
                f"compiled {network}, {method}",
                partial(compiled_method, network, method),
                SECONDS[network],
            )
    yield Case(
        "masked steps of few sizes, compiled",
        partial(compare_with_sequential, many_steps, execution="compiled", rounds=2),
        40,
    )
