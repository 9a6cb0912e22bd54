"""
Choose a learning rate fairly
=============================

A method that is compared at a learning rate tuned for another one loses for the wrong reason.
``rem.search`` finds a learning rate for each method, on validation data.
"""

# %%
# Nine values around a guess, in steps of half a magnitude; more where the best one is the largest or
# the smallest; then quarter magnitudes around the best. The test set is not used.

import matplotlib.pyplot as plt

import remanence as rem

settings = {
    "data": "digits",
    "clients": 10,
    "sample": 5,
    "rounds": 8,
    "batch_size": 16,
    "seeds": 2,
    "quiet": True,
}
methods = ["fedavg", "fedadam"]
found = {method: rem.search(method, around=0.1, **settings) for method in methods}

# %%
# What was tried for the first method.

print(found["fedavg"].table())
for method, result in found.items():
    print(method, "-", result.describe())

# %%
# The curves have different maxima. A value that diverged is left out.

figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
for method, result in found.items():
    tried = [t for t in result.tried if not t.diverged]
    axes.errorbar(
        [t.value for t in tried],
        [t.accuracy for t in tried],
        [t.deviation or 0 for t in tried],
        marker="o",
        capsize=3,
        label=method,
    )
    axes.axvline(result.best, color="gray", linestyle="--", linewidth=0.8)
axes.set(xlabel="learning rate", ylabel="validation accuracy", xscale="log", ylim=(0, 1))
axes.legend()
plt.show()
