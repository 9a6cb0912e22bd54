"""FedAvg, FedProx, SCAFFOLD, MOON, FedLC, FedRS and FedBN against fluke: three rounds in float64,
three of six clients of different sizes a round. The largest difference that was measured is 5.6e-16.
"""

from __future__ import annotations

from typing import Any

import pytest
from methods.small_task import in_plain_tensors, largest_gap, make_experiment, make_net, play_all
from witnesses.fluke_rounds import LR, EncoderNet, play
from witnesses.libraries import check, needs

from remanence.core.slots import Method, Part
from remanence.losses import fedlc, fedrs
from remanence.methods import fedavg, fedprox
from remanence.methods.fedbn import fedbn
from remanence.methods.moon import moon
from remanence.methods.scaffold import scaffold

pytestmark = [pytest.mark.slow, needs("fluke"), pytest.mark.filterwarnings("ignore")]
TOLERANCE = 1e-13
# fluke keeps a client's optimizer between its rounds, so ours has no momentum to keep
EPOCHS = 2
PLAIN = {
    "local.optimizer": f"sgd(lr={LR})",
    "local.schedule": "constant",
    "local.epochs": EPOCHS,
}


def difference(method: Part | Method, theirs: str, kind: str = "mlp", **options: Any) -> float:
    experiment = make_experiment(method, kind, **PLAIN)
    plain = in_plain_tensors(experiment)
    data = (plain.x, plain.y, plain.rows)
    wanted, _ = play(theirs, make_net(kind), *data, epochs=EPOCHS, **options)
    wanted = {name: value for name, value in wanted.items() if value.is_floating_point()}
    return largest_gap(play_all(experiment), wanted, kind)


METHODS: dict[str, tuple[Part | Method, str, dict[str, Any]]] = {
    "fedavg": (fedavg(), "fedavg.FedAVG", {}),
    "fedprox": (fedprox(mu=0.3), "fedprox.FedProx", {"mu": 0.3}),
    "scaffold": (scaffold(equal=True), "scaffold.SCAFFOLD", {"weighted": False}),
    "scaffold by size": (scaffold(), "scaffold.SCAFFOLD", {"weighted": True}),
    "fedlc": (fedavg() + fedlc(tau=0.7), "fedlc.FedLC", {"tau": 0.7}),
    "fedrs": (fedavg() + fedrs(alpha=0.4), "fedrs.FedRS", {"alpha": 0.4, "count_as_missing": 0}),
}


@pytest.mark.parametrize("name", METHODS)
def test_three_rounds_are_equal(name: str) -> None:
    ours, theirs, options = METHODS[name]
    check(name, difference(ours, theirs, **options), TOLERANCE)


def test_moon() -> None:
    """A client's first round has no earlier model: fluke then compares with the global one twice,
    which has no gradient.
    """
    experiment = make_experiment(moon(mu=2.0, temperature=0.5), "mlp", **PLAIN)
    plain, net = in_plain_tensors(experiment), EncoderNet(make_net("mlp"))  # type: ignore[arg-type]
    data = (plain.x, plain.y, plain.rows)
    wanted, _ = play("moon.MOON", net, *data, epochs=EPOCHS, mu=2.0, tau=0.5)
    check("moon", largest_gap(play_all(experiment), net.in_sequence(wanted), "mlp"), TOLERANCE)


def test_fedbn() -> None:
    """All clients in every round, since fluke gives a client that joins later the normalization of
    others. The shared layers, and each client's normalization; fluke's server averages that, too,
    and nobody receives it.
    """
    experiment = make_experiment(fedbn(), "conv", **PLAIN, **{"clients.sample": 6})
    plain, state = in_plain_tensors(experiment), play_all(experiment)
    data = (plain.x, plain.y, plain.rows)
    wanted, clients = play("fedbn.FedBN", make_net("conv"), *data, epochs=EPOCHS, cohort=6)
    gaps = []
    for client, kept in state.client_states.items():
        theirs = clients[client].model.state_dict()
        own = {**kept["personal"]["params"], **kept["personal"]["buffers"]}
        assert len(own) >= 4
        gaps += [float((own[name] - theirs[name]).abs().max()) for name in own]
        assert float((own["body.1.weight"] - wanted["body.1.weight"]).abs().max()) > 1e-4
    shared = {name: value for name, value in state.server.model.params.items() if name not in own}
    gaps += [float((value - wanted[name]).abs().max()) for name, value in shared.items()]
    assert len(state.client_states) == 6
    check("fedbn", max(gaps), TOLERANCE)


def test_another_number_is_noticed() -> None:
    assert difference(fedprox(mu=0.3), "fedprox.FedProx", mu=0.2) > 1e-4
    assert difference(fedavg() + fedlc(tau=0.7), "fedlc.FedLC", tau=0.8) > 1e-4
