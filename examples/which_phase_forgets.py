"""
Which phase forgets
===================

A round changes the global model twice: clients train it, and the server aggregates what they send.
The change of accuracy of each class is the sum of both parts, exactly.
"""

# %%
# One run that records the clients' models, too.

import matplotlib.pyplot as plt
import numpy as np

import remanence as rem
from remanence.metrics.phase_decomposition import phase_decomposition

run = rem.run(
    method="fedavg",
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
parts = phase_decomposition(run.ledger)

# %%
# For each digit: the points lost in local training, and the points that aggregation brings back.
# Positive numbers are forgetting. The black marks are the sum, the change in an average round.

classes = np.arange(len(run.metadata["class_names"]))
figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
for shift, (phase, color) in enumerate([("local", "tab:red"), ("aggregation", "tab:blue")]):
    mean = 100 * np.nanmean(parts.parts[phase], axis=0)
    axes.bar(classes + 0.36 * shift - 0.18, mean, width=0.36, color=color, label=phase)
change = 100 * np.nanmean(parts.change, axis=0)
axes.plot(classes, change, "_", color="black", markersize=18, label="both")
axes.axhline(0, color="gray", linewidth=0.8)
axes.set(xlabel="digit", ylabel="points lost in a round", xticks=classes)
axes.legend(ncols=3)
plt.show()

# %%
# The same as one sentence for each finding.

for diagnosis in rem.diagnose([run]):
    for finding in diagnosis.findings:
        print("-", finding.sentence)
