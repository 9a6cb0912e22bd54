"""
See forgetting, and stop it
===========================

Each client has examples of a few digits only. It trains on them, and its model forgets the digits
that it lacks. The re-weighted softmax (WSM) leaves the logits of absent classes alone.
"""

# %%
# Two methods on the same data, with the same clients in each round. ``record_local`` also evaluates
# every client's model after local training: this is where forgetting happens.

import matplotlib.pyplot as plt
import numpy as np

import remanence as rem
from remanence.metrics.forgetting import local_forgetting

methods = ["fedavg", "fedavg+wsm"]
comparison = rem.compare(
    methods,
    data="digits",
    partition="dirichlet(alpha=0.1)",
    clients=20,
    sample=5,
    rounds=20,
    epochs=2,
    batch_size=16,
    lr=0.1,
    record_local=True,
    quiet=True,
)
runs = dict(zip(methods, comparison.runs, strict=True))

# %%
# On the left the accuracy of the global model. On the right what each client's model lost in one
# local training: the drop of accuracy from the received model, as a mean over the ten digits.

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for method, run in runs.items():
    left.plot(*run.curve(), label=method)
left.set(xlabel="round", ylabel="test accuracy", ylim=(0, 1))
left.legend()

lost = [100 * local_forgetting(run.ledger).value for run in runs.values()]
right.boxplot(lost, tick_labels=methods, widths=0.5)
right.set(ylabel="points lost in one local training")
plt.show()

# %%
# The medians say the same in two numbers.

for method, values in zip(methods, lost, strict=True):
    median = np.median(values)
    print(f"{method:12s} the median client loses {median:.0f} points")

# %%
# One seed is not enough to compare accuracies. ``rem.compare(..., seeds=3)`` repeats both methods,
# and ``rem.write_report`` writes the whole report.
