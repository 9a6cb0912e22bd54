"""Attacks: what malicious clients do in an experiment, such as `sign_flip(fraction=0.1)`.

- `attack.py`: `Attack`, a set of functions of which most attacks fill one, and `AttackerSelection`.
- `data.py`: attacks on training examples; `poison.py` applies them. `models.py`: on the models that
  clients send. `metadata.py`: on their counts. `protocol.py`: replies for another round or sent
  twice. `probes.py`: on the losses that peers measure.
- `adversary.py`: `Adversary`, the attacks of an experiment and the clients that carry them out.

`ATTACKS` lists all attacks. This package imports from `data` and `core`. Begin with `attack.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from remanence.attacks.adversary import Adversary
from remanence.attacks.attack import Attack, DataInfo
from remanence.attacks.data import backdoor, label_flip
from remanence.attacks.metadata import count_lies
from remanence.attacks.models import a_little_is_enough, gaussian, nan, scaling, sign_flip
from remanence.attacks.poison import data_info
from remanence.attacks.probes import similarity_lies
from remanence.attacks.protocol import replay, stale
from remanence.core import expressions
from remanence.core.errors import InputError

__all__ = [
    "ATTACKS",
    "Adversary",
    "Attack",
    "DataInfo",
    "check_attacks",
    "data_info",
    "parse_attacks",
]

ATTACKS: dict[str, Callable[..., Attack]] = {
    "a_little_is_enough": a_little_is_enough,
    "backdoor": backdoor,
    "count_lies": count_lies,
    "gaussian": gaussian,
    "label_flip": label_flip,
    "nan": nan,
    "replay": replay,
    "scaling": scaling,
    "sign_flip": sign_flip,
    "similarity_lies": similarity_lies,
    "stale": stale,
}


def parse_attacks(text: str) -> tuple[Attack, ...]:
    """Parse attacks joined by `+`; they act in this order. An empty text or `none` is no attack.

    >>> [attack.name for attack in parse_attacks("label_flip+scaling(factor=5)")]
    ['label_flip', 'scaling']
    """
    if text.strip() in ("", "none"):
        return ()
    attacks = tuple(
        expressions.instantiate(call, ATTACKS, "attack") for call in expressions.parse_parts(text)
    )
    for position, attack in enumerate(attacks):
        if attack.name in {other.name for other in attacks[:position]}:
            raise InputError(f"attack {attack.name} occurs twice in {text!r}: write it once")
    return attacks


def check_attacks(
    attacks: tuple[Attack, ...], info: DataInfo, shape: tuple[int, ...], has_server: bool
) -> None:
    """Raise an error for attacks that do not fit the data, or that would have no effect."""
    for attack in attacks:
        if attack.check is not None:
            attack.check(info, shape)
        if attack.tamper_probes is not None and has_server:
            raise InputError(
                f"attack {attack.name} changes the losses that peers measure, and this method has a"
                " server: use it with a method whose clients select their peers"
            )
