from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from remanence.core import pytree
from remanence.core.errors import InputError
from remanence.core.model import Model, functionalize, init_module
from remanence.core.rng import Key
from remanence.core.types import ModelState

CLASSES = 3


def rows(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def fresh(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    return init_module(build, Key(seed))


def wrap_double(module: nn.Module, *shape: int, **options: bool) -> Model:
    return functionalize(module, rows(2, *shape), CLASSES, dtype=torch.float64, **options)


class Net(nn.Module):
    """Convolution, norm, dropout, a hidden layer as wide as there are classes, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.hidden = nn.Linear(16, CLASSES)
        self.head = nn.Linear(CLASSES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(self.drop(torch.relu(self.norm(self.conv(x))).flatten(1))))


class Tied(nn.Module):
    """An embedding whose table is also the classifier's weight: as many classes as tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, 4)
        self.head = nn.Linear(4, CLASSES)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens).mean(dim=1))


def key_of(number: int) -> Tensor:
    return Key(number).tensor()


def test_an_attribute_named_head_is_the_head() -> None:
    model = wrap_double(fresh(Net), 1, 4, 4)
    assert model.head == ("head.weight", "head.bias")

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, CLASSES))
            self.late = nn.Linear(5, CLASSES)  # registered last, but not called head

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x) + 0 * self.late(x)

    assert wrap_double(Deep(), 5).head == (
        "head.0.weight",
        "head.0.bias",
        "head.2.weight",
        "head.2.bias",
    )


def test_else_the_last_linear_layer_with_one_output_a_class_is() -> None:
    module = nn.Sequential(
        nn.Linear(5, CLASSES), nn.ReLU(), nn.Linear(CLASSES, CLASSES), nn.Sequential(nn.Identity())
    )
    assert wrap_double(module, 5).head == ("2.weight", "2.bias")


def test_a_model_without_such_a_layer_has_no_head_and_its_features_are_its_outputs() -> None:
    model = wrap_double(nn.Sequential(nn.Conv1d(2, CLASSES, 5), nn.Flatten()), 2, 5)
    out = model.predict(model.initial, rows(4, 2, 5))
    assert model.head == ()
    assert torch.equal(out.features, out.logits)


def test_features_are_the_input_of_the_head() -> None:
    module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, CLASSES)).double()
    model, x = wrap_double(module, 5), rows(6, 5)
    with torch.no_grad():
        expected = module[:2](x)
        for out in (model.predict(model.initial, x), model.apply(*model.initial, x)[0]):
            assert torch.equal(out.features, expected)
            assert torch.equal(out.logits, module(x))


def test_nothing_of_a_finished_pass_is_kept() -> None:
    model = wrap_double(fresh(Net), 1, 4, 4)
    model.apply(*model.initial, rows(2, 1, 4, 4), key_of(0))
    model.predict(model.initial, rows(2, 1, 4, 4))
    assert model.train_features.seen is None
    assert model.eval_features.seen is None


def test_layers_are_counted_from_the_output_and_own_the_norms_after_them() -> None:
    module = nn.Sequential(
        nn.LayerNorm(5),  # nothing before it: a layer of its own
        nn.Linear(5, 4),
        nn.BatchNorm1d(4),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4, elementwise_affine=False)),
        nn.Linear(4, CLASSES),
    )
    model = wrap_double(module, 5)
    assert model.layers == (
        ("6.weight", "6.bias"),
        ("5.0.weight",),
        ("1.weight", "1.bias", "2.weight", "2.bias", "3.weight", "3.bias"),
        ("0.weight", "0.bias"),
    )
    assert model.norms == ("0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias")
    assert model.group(0) == ()
    assert model.group(2) == ("6.weight", "6.bias", "5.0.weight")
    assert set(model.group(4)) == set(model.initial.params)


@pytest.mark.parametrize("depth", [-1, 5])
def test_a_depth_the_model_does_not_have_is_refused(depth: int) -> None:
    model = wrap_double(nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))), 3)
    with pytest.raises(
        InputError,
        match=f"a[n]* aggregation depth of {depth} does not fit this model: it has 4 layers .*"
        " use 0"
        " to 4",
    ):
        model.group(depth)


