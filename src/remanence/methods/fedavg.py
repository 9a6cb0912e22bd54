"""FedAvg: train locally, average the models by number of examples.

McMahan et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS
2017, algorithm 1. Every slot does this by default, so the part is empty.
"""

from __future__ import annotations

from remanence.core.compose import part
from remanence.core.slots import Part


@part
def fedavg() -> Part:
    """The mean of the clients' models, each weighted by its number of training examples."""
    return Part("fedavg")
