"""What every network of the table must do, whatever it is made of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from remanence.core.errors import InputError
from remanence.models import MODELS, default_model

CLIENTS, BATCH, CLASSES = 3, 4, 5

# Small versions, so that float64 gradients of three clients take well under a second each.
CASES: dict[str, tuple[str, tuple[int, ...], dict[str, object]]] = {
    "mlp": ("mlp", (1, 4, 5), {"hidden": "7,6"}),
    "mlp without hidden layers": ("mlp", (9,), {"hidden": ""}),
    "cnn": ("cnn", (1, 5, 4), {}),
    "lenet": ("lenet", (2, 17, 16), {}),
    "lenet on large images": ("lenet", (1, 128, 130), {}),
    "resnet18 mixed": ("resnet18", (2, 17, 18), {"norm": "mixed", "width": 4}),
    "resnet18 batch": ("resnet18", (2, 17, 18), {"norm": "batch", "width": 3}),
    "resnet18 group": ("resnet18", (2, 17, 18), {"norm": "group", "width": 4}),
    "densenet121": ("densenet121", (2, 9, 10), {"growth": 4, "blocks": "1,1,1,1"}),
    "shallow_resnet": ("shallow_resnet", (2, 9, 10), {"widths": "3,4,5,6"}),
    "text": ("text", (6,), {"width": 5, "vocabulary": 11}),
}

SPATIAL = (nn.Conv2d, nn.BatchNorm2d, nn.GroupNorm, nn.Linear, nn.Embedding)


def build(case: str) -> nn.Module:
    name, shape, options = CASES[case]
    return MODELS[name](shape, CLASSES, **options)


def draw_inputs(case: str, generator: torch.Generator, *lead: int) -> Tensor:
    name, shape, options = CASES[case]
    if name == "text":
        return torch.randint(
            0, int(str(options["vocabulary"])), (*lead, *shape), generator=generator
        )
    return torch.randn(*lead, *shape, dtype=torch.float64, generator=generator)


def test_every_model_of_the_table_is_a_case() -> None:
    assert {name for name, _, _ in CASES.values()} == set(MODELS)


@pytest.mark.parametrize("case", CASES)
def test_forward_is_head_of_features(case: str) -> None:
    model = build(case).double().eval()
    x = draw_inputs(case, torch.Generator().manual_seed(0), BATCH)
    features = model.features(x)
    assert features.shape == (BATCH, model.head.in_features)
    assert isinstance(model.head, nn.Linear)
    torch.testing.assert_close(
        model(x), features @ model.head.weight.T + model.head.bias, rtol=1e-12, atol=1e-12
    )
    assert model(x).shape == (BATCH, CLASSES)
    # The features must depend on the input, or the equation above would hold for a constant.
    assert not torch.equal(features[0], features[1])


@pytest.mark.parametrize("case", CASES)
def test_layers_are_registered_in_the_order_of_use(case: str) -> None:
    model = build(case).double().eval()
    parameterised = [module for module in model.modules() if isinstance(module, SPATIAL)]
    used: list[nn.Module] = []
    for module in parameterised:
        module.register_forward_hook(lambda module, inputs, output: used.append(module))
    model(draw_inputs(case, torch.Generator().manual_seed(0), BATCH))
    assert [id(module) for module in used] == [id(module) for module in parameterised]
    assert parameterised[-1] is model.head
    assert {id(p) for module in parameterised for p in module.parameters(recurse=False)} == {
        id(p) for p in model.parameters()
    }


@pytest.mark.parametrize("case", CASES)
def test_no_dropout_and_nothing_in_place(case: str) -> None:
    for module in build(case).modules():
        assert not isinstance(module, nn.modules.dropout._DropoutNd)
        assert not getattr(module, "inplace", False)


def stack_of_clients(
    case: str,
) -> tuple[nn.Module, list[nn.Module], dict[str, Tensor], dict[str, Tensor], Tensor, Tensor]:
    """Three differently initialized networks, their stacked parameters and buffers, and a batch
    for each.
    """
    torch.manual_seed(1)
    models = [build(case).double().train() for _ in range(CLIENTS)]
    generator = torch.Generator().manual_seed(2)
    for model in models:
        for name, buffer in model.named_buffers():
            # otherwise all clients would start from equal statistics
            if name.endswith("running_mean"):
                buffer.copy_(torch.randn(buffer.shape, dtype=buffer.dtype, generator=generator))
    params = {
        name: torch.stack([dict(m.named_parameters())[name].detach() for m in models])
        for name, _ in models[0].named_parameters()
    }
    buffers = {
        name: torch.stack([dict(m.named_buffers())[name] for m in models])
        for name, _ in models[0].named_buffers()
    }
    x = draw_inputs(case, generator, CLIENTS, BATCH)
    y = torch.randint(0, CLASSES, (CLIENTS, BATCH), generator=generator)
    return build(case).double().train(), models, params, buffers, x, y


def loss_of(model: nn.Module) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    def loss(
        params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        # BatchNorm writes into what it is given
        fresh = {name: buffer.clone() for name, buffer in buffers.items()}
        logits = functional_call(model, (params, fresh), (x,))
        return nn.functional.cross_entropy(logits, y), fresh

    return loss


@pytest.mark.parametrize("case", CASES)
def test_stacked_gradients_and_buffers_equal_a_plain_loop(case: str) -> None:
    model, models, params, buffers, x, y = stack_of_clients(case)
    untouched = {name: buffer.clone() for name, buffer in buffers.items()}

    grads, new_buffers = vmap(grad(loss_of(model), has_aux=True))(params, buffers, x, y)

    for client, witness in enumerate(models):  # plain autograd, no torch.func
        nn.functional.cross_entropy(witness(x[client]), y[client]).backward()
        for name, parameter in witness.named_parameters():
            torch.testing.assert_close(grads[name][client], parameter.grad, rtol=1e-12, atol=1e-12)
        for name, buffer in witness.named_buffers():
            torch.testing.assert_close(new_buffers[name][client], buffer, rtol=1e-12, atol=1e-12)
    assert all(bool(grads[name].abs().sum() > 0) for name in ("head.weight", next(iter(params))))
    for name, buffer in untouched.items():
        assert torch.equal(buffers[name], buffer)
        assert not torch.equal(new_buffers[name], buffer)


@pytest.mark.parametrize("case", CASES)
def test_stacked_evaluation_equals_a_plain_loop(case: str) -> None:
    model, models, params, buffers, x, _ = stack_of_clients(case)
    model.eval()
    logits = vmap(lambda p, b, rows: functional_call(model, (p, b), (rows,)))(params, buffers, x)
    for client, witness in enumerate(models):
        torch.testing.assert_close(
            logits[client], witness.eval()(x[client]), rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("case", [case for case in CASES if "resnet" in case])
def test_networks_with_norms_train_on_a_single_example(case: str) -> None:
    model = build(case).double().train()
    model(draw_inputs(case, torch.Generator().manual_seed(0), 1)).sum().backward()
    assert all(bool(torch.isfinite(parameter.grad).all()) for parameter in model.parameters())


@pytest.mark.parametrize(
    ("kind", "name", "shape", "expected"),
    [
        ("image", "digits", (1, 8, 8), "mlp"),
        ("image", "digits", (1, 28, 28), "mlp"),
        ("image", "cifar10", (3, 32, 32), "cnn"),
        ("image", "cifar100", (3, 32, 32), "cnn"),
        ("image", "cinic10", (3, 32, 32), "cnn"),
        ("image", "mnist", (1, 28, 28), "cnn"),
        ("image", "femnist", (1, 28, 28), "cnn"),
        ("image", "pacs", (3, 227, 227), "lenet"),
        ("image", "pacs", (3, 32, 32), "lenet"),
        ("image", "photos", (3, 128, 128), "lenet"),
        ("image", "photos", (3, 127, 500), "cnn"),
        ("image", "icons", (3, 15, 40), "mlp"),
        ("image", "icons", (3, 16, 16), "cnn"),
        ("image", "pacs", (3, 12, 12), "mlp"),
        ("table", "diabetes", (8,), "mlp"),
        ("table", "readings", (3, 20, 20), "mlp"),
        ("tokens", "reviews", (50,), "text"),
    ],
)
def test_default_model_suits_the_data_and_can_be_built(
    kind: str, name: str, shape: tuple[int, ...], expected: str
) -> None:
    assert default_model(kind, name, shape) == expected
    with torch.device("meta"):  # shapes only: no numbers are drawn
        MODELS[expected](shape, 3)


def test_default_model_refuses_an_unknown_kind() -> None:
    with pytest.raises(InputError, match="unknown kind of data 'imgae': did you mean image"):
        default_model("imgae", "cifar10", (3, 32, 32))
