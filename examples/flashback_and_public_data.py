"""
Public data at the server
=========================

Flashback lets clients and server learn from each other's predictions, and trains at the server on a
small public set. The examples of the public set are held out of the clients' data.
"""

# %%
# Three methods. For all of them 100 examples are held out, so that their clients have the same data;
# only Flashback trains on them. Without ``public=100`` it stops and names this option.

import matplotlib.pyplot as plt

import remanence as rem
from remanence.metrics.phase_decomposition import phase_decomposition

methods = ["fedavg", "fedavg+wsm", "flashback"]
settings = {
    "data": "digits",
    "partition": "dirichlet(alpha=0.1)",
    "clients": 20,
    "sample": 5,
    "rounds": 15,
    "epochs": 2,
    "batch_size": 16,
    "lr": 0.1,
    "public": 100,
    "record_local": True,
    "quiet": True,
}
comparison = rem.compare(methods, **settings)
runs = dict(zip(methods, comparison.runs, strict=True))

# %%
# On the left the accuracy, on the right what each phase of a round loses (above zero) and gains
# (below). Flashback has a third phase, training at the server.

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
for method, run in runs.items():
    left.plot(*run.curve(), label=method)
left.set(xlabel="round", ylabel="test accuracy", ylim=(0, 1))
left.legend()

phases = ["local", "aggregation", "server"]
for place, run in enumerate(runs.values()):
    means = phase_decomposition(run.ledger).phase_means()
    for phase, color in zip(phases, ["tab:red", "tab:blue", "tab:green"], strict=True):
        lost = 100 * means.get(phase, 0.0)
        shift = 0.25 * phases.index(phase) - 0.25
        right.bar(place + shift, lost, width=0.25, color=color, label="" if place else phase)
right.axhline(0, color="gray", linewidth=0.8)
right.set(ylabel="points lost in a round", xticks=range(len(methods)), xticklabels=methods)
right.legend()
plt.show()
