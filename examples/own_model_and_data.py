"""
Your own model and data
=======================

Any ``torch.nn.Module`` and any dataset with labels. Here: a table with four classes, and a small
network that is not in the package.
"""

# %%
# A dataset whose items are pairs ``(x, y)``. The examples of three classes overlap; the fourth is
# rare.

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.utils.data import TensorDataset

import remanence as rem

torch.manual_seed(0)
sizes = [400, 400, 400, 60]
centers = torch.tensor([[0.0, 0.0], [2.5, 0.0], [0.0, 2.5], [2.5, 2.5]])
x = torch.cat([center + torch.randn(size, 2) for center, size in zip(centers, sizes, strict=True)])
y = torch.cat([torch.full((size,), label) for label, size in enumerate(sizes)])
data = rem.from_dataset(TensorDataset(x, y), classes=["north", "east", "south", "rare"])

# %%
# Layers of torch, nothing else. The model is checked before training begins: it must accept the
# data's examples and return one number for each class.


class Net(nn.Module):
    """Two hidden layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


run = rem.run(
    method="fedavg+wsm",
    model=Net(),
    data=data,
    partition="dirichlet(alpha=0.3)",
    clients=10,
    rounds=30,
    lr=0.1,
    quiet=True,
)

# %%
# The accuracy of each class, not only their mean: the rare class is the one to look at.

rounds, per_class = run.curve(value="per_class")
figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
for label, name in enumerate(run.metadata["class_names"]):
    axes.plot(rounds, [accuracies[label] for accuracies in per_class], label=name)
axes.set(xlabel="round", ylabel="test accuracy of a class", ylim=(0, 1.02))
axes.legend(ncols=2)
plt.show()

# %%
# ``run.model()`` is the trained ``nn.Module``, in evaluation mode. Its inputs are normalized
# (``data.normalize``) with the mean and deviation of the training examples, which are nearly those
# of all examples.

model = run.model(Net())
grid = torch.cartesian_prod(torch.linspace(-3, 6, 150), torch.linspace(-3, 6, 150))
with torch.no_grad():
    labels = model((grid - x.mean(0)) / x.std(0)).argmax(1)

figure, axes = plt.subplots(figsize=(5, 4.2), layout="constrained")
first, second, classes = (values.view(150, 150) for values in (*grid.T, labels))
axes.contourf(first, second, classes, levels=3, alpha=0.3)
axes.scatter(*x.T, c=y, s=4)
axes.set(xlabel="first column", ylabel="second column")
plt.show()
