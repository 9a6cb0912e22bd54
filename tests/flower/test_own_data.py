"""Sites with data of their own: files, functions, matching and wrong classes and shapes, and a
coordinator without data.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import InProcessTransport, make_site, run_in_process
from run_states import last_state

from remanence.config import Experiment, parse_experiment
from remanence.core.errors import InputError, RunFailed
from remanence.flower.data_description import describe_data
from remanence.flower.deployment import site_config
from remanence.flower.refusals import SETUP
from remanence.flower.site import Site
from remanence.flower.site_files import read_client
from remanence.flower.wire import WireMessage

TABLE = "sites(kind='table', shape='3', classes='a b')"


def make_config(name: str = TABLE, **changes: Any) -> Experiment:
    base = {
        "data.name": name,
        "clients.count": 3,
        "rounds": 2,
        "local.batch_size": 4,
        "local.optimizer": "sgd(lr=0.1)",
        "device": "cpu",
        "precision": "fp64",
    }
    return parse_experiment({}, base | {"model": "mlp(hidden='4')"} | changes)


def write_table(
    path: Path, rows: int, classes: tuple[str, ...] = ("a", "b"), features: int = 3, test: int = 5
) -> None:
    """Class by the sign of the first column."""
    x = np.linspace(-1, 1, (rows + test) * features, dtype=np.float32).reshape(-1, features)
    y = np.arange(rows + test) % len(classes)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        path,
        x=x[:rows],
        y=y[:rows],
        x_test=x[rows:],
        y_test=y[rows:],
        class_names=np.array(classes),
    )


def sites_with_tables(folder: Path, policy: dict[str, Any] | None = None) -> dict[int, Site]:
    """Clients 0 and 1 at one site, client 2 at another."""
    for number, rows in ((0, 20), (1, 12), (2, 9)):
        write_table(folder / ("alone" if number == 2 else "pair") / f"{number}.npz", rows)
    both = {"data": {str(number): f"npz(path='{number}.npz')" for number in (0, 1)}}
    return {
        1: make_site(folder, "pair", (), policy or {}, **both),
        2: make_site(folder, "alone", (2,), policy or {}, data="npz(path='2.npz')"),
    }


def test_a_coordinator_without_data_trains_and_evaluates(tmp_path: Path) -> None:
    """5 test examples at each of three clients: 15 in all."""
    sites = sites_with_tables(tmp_path, {"label_counts": True})
    run = run_in_process(make_config(), InProcessTransport(sites), tmp_path / "run")
    assert [line["replies"] for line in run.metrics if line["split"] == "test"] == [3, 3]
    assert run.ledger.select(split="test", moment="merged")["total"].sum(axis=1).tolist() == [
        15,
        15,
    ]
    assert run.metadata["label_counts"] == []
    assert "at the sites: table examples of shape 3, 2 classes" in run.metadata["data"]


def test_the_coordinator_does_not_limit_the_memory_of_a_site(tmp_path: Path) -> None:
    """Its own limit is too small for any data, and is not sent."""
    config = make_config(rounds=1, **{"data.max_bytes": 1})
    assert "max_bytes" not in site_config(config)["data"]
    transport = InProcessTransport(sites_with_tables(tmp_path))
    assert run_in_process(config, transport, tmp_path / "run").metrics[0]["replies"] == 3
    sites = sites_with_tables(tmp_path / "again")
    expected = {"kind": "table", "classes": ["a", "b"], "shape": [3]}
    client = read_client(sites[2].file, config, 2, expected)
    assert len(client.train) == 9


def test_clients_are_weighted_by_their_numbers_of_examples(tmp_path: Path) -> None:
    """fedavg by hand from the replies: 18, 11 and 8 training examples (a tenth of 20, 12 and 9 is
    for validation, rounded).
    """
    transport = InProcessTransport(sites_with_tables(tmp_path))
    run = run_in_process(make_config(rounds=1), transport, tmp_path / "run")
    trained = [message for _, message in transport.sent if message.header["kind"] == "train"]
    replies = [
        transport.sites[node].answer(message)
        for node, message in transport.sent
        if message.header["kind"] == "train"
    ]
    assert len(trained) == 2
    weights = np.concatenate([reply.arrays["weight"] for reply in replies])
    assert weights.tolist() == [18, 11, 8]
    for name, value in last_state(run).server.model.params.items():
        stacked = np.concatenate([reply.arrays[f"params/{name}"] for reply in replies])
        assert np.allclose(
            np.tensordot(weights / weights.sum(), stacked, axes=1), value.numpy(), atol=1e-12
        )


def test_only_what_the_method_declares_leaves_a_site(tmp_path: Path) -> None:
    transport = InProcessTransport(sites_with_tables(tmp_path))
    run = run_in_process(make_config(method="scaffold+wsm", rounds=1), transport, tmp_path / "run")
    node, message = next(
        (node, message) for node, message in transport.sent if message.header["kind"] == "train"
    )
    reply = transport.sites[node].answer(message)
    names = set(last_state(run).server.model.params)
    assert set(reply.arrays) == {f"params/{n}" for n in names} | {
        f"payload/scaffold/change/{n}" for n in names
    } | {"weight"}
    assert set(reply.header) == {
        "kind",
        "round",
        "clients",
        "site",
        "clients_here",
        "withheld",
        "request",
    }
    assert reply.header["withheld"] == ["loss", "seconds"]
    permissive = sites_with_tables(tmp_path / "other", {"label_counts": True})[node].answer(message)
    assert {*permissive.arrays} - {*reply.arrays} == {"loss"}
    assert {*permissive.header} ^ {*reply.header} == {"withheld", "seconds"}


def test_random_numbers_do_not_follow_from_the_key_in_a_message(tmp_path: Path) -> None:
    """The coordinator knows that key. fedavg declares no noise and draws only batches, so a site
    with data of its own draws from secret keys whatever a part declares.
    """
    transport = InProcessTransport(sites_with_tables(tmp_path))
    run_in_process(make_config(rounds=1), transport, tmp_path / "run")
    node, message = next(
        (node, message) for node, message in transport.sent if message.header["kind"] == "train"
    )
    first, second = (
        sites_with_tables(tmp_path / name)[node].answer(message).arrays for name in ("a", "b")
    )
    assert (first["weight"] == second["weight"]).all()
    assert any((first[name] != second[name]).any() for name in first if name.startswith("params/"))


def test_data_by_a_function_of_the_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "ward_data.py").write_text(
        "import torch\nfrom torch.utils.data import TensorDataset\n\n"
        "def load():\n"
        "    data = TensorDataset(torch.linspace(-1, 1, 60).reshape(20, 3), torch.arange(20) % 2)\n"
        "    data.classes = ['a', 'b']\n"
        "    return data\n\n"
        "def fail():\n"
        "    raise TypeError('patient 7 has no age')\n\n"
        "def select(ward):\n"
        "    return ward\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    site = make_site(tmp_path, "own", (0, 1, 2), {}, data="ward_data:load")
    run = run_in_process(make_config(), InProcessTransport({1: site}), tmp_path / "run")
    assert [line["replies"] for line in run.metrics if line["split"] == "test"] == [3, 3]
    ping = {"kind": "ping", "run": "some-run-1", "experiment": {"clients": {"count": 3}}}
    for name in ("nothing", "select"):
        broken = make_site(tmp_path, "own", (0,), {}, data=f"ward_data:{name}")
        header = broken.answer(WireMessage(ping | {"examples": {}}, {})).header
        assert (header["code"], header["reason"]) == ("setup", SETUP)
        assert "name a function without arguments as package.module:function" in caplog.text
        caplog.clear()
    failing = make_site(tmp_path, "own", (0,), {}, data="ward_data:fail")
    header = failing.answer(WireMessage(ping | {"examples": {}}, {})).header
    assert (header["code"], header["reason"]) == ("failed", "TypeError; see the site's log")


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (
            {"features": 4},
            "client 2 has table examples of shape (4,), but the experiment has table examples of"
            " shape (3,)",
        ),
        (
            {"classes": ("a", "zebra")},
            "client 2 has a class 'zebra', but the experiment has a, b",
        ),
    ],
)
def test_data_that_do_not_match_are_declined_and_the_sites_log_names_both_sides(
    table: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The coordinator learns no class of the site."""
    sites = sites_with_tables(tmp_path)
    write_table(tmp_path / "alone" / "2.npz", 9, **table)
    run = run_in_process(make_config(), InProcessTransport(sites), tmp_path / "run")
    sent = (
        "the examples of client 2 do not have the kind, shape and classes of the experiment; see"
        " the site's log"
    )
    assert f"site alone declines (data): {sent}" in (run.folder / "federation.log").read_text()
    assert run.metrics[0]["rejected"] == [{"client": 2, "code": "data", "reason": sent}]
    assert reason in caplog.text