def test_every_name_of_a_layer_is_a_parameter() -> None:
    """A tied weight has one name; the layers may not speak of another."""
    model = functionalize(Tied(), torch.zeros(2, 4, dtype=torch.int64), CLASSES)
    named = [name for layer in model.layers for name in layer]
    assert sorted(named) == sorted(model.initial.params)


def test_the_users_module_is_left_as_it_was() -> None:
    module = fresh(Net).eval()
    module.conv.weight.requires_grad_(False)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    random = torch.get_rng_state()
    model = functionalize(module, rows(2, 1, 4, 4, dtype=torch.float32), CLASSES)
    model.apply(*model.initial, rows(8, 1, 4, 4, dtype=torch.float32), key_of(1))
    model.initial.params["head.bias"] += 1
    assert not module.training
    assert isinstance(module.drop, nn.Dropout)
    assert not module.conv.weight.requires_grad
    assert not module.head._forward_pre_hooks
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def test_a_pass_changes_nothing_and_can_be_repeated() -> None:
    model, x = wrap_double(fresh(Net), 1, 4, 4), rows(8, 1, 4, 4)
    params, buffers = pytree.clone(model.initial.params), pytree.clone(model.initial.buffers)
    first, new = model.apply(params, buffers, x, key_of(1))
    again, new_again = model.apply(params, buffers, x, key_of(1))
    assert torch.equal(first.logits, again.logits)
    for name, value in model.initial.buffers.items():
        assert torch.equal(buffers[name], value)  # returned, not written in place
        assert not torch.equal(new[name], value)
        assert torch.equal(new[name], new_again[name])
    assert all(torch.equal(params[name], value) for name, value in model.initial.params.items())
    inside = dict(model.train_module.named_buffers())
    assert all(torch.equal(inside[name], value) for name, value in model.initial.buffers.items())


def test_outputs_follow_the_parameters_given() -> None:
    model, x = wrap_double(nn.Sequential(nn.Linear(5, CLASSES)), 5), rows(2, 5)
    zeros = pytree.zeros_like(model.initial.params)
    assert torch.equal(
        model.apply(zeros, {}, x)[0].logits, torch.zeros(2, CLASSES, dtype=torch.float64)
    )
    assert torch.equal(
        model.predict(ModelState(zeros, {}), x).logits,
        torch.zeros(2, CLASSES, dtype=torch.float64),
    )


def test_an_ordinary_module_says_what_the_judge_says() -> None:
    model, x = wrap_double(fresh(Net), 1, 4, 4), rows(8, 1, 4, 4)
    _, buffers = model.apply(*model.initial, x, key_of(0))
    trained = ModelState(pytree.scale(model.initial.params, 1.5), buffers)
    module = model.to_module(trained)
    with torch.no_grad():
        torch.testing.assert_close(
            module(x), model.predict(trained, x).logits, rtol=1e-12, atol=1e-12
        )
        assert not torch.allclose(module(x), model.predict(model.initial, x).logits)
    assert not module.training
    assert type(module) is Net
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_every_ordinary_module_is_a_copy() -> None:
    model = wrap_double(nn.Sequential(nn.Linear(5, CLASSES)), 5)
    first, second = model.to_module(model.initial), model.to_module(model.initial)
    with torch.no_grad():
        first[0].weight.zero_()
    assert not torch.equal(first[0].weight, second[0].weight)
    assert torch.equal(second[0].weight, model.initial.params["0.weight"])


