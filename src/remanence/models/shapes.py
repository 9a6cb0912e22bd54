"""Checks of the shape of an example and of a network's options, before the network is built."""

from __future__ import annotations

from remanence.core.errors import InputError


def _format(shape: tuple[int, ...]) -> str:
    return "x".join(str(side) for side in shape) or "()"


def check_task(model: str, shape: tuple[int, ...], classes: int) -> None:
    """Raise an error for an empty example or for fewer than two classes."""
    if not shape or min(shape) < 1:
        raise InputError(
            f"model {model}: an example of shape {_format(shape)} holds no numbers; give at"
            " least one number per example"
        )
    if classes < 2:
        raise InputError(
            f"model {model}: {classes} class is not enough for a classifier; give data with at"
            " least 2 classes"
        )


def image_sides(
    model: str, shape: tuple[int, ...], *, smallest: int, reason: str
) -> tuple[int, int, int]:
    """Return channels, height and width of an image shape.

    Args:
        model: the name of the network, for errors.
        shape: of one example.
        smallest: the smallest side in pixels.
        reason: what needs this size, for errors.
    """
    if len(shape) != 3:
        raise InputError(
            f"model {model}: an example of shape {_format(shape)} is not an image"
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
    """Return an option that must be 1 or more."""
    if value < 1:
        raise InputError(
            f"model {model}: {option}={value} is below 1; give a positive whole number"
        )
    return value


def parse_widths(model: str, option: str, text: str) -> tuple[int, ...]:
    """Parse layer widths, which are written as one string because options are plain values.

    >>> parse_widths("mlp", "hidden", "200, 100")
    (200, 100)
    >>> parse_widths("mlp", "hidden", "")
    ()
    """
    # An expression such as mlp(hidden=200) passes the number itself.
    words = [word.strip() for word in str(text).split(",")] if str(text).strip() else []
    if not all(word.isdecimal() and len(word) <= 6 and int(word) > 0 for word in words):
        raise InputError(
            f"model {model}: {option}={text!r} is not a list of widths from 1 to 999999; write"
            f" it like {option}='200,100'"
        )
    return tuple(int(word) for word in words)
