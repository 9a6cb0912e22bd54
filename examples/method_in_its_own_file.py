"""
A method in a file of your own
==============================

A method is one function that returns a ``Part``: pure functions for the steps that it changes. It
needs no class, no loop over clients and no code for checkpoints, and it joins with every loss.
"""

# %%
# The idea of this example: the further a client's model has moved from the received one, the more
# its gradients are damped. One slot is enough, a change to the gradient.

import matplotlib.pyplot as plt

import remanence as rem
from remanence.extend import (
    Context,
    Params,
    Part,
    Transform,
    check_method,
    check_range,
    part,
    pytree,
)
from remanence.losses import wsm


@part
def damped(*, strength: float = 1.0) -> Part:
    """Divide the gradient by 1 + strength * ||w - w_t||^2.

    Args:
        strength: 0 is FedAvg.
    """
    check_range(strength >= 0, "damped", "strength", "of at least 0", strength)

    def damp(grads: Params, params: Params, ctx: Context) -> Params:
        distance = pytree.squared_norm(pytree.sub(params, ctx.start.params))
        return pytree.scale(grads, 1 / (1 + ctx.hyper["strength"] * distance))

    return Part("damped", hyper={"strength": strength}, transforms=(Transform("correct", damp),))


# %%
# ``check_method`` trains a small task on two engines and compares them, resumes a run, and finds
# the usual mistakes. It returns the cases that the method refuses: none.

print(check_method(damped()))

# %%
# The method runs as an object, alone and joined to a loss.

settings = {
    "data": "digits",
    "clients": 20,
    "sample": 5,
    "rounds": 15,
    "epochs": 2,
    "batch_size": 16,
    "lr": 0.1,
    "quiet": True,
}
runs = {
    "fedavg": rem.run(method="fedavg", **settings),
    "damped": rem.run(method=damped(strength=2.0), **settings),
    "damped + wsm": rem.run(method=damped(strength=2.0) + wsm(), **settings),
}

# %%
# One seed, so small differences mean nothing.

figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
for name, run in runs.items():
    axes.plot(*run.curve(), label=name)
axes.set(xlabel="round", ylabel="test accuracy", ylim=(0, 1))
axes.legend()
plt.show()