def test_tied_weights_stay_tied() -> None:
    tokens = torch.tensor([[0, 1, 1], [2, 2, 0]])
    module = fresh(Tied).double()
    model = functionalize(module, tokens, CLASSES, dtype=torch.float64)
    assert set(model.initial.params) == {"table.weight", "head.bias"}
    changed = ModelState(pytree.scale(model.initial.params, 2.0), {})
    out = model.predict(changed, tokens)
    table = changed.params["table.weight"]
    torch.testing.assert_close(
        out.logits,
        table[tokens].mean(dim=1) @ table.T + changed.params["head.bias"],
        rtol=1e-12,
        atol=1e-12,
    )
    restored = model.to_module(changed)
    assert restored.head.weight is restored.table.weight
    torch.testing.assert_close(restored(tokens).detach(), out.logits, rtol=1e-12, atol=1e-12)
    gradients = torch.func.grad(lambda p: model.apply(p, {}, tokens)[0].logits.square().sum())(
        model.initial.params
    )
    module(tokens).square().sum().backward()
    torch.testing.assert_close(
        gradients["table.weight"], module.table.weight.grad, rtol=1e-12, atol=1e-12
    )


def test_weights_are_drawn_from_the_key() -> None:
    random = torch.get_rng_state()
    first, again, other = (
        init_module(lambda: nn.Linear(5, 4), Key(number)) for number in (1, 1, 2**64 - 1)
    )
    assert torch.equal(first.weight, again.weight)
    assert not torch.equal(first.weight, other.weight)
    assert torch.equal(torch.get_rng_state(), random)


def test_only_a_module_is_a_model() -> None:
    with pytest.raises(InputError, match=r"the model must be a torch.nn.Module, not dict"):
        init_module(dict, Key(0))


def test_the_precision_asked_for_is_that_of_everything() -> None:
    model = wrap_double(fresh(Net), 1, 4, 4)
    assert {value.dtype for value in model.initial.params.values()} == {torch.float64}
    assert model.initial.buffers["norm.num_batches_tracked"].dtype == torch.int64
    assert model.has_convolutions
    assert not wrap_double(nn.Sequential(nn.Linear(5, CLASSES)), 5).has_convolutions


def test_half_precision_inside_still_gives_single_precision_outside() -> None:
    module, x = (
        fresh(lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, CLASSES))),
        rows(3, 5, dtype=torch.float32),
    )
    half, whole = (
        functionalize(module, x, CLASSES, autocast=dtype) for dtype in (torch.bfloat16, None)
    )
    out, exact = half.predict(half.initial, x), whole.predict(whole.initial, x)
    assert out.logits.dtype == out.features.dtype == torch.float32
    assert not torch.equal(out.logits, exact.logits)
    torch.testing.assert_close(out.logits, exact.logits, rtol=0.05, atol=0.05)


class Views(nn.Module):
    """Images as rows, after a convolution or as they are; the bits of a number are left alone."""

    def __init__(self, convolves: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 2, 1) if convolves else nn.Identity()
        self.head = nn.Linear((2 if convolves else 3) * 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = (
            self.first(x)
            .view(torch.int64 if x.dtype == torch.float64 else torch.int32)
            .view(x.dtype)
        )
        answer: Tensor = self.head(
            y.view(len(x), -1).view_as(torch.empty(len(x), self.head.in_features))
        )
        return answer


@pytest.mark.parametrize("convolves", [True, False])
def test_images_viewed_as_rows_may_lie_with_the_channels_innermost(convolves: bool) -> None:
    x = torch.randn(3, 3, 2, 2)
    model = functionalize(Views(convolves), x, 2)
    assert model.uses_view
    turned = x.contiguous(memory_format=torch.channels_last)
    plain = model.eval_module(x)
    for predict in (
        lambda x: model.predict(model.initial, x).logits,
        lambda x: model.apply(*model.initial, x)[0].logits,
    ):
        for images in (x, turned):
            torch.testing.assert_close(predict(images), plain)
    with pytest.raises(RuntimeError, match="view"):
        model.eval_module(turned)  # as it was given, it cannot


def test_other_networks_are_called_as_they_are() -> None:
    assert not functionalize(
        nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten(), nn.Linear(8, 2)), torch.randn(3, 3, 2, 2), 2
    ).uses_view
    assert not functionalize(nn.Linear(3, 2), torch.randn(3, 3), 2).uses_view
