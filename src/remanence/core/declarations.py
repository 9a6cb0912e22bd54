"""What a part declares: what its messages reveal, the noise it draws, the forgetting it reduces.

The rest of the program reads these declarations instead of the names of methods. Whatever is not
declared counts as the most sensitive.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# What a value that leaves a client reveals, from the least sensitive to the most.
#   nothing       numbers that do not depend on the client's examples
#   size          the number of examples or of steps
#   label_counts  the number of examples of each class
#   model         no more than the trained model, which leaves the client anyway
#   examples      more than that about single examples
REVEALS = ("nothing", "size", "label_counts", "model", "examples")


class Disclosure(NamedTuple):
    """What one value that leaves a client reveals."""

    reveals: str  # one of REVEALS
    is_count: bool = False  # numbers of examples, which a hostile client may overstate
    cure: str = ""  # what to use instead where the value has to be protected
    noised: bool = False  # a site adds the noise of its policy, and pays for it with its budget


UNDECLARED = Disclosure("examples")

# Fields of a reply that belong to no part. `client_state` never leaves its client.
REPLY: Mapping[str, Disclosure] = {
    "client": Disclosure("nothing"),
    "round": Disclosure("nothing"),
    "params": Disclosure("model"),
    "buffers": Disclosure("model"),
    "weight": Disclosure("size", is_count=True),
    "loss": Disclosure("examples"),
    "payload": Disclosure("nothing"),  # each leaf has a declaration of its part
    # exact counts of evaluation: those of a constant model are the label counts
    "confusion": Disclosure("label_counts", is_count=True),
    "valid": Disclosure("label_counts", is_count=True),
    "noised": Disclosure("label_counts", is_count=True, noised=True),
}

# Fields of the header of a site's response.
RESPONSE_HEADER: Mapping[str, Disclosure] = {
    "kind": Disclosure("nothing"),
    "site": Disclosure("nothing"),
    "clients": Disclosure("nothing"),
    "clients_here": Disclosure("nothing"),
    "round": Disclosure("nothing"),
    "simulated": Disclosure("nothing"),
    "evaluates": Disclosure("nothing"),
    "code": Disclosure("nothing"),
    "reason": Disclosure("nothing"),
    "request": Disclosure("nothing"),  # a hash of the message that it responds to
    "withheld": Disclosure("nothing"),  # fields that the site's policy does not let out
    "seconds": Disclosure("examples"),  # the time of an operation may depend on its operands
    "sizes": Disclosure("size", is_count=True),
}

CLIENT, EXAMPLE = "client", "example"  # units of privacy
MODEL, LABEL_COUNTS = "model", "label_counts"  # what a mechanism covers, besides payload leaves
AT_CLIENT, AT_SERVER = "client", "server"  # where noise is drawn
EACH_PASS, EACH_ROUND, EACH_TIME_STEP = "pass", "round", "time_step"


class Mechanism(NamedTuple):
    """Gaussian noise that hides a client or an example.

    The privacy accountant composes its guarantees from these declarations alone, and a real
    federation draws the noise from a key that no other participant can derive.
    """

    unit: str  # CLIENT or EXAMPLE: whose presence the noise hides
    covers: str  # MODEL, LABEL_COUNTS, or a leaf of the part's payload
    drawn_at: str  # AT_CLIENT or AT_SERVER
    noise: float  # standard deviation over sensitivity; 0: clipping alone, no guarantee
    spent: str  # EACH_PASS over the examples, EACH_ROUND or EACH_TIME_STEP
    every: int = 1  # of EACH_ROUND: once in this number of rounds
    delta: float = 0.0  # at which epsilon is reported; 0: it adds to another mechanism's account
    budget: float = 0.0  # an epsilon that a run does not exceed; 0: none
    subject: str = ""  # the noised value in words: "label counts"


# Kinds of forgetting that a part can reduce.
ABSENT_CLASSES = "absent_classes"  # local training forgets classes that the client lacks
HELD_CLASSES = "held_classes"  # local training forgets classes that the client has
AGGREGATION = "aggregation"  # the aggregated model forgets what the clients' models know
MIXING = "mixing"  # without a server: averaging with peers forgets what a client's model knows
DRIFT = "drift"  # of one global model, while the data change
PEER_DRIFT = "peer_drift"  # of the clients' own models, while the data change


class Remedy(NamedTuple):
    """A kind of forgetting that a part reduces, and why: `diagnosis` recommends it for that."""

    forgetting: str
    reason: str = ""  # "": not recommended by itself; a run that uses it has a remedy in place
    rank: int = 0  # remedies with a lower rank are recommended first
    needs_server: bool = False
    needs_unequal_steps: bool = False  # only where clients take different numbers of steps