def test_the_ledger_has_the_suppressed_counts(tmp_path: Path) -> None:
    """Every count of 5 test examples is below 6, so all are sent as 0 and there is no accuracy."""
    run = run_in_process(
        make_config(rounds=1),
        InProcessTransport(sites_with_tables(tmp_path, {"suppress": 6, "label_counts": True})),
        tmp_path / "run",
    )
    line = next(line for line in run.metrics if line["split"] == "test")
    assert line["accuracy"] is None
    assert line["replies"] == 3
    assert "sends no counts" not in (run.folder / "federation.log").read_text()


def test_a_site_that_sends_no_counts_still_trains(tmp_path: Path) -> None:
    run = run_in_process(
        make_config(rounds=1),
        InProcessTransport(sites_with_tables(tmp_path, {"evaluate": False})),
        tmp_path / "run",
    )
    assert run.metrics[0]["replies"] == 3
    assert run.metrics[0]["accuracy"] is None


def test_a_site_with_too_high_a_client_declines(tmp_path: Path) -> None:
    write_table(tmp_path / "alone" / "2.npz", 9)
    site = make_site(tmp_path, "alone", (7,), {}, data="npz(path='2.npz')")
    with pytest.raises(
        RunFailed,
        match=r"this site has a client 7, but the experiment's 3 clients are numbered 0 to 2",
    ):
        run_in_process(make_config(), InProcessTransport({1: site}), tmp_path / "run")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("sites(kind='video', shape='3', classes='2')", "kind must be one of image, table, tokens"),
        (
            "sites(kind='table', shape='3x3', classes='2')",
            "shape must be that of one table example",
        ),
        ("sites(kind='table', shape='3', classes='one')", "two names or more"),
        ("sites(kind='table', shape='3', classes='2', mean='1')", "mean must be 3 numbers"),
        ("sites(kind='table', shape='3', classes='2', mean='1 1 1')", "give both mean and std"),
        (
            "sites(kind='table', shape='3', classes='2', mean='1 1 1', std='1 0 1')",
            "every std must be above 0",
        ),
        ("sites(shapes='3')", "has no option 'shapes': did you mean shape?"),
    ],
)
def test_a_wrong_description_raises_an_error(text: str, error: str) -> None:
    with pytest.raises(InputError, match=error.replace("?", r"\?")):
        describe_data(make_config(text))


def test_descriptions_need_a_number_of_clients_and_no_public_set(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="set the number of clients of all sites"):
        describe_data(make_config(**{"clients.count": None}))
    with pytest.raises(InputError, match="it has no public set either"):
        run_in_process(
            make_config(method="flashback", **{"data.public": 8}),
            InProcessTransport({}),
            tmp_path / "run",
        )
    assert describe_data(make_config("digits")) is None


def test_given_statistics_are_used_by_every_site(tmp_path: Path) -> None:
    name = "sites(kind='table', shape='3', classes='a b', mean='0 0 0', std='2 2 2')"
    sites = sites_with_tables(tmp_path)
    run_in_process(make_config(name, rounds=1), InProcessTransport(sites), tmp_path / "run")
    for site in sites.values():
        train = next(iter(site.tasks.values())).task.train
        assert train.std is not None
        assert train.std.flatten().tolist() == [2, 2, 2]
