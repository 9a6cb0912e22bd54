"""
Drift, without a server
=======================

No server: every client has a model of its own and averages it with those of its peers. The clients
are in two clusters with different digits, and at each time step the clusters are drawn again.
"""

# %%
# Three ways to choose peers: at random, by similarity (HAST), and not at all.

import matplotlib.pyplot as plt

import remanence as rem
from remanence.metrics.drift import summarize_drift

methods = ["random(peers=3)", "hast(peers=2)", "local"]
rounds, time_steps = 8, 4
comparison = rem.compare(
    methods,
    data="digits",
    model="mlp(hidden=64)",
    clients=10,
    drift="random(clusters=2)",
    concepts="label(groups='0 1 2 3 4|5 6 7 8 9')",
    time_steps=time_steps,
    rounds=rounds,
    samples=60,
    epochs=2,
    batch_size=8,
    optimizer="adam(lr=0.001)",
    quiet=True,
)

# %%
# Each client is evaluated on the digits that it has at that time. At a dashed line the clusters are
# drawn again: about half of the clients have other digits from then on.

figure, axes = plt.subplots(figsize=(8, 3.8), layout="constrained")
for method, run in zip(methods, comparison.runs, strict=True):
    axes.plot(*run.curve(), label=method)
for step in range(1, time_steps):
    axes.axvline(step * rounds + 0.5, color="gray", linestyle="--", linewidth=0.8)
axes.set(xlabel="round", ylabel="accuracy on a client's own digits", ylim=(0, 1.02))
axes.legend()
plt.show()

# %%
# Performance is the accuracy at the end of a time step. Robustness is the drop after a drift.

for method, run in zip(methods, comparison.runs, strict=True):
    summary = summarize_drift(run)
    print(
        f"{method:16s} performance {100 * summary.performance:.1f} %,"
        f" drop after a drift {100 * summary.robustness:.1f} points"
    )
