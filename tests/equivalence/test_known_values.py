"""Sums over the weights of the output layer after three rounds, held at 1e-10: a change of any
number in training, aggregation or drift shows here.

`compare_trees.py` compares every tensor with an earlier commit; this test keeps a few values where
`make test` can see them.
"""

from __future__ import annotations

import pytest
from equivalence.final_states import list_jobs

KNOWN = {
    "part/scaffold/sequential": 4.415542820911539,
    "part/flashback/vectorized": 6.574355031738806,
    "part/fedwavg/sequential": 4.511046826741021,
    "part/fednova/sequential": 4.4380253646003,
    "drift/feddrift/sequential": 4.820821972028702,
    "drift/hast/vectorized": 29.220301940435313,
    "setting/images/sequential": 51.52457277402959,
}


@pytest.mark.parametrize("name", KNOWN)
def test_final_weights_have_known_values(name: str) -> None:
    tensors = list_jobs()[name]()
    weights = tensors.get("client_models/best/params/head.weight", tensors["params/head.weight"])
    assert float(weights.double().abs().sum()) == pytest.approx(KNOWN[name], rel=0, abs=1e-10)
