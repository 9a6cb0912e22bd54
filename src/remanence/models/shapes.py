"""What a network may ask of one example's shape and of its own options, and the sentences that
say so before anything is built.
"""

from __future__ import annotations

from remanence.core.errors import InputError


def _written(shape: tuple[int, ...]) -> str:
    return "x".join(str(side) for side in shape) or "()"


def check_task(model: str, shape: tuple[int, ...], classes: int) -> None:
    """Refuse what no network can work with: an empty example, or nothing to tell apart."""
    if not shape or min(shape) < 1:
        raise InputError(
            f"model {model}: an example of shape {_written(shape)} holds no numbers; give at"
            " least one number per example"
        )
    if classes < 2:
        raise InputError(
            f"model {model}: {classes} class leaves nothing to tell apart; give data with at"
            " least 2 classes"
        )


def image_sides(
    model: str, shape: tuple[int, ...], *, smallest: int, reason: str
) -> tuple[int, int, int]:
    """Channels, height and width of an image whose sides are both at least `smallest` pixels;
    `reason` says what does not fit otherwise.
    """
    if len(shape) != 3:
        raise InputError(
            f"model {model}: an example of shape {_written(shape)} is not an image"
            " (channels x height x width); use mlp or text"
        )
    channels, height, width = shape
    if min(height, width) < smallest:
        cure = "mlp or cnn" if min(height, width) >= 4 and model != "cnn" else "mlp"
        raise InputError(
            f"model {model}: {height}x{width} images are too small for {reason} (at least"
            f" {smallest}x{smallest}); use {cure}"
        )
    return channels, height, width


def at_least_one(model: str, option: str, value: int) -> int:
    """An option that counts something."""
    if value < 1:
        raise InputError(
            f"model {model}: {option}={value} is below 1; give a positive whole number"
        )
    return value


def parse_widths(model: str, option: str, text: str) -> tuple[int, ...]:
    """Layer widths written as one word, because options are plain values.

    >>> parse_widths("mlp", "hidden", "200, 100")
    (200, 100)
    >>> parse_widths("mlp", "hidden", "")
    ()
    """
    # An expression such as mlp(hidden=200) may hand over the number itself.
    words = [word.strip() for word in str(text).split(",")] if str(text).strip() else []
    if not all(word.isdecimal() and len(word) <= 6 and int(word) > 0 for word in words):
        raise InputError(
            f"model {model}: {option}={text!r} is not a list of widths from 1 to 999999; write"
            f" it like {option}='200,100'"
        )
    return tuple(int(word) for word in words)
