"""Mutations of valid inputs by seed: the same number gives the same bytes, so that every failure
can be reproduced.
"""

from __future__ import annotations

import random
import resource
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

NUMBERS = (
    0,
    1,
    2,
    127,
    128,
    255,
    256,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**63 - 1,
    2**64 - 1,
)
WORDS = (
    "nan", "-1", "1e999", "0", "2147483648", "9" * 400, "", "null", "true", "[]", "[[[[", "{}", '"', "'", "\\", "\x00", "é", "\ud7ff", "=", "+", "(", ")", ",",
    "..", "/", "../../x", "inf", "-inf", "1_000", "0x10", ".", "-", "\n", "\t", " ", "|", ":", "os:system", "a" * 3000, "[" * 2000, "(" * 2000,
)  # fmt: skip
SECONDS = 10.0  # of computing that one input may take
MEMORY = 1 << 30  # bytes beyond what the process has


def spoil(good: bytes, seed: int) -> bytes:
    """One to three changes to a valid input; one input in twenty is random bytes."""
    draw = random.Random(seed)
    if draw.random() < 0.05:
        return draw.randbytes(draw.randrange(0, 2 * min(len(good), 4096) + 2))
    content = bytearray(good)
    for _ in range(draw.randint(1, 3)):
        content = bytearray(draw.choice(CHANGES)(content, draw))
    return bytes(content)


def spoil_text(good: str, seed: int) -> str:
    """As `spoil`, for text: characters and words are swapped, removed, repeated or replaced by odd
    ones.
    """
    draw = random.Random(seed)
    if draw.random() < 0.05:
        return "".join(
            chr(draw.choice((draw.randrange(32, 127), draw.randrange(1, 0xD800))))
            for _ in range(draw.randrange(200))
        )
    text = good
    for _ in range(draw.randint(1, 4)):
        text = draw.choice(TEXT_CHANGES)(text, draw)
    return text


def _somewhere(content: bytearray, draw: random.Random) -> tuple[int, int]:
    """A range of the content; half of them are in the first 128 bytes, where headers are."""
    end = len(content) if draw.random() < 0.5 else min(len(content), 128)
    first = draw.randrange(end + 1)
    return first, min(len(content), first + draw.choice((1, 2, 4, 8, 64, 1024)))


def _flip(content: bytearray, draw: random.Random) -> bytearray:
    for _ in range(draw.randint(1, 8)):
        if content:
            place = draw.randrange(len(content) if draw.random() < 0.5 else min(len(content), 128))
            content[place] ^= 1 << draw.randrange(8)
    return content


def _cut(content: bytearray, draw: random.Random) -> bytearray:
    return content[: draw.randrange(len(content) + 1)]


def _remove(content: bytearray, draw: random.Random) -> bytearray:
    first, last = _somewhere(content, draw)
    return content[:first] + content[last:]


def _splice(content: bytearray, draw: random.Random) -> bytearray:
    (first, last), (place, _) = _somewhere(content, draw), _somewhere(content, draw)
    return content[:place] + content[first:last] * draw.choice((1, 1, 3)) + content[place:]


def _forge(content: bytearray, draw: random.Random) -> bytearray:
    """A number where a header may have one."""
    kind = draw.choice("BHIQ")
    value = draw.choice(NUMBERS) & ((1 << 8 * struct.calcsize(kind)) - 1)
    written = struct.pack(draw.choice("<>") + kind, value)
    place, _ = _somewhere(content, draw)
    content[place : place + len(written)] = written
    return content


def _scribble(content: bytearray, draw: random.Random) -> bytearray:
    first, last = _somewhere(content, draw)
    content[first:last] = draw.randbytes(last - first)
    return content


def _append(content: bytearray, draw: random.Random) -> bytearray:
    return content + draw.randbytes(draw.choice((1, 7, 100)))


CHANGES: tuple[Callable[[bytearray, random.Random], bytearray], ...] = (
    _flip,
    _flip,
    _cut,
    _remove,
    _splice,
    _forge,
    _forge,
    _scribble,
    _append,
)


def _stretch(text: str, draw: random.Random) -> tuple[int, int]:
    first = draw.randrange(len(text) + 1)
    return first, min(len(text), first + draw.choice((0, 1, 1, 2, 5, 20)))


def _put_word(text: str, draw: random.Random) -> str:
    first, last = _stretch(text, draw)
    return text[:first] + draw.choice(WORDS) + text[last:]


def _drop(text: str, draw: random.Random) -> str:
    first, last = _stretch(text, draw)
    return text[:first] + text[last:]


def _repeat(text: str, draw: random.Random) -> str:
    first, last = _stretch(text, draw)
    return text[:last] + text[first:last] * draw.choice((1, 2, 50)) + text[last:]


def _move(text: str, draw: random.Random) -> str:
    (first, last), (place, _) = _stretch(text, draw), _stretch(text, draw)
    return text[:place] + text[first:last] + text[place:]


def _change_number(text: str, draw: random.Random) -> str:
    places = [place for place, sign in enumerate(text) if sign.isdigit()]
    if not places:
        return _put_word(text, draw)
    place = draw.choice(places)
    return (
        text[:place]
        + draw.choice((*map(str, NUMBERS), "-1", "0.5", "1e308", "nan", ""))
        + text[place + 1 :]
    )


TEXT_CHANGES: tuple[Callable[[str, random.Random], str], ...] = (
    _put_word,
    _put_word,
    _drop,
    _repeat,
    _move,
    _change_number,
    _change_number,
)


@contextmanager
def bounded() -> Iterator[Callable[[], None]]:
    """Limit memory and computing time of each input; call the yielded function before each. Only
    computing time counts, so a busy machine causes no failure.
    """
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"an input took more than {SECONDS} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, limits[1]))
    try:
        yield lambda: signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS) and None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGVTALRM, before)
