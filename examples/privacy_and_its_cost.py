"""
Privacy, and what it costs
==========================

``dp_sgd`` clips the gradient of every example and adds noise to it. More noise means a smaller
epsilon, a stronger guarantee for each example, and a lower accuracy.
"""

# %%
# Three noise levels and no noise at all. Epsilon is computed for the rounds that were trained.

import matplotlib.pyplot as plt

import remanence as rem

noises = [1, 2, 4]
settings = {
    "data": "digits",
    "clients": 10,
    "partition": "iid",
    "rounds": 10,
    "batch_size": 32,
    "lr": 0.2,
    "quiet": True,
}
plain = rem.run(method="fedavg", **settings)
private = [rem.run(method=f"fedavg+dp_sgd(clip=1, noise={noise})", **settings) for noise in noises]

# %%
# Epsilon of an example against accuracy. A simulation shows the numbers that a private run would
# have. It is not private itself, because its noise follows from the seed.

accuracy = [run.curve()[1][-1] for run in private]
epsilon = [run.curve(value="epsilon_example")[1][-1] for run in private]
figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
axes.plot(epsilon, accuracy, marker="o", label="fedavg+dp_sgd")
for noise, x, y in zip(noises, epsilon, accuracy, strict=True):
    axes.annotate(f"noise {noise}", (x, y), xytext=(6, -12), textcoords="offset points")
axes.axhline(plain.curve()[1][-1], color="gray", linestyle="--", label="fedavg, not private")
axes.set(xlabel="epsilon of an example (delta 1e-5)", ylabel="test accuracy", ylim=(0, 1))
axes.legend(loc="lower right")
plt.show()
