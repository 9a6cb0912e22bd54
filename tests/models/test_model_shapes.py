"""Every refusal is one sentence with the thing, the cause and the cure; every stated smallest
size is the smallest that works.
"""

from __future__ import annotations

import re

import pytest
import torch

from remanence.core.errors import InputError
from remanence.models import MODELS

Shape = tuple[int, ...]
Options = dict[str, object]

# model, shape, options, and what follows "model <name>: "
REFUSED: list[tuple[str, Shape, Options, str]] = [
    (
        "lenet",
        (1, 8, 8),
        {},
        "8x8 images are too small for two 5x5 convolutions with pooling (at least 16x16); use"
        " mlp or cnn",
    ),
    (
        "lenet",
        (3, 40, 15),
        {},
        "40x15 images are too small for two 5x5 convolutions with pooling (at least 16x16);"
        " use mlp or cnn",
    ),
    ("cnn", (1, 3, 9), {}, "3x9 images are too small for two 2x2 poolings (at least 4x4); use mlp"),
    (
        "resnet18",
        (1, 3, 3),
        {},
        "3x3 images are too small for three halvings and a 3x3 pooling (at least 17x17); use mlp",
    ),
    (
        "shallow_resnet",
        (1, 8, 8),
        {},
        "8x8 images are too small for three halvings with BatchNorm (at least 9x9); use mlp or cnn",
    ),
    (
        "cnn",
        (30,),
        {},
        "an example of shape 30 is not an image (channels x height x width); use mlp or text",
    ),
    (
        "text",
        (3, 32, 32),
        {},
        "an example of 3 dimensions is not a sequence of tokens; use cnn or mlp for images",
    ),
    (
        "mlp",
        (),
        {},
        "an example of shape () holds no numbers; give at least one number per example",
    ),
    (
        "cnn",
        (0, 28, 28),
        {},
        "an example of shape 0x28x28 holds no numbers; give at least one number per example",
    ),
    (
        "mlp",
        (4,),
        {"hidden": "20,-1"},
        "hidden='20,-1' is not a list of widths from 1 to 999999; write it like hidden='200,100'",
    ),
    (
        "mlp",
        (4,),
        {"hidden": "20,0"},
        "hidden='20,0' is not a list of widths from 1 to 999999; write it like hidden='200,100'",
    ),
    (
        "mlp",
        (4,),
        {"hidden": "20,"},
        "hidden='20,' is not a list of widths from 1 to 999999; write it like hidden='200,100'",
    ),
    (
        "mlp",
        (4,),
        {"hidden": "1000000"},
        "hidden='1000000' is not a list of widths from 1 to 999999; write it like hidden='200,100'",
    ),
    (
        "shallow_resnet",
        (3, 32, 32),
        {"widths": "8,16"},
        "widths='8,16' names 2 blocks, not 4; write it like widths='64,128,256,512'",
    ),
    (
        "resnet18",
        (3, 32, 32),
        {"width": 5},
        "width=5 cannot be split into 2 groups; give an even width or norm='batch'",
    ),
    ("resnet18", (3, 32, 32), {"width": 0}, "width=0 is below 1; give a positive whole number"),
    ("text", (9,), {"vocabulary": 0}, "vocabulary=0 is below 1; give a positive whole number"),
    ("text", (9,), {"width": -3}, "width=-3 is below 1; give a positive whole number"),
]


@pytest.mark.parametrize(("name", "shape", "options", "sentence"), REFUSED)
def test_what_does_not_fit_is_refused_in_one_sentence(
    name: str, shape: Shape, options: Options, sentence: str
) -> None:
    with pytest.raises(InputError, match=f"^model {name}: {re.escape(sentence)}$"):
        MODELS[name](shape, 10, **options)


@pytest.mark.parametrize("name", MODELS)
def test_a_single_class_is_refused(name: str) -> None:
    with pytest.raises(
        InputError,
        match=f"^model {name}: 1 class is not enough for a classifier; give data with at least 2"
        " classes$",
    ):
        MODELS[name]((3, 32, 32), 1)


def test_an_unknown_norm_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        InputError, match=r"^unknown norm of resnet18 'layer': known: batch, group, mixed$"
    ):
        MODELS["resnet18"]((3, 32, 32), 10, norm="layer")


@pytest.mark.parametrize(
    ("name", "smallest", "options"),
    [
        ("cnn", 4, {}),
        ("lenet", 16, {}),
        ("resnet18", 17, {"width": 2}),
        ("shallow_resnet", 9, {"widths": "2,2,2,2"}),
    ],
)
def test_the_smallest_size_works_and_one_pixel_less_is_refused(
    name: str, smallest: int, options: Options
) -> None:
    model = MODELS[name]((1, smallest, smallest), 3, **options).train()
    assert model(torch.ones(1, 1, smallest, smallest)).shape == (1, 3)
    for height, width in [(smallest - 1, smallest), (smallest, smallest - 1)]:
        with pytest.raises(InputError, match="too small"):
            MODELS[name]((1, height, width), 3, **options)


@pytest.mark.parametrize("name", ["cnn", "lenet", "resnet18", "shallow_resnet"])
def test_every_size_up_to_forty_and_around_the_large_ones_fits_its_own_classifier(
    name: str,
) -> None:
    """Odd sizes are where computed and real flatten sizes part; without numbers (meta) all can
    be tried.
    """
    for side in [*range(17, 41), 126, 127, 128, 129, 130, 227]:
        with torch.device("meta"):
            model = MODELS[name]((3, side, side + 1), 7)
            assert model(torch.empty(2, 3, side, side + 1)).shape == (2, 7)
