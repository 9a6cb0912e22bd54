"""Attacks of a coordinator that chooses models and repeats requests, on the counts of a site."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import InProcessTransport, run_in_process
from own_tables import BIAS, make_config, record_training, score, site_of, tables

from remanence.flower.site import Site
from remanence.flower.wire import WireMessage

SPLITS = ("train", "valid", "test")


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("suppress", [0, 2])
def test_a_constant_model_does_not_return_label_counts(
    split: str, suppress: int, tmp_path: Path
) -> None:
    training = record_training(tmp_path / "trial")
    site = site_of(tmp_path, {"suppress": suppress})
    for wanted in range(3):
        answer = site.answer(score(training, split, wanted))
        assert answer.header["code"] == "policy"
        assert "label counts" in answer.header["reason"]
        assert not answer.arrays


def test_exact_counts_are_label_counts_and_need_the_permission_for_them(tmp_path: Path) -> None:
    """The control: with the permission, the column of a constant model is the label counts."""
    training = record_training(tmp_path / "trial")
    site = site_of(tmp_path, {"label_counts": True})
    answer = site.answer(score(training, "test", wanted=1))
    labels = tables(0)["y_test"]
    expected = np.bincount(labels, minlength=3).tolist()
    assert answer.arrays["confusion"][0, :, 1].tolist() == expected


def test_the_loss_of_a_chosen_model_does_not_return_label_counts(tmp_path: Path) -> None:
    """The mean loss of a constant model is a weighted sum of the label counts with weights that
    the coordinator chooses.
    """
    training = record_training(tmp_path / "trial")
    arrays = {name: np.zeros_like(array) for name, array in training.arrays.items()}
    arrays[f"start/params/{BIAS}"][0] = 3.0
    header = training.header | {
        "optimizer_hparams": training.header["optimizer_hparams"] | {"lr": 0.0},
        "validate": True,
    }
    answer = site_of(tmp_path, {}).answer(WireMessage(header, arrays))
    assert answer.header["kind"] == "trained"
    assert {name.partition("/")[0] for name in answer.arrays} == {"params", "weight"}
    assert answer.header["withheld"] == ["loss", "seconds", "valid"]


def change_weight(number: int, message: WireMessage) -> WireMessage:
    arrays = {name: array.copy() for name, array in message.arrays.items()}
    arrays[f"models/params/{BIAS}"][0, 0] += 1e-9 * number
    return WireMessage(message.header, arrays)


def change_coordinator(number: int, message: WireMessage) -> WireMessage:
    """Another run of another coordinator: another name, seed and method."""
    experiment = message.header["experiment"] | {"seed": number, "method": "fedprox(mu=0.1)"}
    header = message.header | {"run": f"another-run-{number}", "experiment": experiment}
    return message._replace(header=header)


def change_run(number: int, message: WireMessage) -> WireMessage:
    return message._replace(header=message.header | {"run": f"another-run-{number}"})


def change_split(number: int, message: WireMessage) -> WireMessage:
    return message._replace(header=message.header | {"split": SPLITS[number % 3]})


def repeat(number: int, message: WireMessage) -> WireMessage:
    return message


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(
    "change", [repeat, change_weight, change_run, change_coordinator, change_split]
)
def test_noise_does_not_average_out(
    change: Callable[[int, WireMessage], WireMessage], restarts: bool, tmp_path: Path
) -> None:
    """The budget of 8 holds four answers with epsilon 2, whatever changes between the requests;
    another client's budget is its own.
    """
    training = record_training(tmp_path / "trial")
    site = site_of(tmp_path, {"epsilon": 2.0})
    answers = []
    for number in range(7):
        answers.append(site.answer(change(number, score(training, "valid"))))
        if restarts:
            site = Site(site.file)
    codes = [answer.header.get("code", "") for answer in answers]
    assert codes == [""] * 4 + ["budget"] * 3
    assert all(set(answer.arrays) == {"noised"} for answer in answers[:4])
    assert "0 is left of its budget of 8" in answers[-1].header["reason"]
    assert site.answer(score(training, "valid", client=1)).header["kind"] == "counts"


def test_an_answer_for_several_models_costs_as_much_as_several_answers(tmp_path: Path) -> None:
    training = record_training(tmp_path / "trial")
    site = site_of(tmp_path, {"epsilon": 2.0, "budget": 5})
    one = score(training, "test")
    both = one._replace(header=one.header | {"which": [0, 0], "owners": [0, 0]})
    kinds = [site.answer(message).header["kind"] for message in (both, both, one)]
    assert kinds == ["counts", "declined", "declined"]
    assert spent(site) == {"0": "4"}


def spent(site: Site) -> dict[str, str]:
    content: dict[str, Any] = json.loads((site.folder / "budget.json").read_text())
    found: dict[str, str] = content["spent"]
    return found


def test_malformed_requests_cost_nothing(tmp_path: Path) -> None:
    training = record_training(tmp_path / "trial")
    site = site_of(tmp_path, {"epsilon": 2.0})
    good = score(training, "test")
    for header in ({"owners": [7]}, {"which": [1]}, {"which": [-1]}, {"split": "x"}, {"which": []}):
        assert site.answer(good._replace(header=good.header | header)).header["kind"] == "declined"
    for arrays in ({}, {**good.arrays, f"models/params/{BIAS}": np.zeros((1, 9))}):
        assert site.answer(WireMessage(good.header, arrays)).header["code"] == "malformed"
    assert spent(site) == {}


def test_epsilon_is_spent_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site that is killed between the two has spent it."""
    training = record_training(tmp_path / "trial")
    site = site_of(tmp_path, {"epsilon": 2.0})

    def killed(*arguments: Any, **keywords: Any) -> None:
        assert spent(site) == {"0": "2"}
        raise KeyboardInterrupt

    monkeypatch.setattr("remanence.engines.sequential.SequentialEngine.score_pairs", killed)
    monkeypatch.setattr("remanence.engines.vectorized.VectorizedEngine.score_pairs", killed)
    with pytest.raises(KeyboardInterrupt):
        site.answer(score(training, "test"))
    assert spent(Site(site.file)) == {"0": "2"}


def test_a_repeated_training_request_costs_nothing_more(tmp_path: Path) -> None:
    training = record_training(tmp_path / "trial")
    site = site_of(tmp_path, {"epsilon": 0.1})
    request = training._replace(header=training.header | {"validate": True})
    first, second = site.answer(request), Site(site.file).answer(request)
    assert (first.arrays["noised"] == second.arrays["noised"]).all()
    assert spent(site) == {"0": "1/10", "1": "1/10"}


def test_a_stricter_policy_holds_for_stored_replies(tmp_path: Path) -> None:
    training = record_training(tmp_path / "trial")
    request = training._replace(header=training.header | {"validate": True})
    names = [
        {name.partition("/")[0] for name in site_of(tmp_path, policy).answer(request).arrays}
        for policy in ({"label_counts": True}, {})
    ]
    assert names == [{"params", "weight", "loss", "valid"}, {"params", "weight"}]


def test_training_goes_on_when_the_budget_is_spent(tmp_path: Path) -> None:
    training = record_training(tmp_path / "trial")
    site = site_of(tmp_path, {"epsilon": 5.0})
    rounds = [
        site.answer(training._replace(header=training.header | {"validate": True, "round": round}))
        for round in (1, 2)
    ]
    assert ["noised" in answer.arrays for answer in rounds] == [True, False]
    assert "valid" not in rounds[0].header["withheld"]
    assert "valid" in rounds[1].header["withheld"]


@pytest.mark.parametrize(
    "content", [None, "", "{}", '{"spent": {"0": "-3"}}', '{"spent": {"0": 0.5}}', '{"spent": []}']
)
def test_without_a_record_of_what_was_spent_no_counts_leave(
    content: str | None, tmp_path: Path
) -> None:
    training = record_training(tmp_path / "trial")
    site = site_of(tmp_path, {"epsilon": 1.0})
    site.answer(score(training, "test"))
    path = site.folder / "budget.json"
    path.unlink()
    (site.folder / "worker.log").touch()
    if content is not None:
        path.write_text(content)
    site = Site(site.file)
    answer = site.answer(score(training, "test"))
    assert answer.header["code"] == "budget"
    assert "restore it from a backup" in answer.header["reason"]
    ping = site.answer(WireMessage(training.header | {"kind": "ping"}, {}))
    assert ping.header["evaluates"] is False
    assert site.answer(training).header["kind"] == "trained"


def test_two_processes_do_not_spend_the_same_epsilon(tmp_path: Path) -> None:
    """A hundred tenths are ten, exactly, and two sites in one folder share them."""
    from remanence.flower.budget import Budget
    from remanence.flower.refusals import Declined

    site = site_of(tmp_path, {"epsilon": 0.1, "budget": 10})
    budgets = [Budget(site.folder, site.policy) for _ in range(4)]

    def spend(number: int) -> bool:
        try:
            budgets[number % 4].spend({0: 1})
        except Declined:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(spend, range(130))) == 100
    assert spent(site) == {"0": "10"}


def test_a_ping_says_whether_counts_leave(tmp_path: Path) -> None:
    training = record_training(tmp_path / "trial")
    ping = WireMessage(training.header | {"kind": "ping"}, {})
    for number, (policy, expected) in enumerate(
        (
            ({}, False),
            ({"label_counts": True}, True),
            ({"label_counts": True, "evaluate": False}, False),
            ({"epsilon": 8.0}, True),
        )
    ):
        site = site_of(tmp_path / str(number), policy)
        assert site.answer(ping).header["evaluates"] is expected
    site.answer(score(training, "test"))
    assert site.answer(ping).header["evaluates"] is False  # one client's budget is spent


def test_a_run_goes_on_without_the_counts_of_sites(tmp_path: Path) -> None:
    """By default no counts leave, and none are requested."""
    transport = InProcessTransport({1: site_of(tmp_path, {})})
    run = run_in_process(make_config(rounds=2), transport, tmp_path / "run")
    assert {message.header["kind"] for _, message in transport.sent} == {"ping", "train"}
    assert [line["replies"] for line in run.metrics if line["split"] == "test"] == [2, 2]
    assert all(line["accuracy"] is None and line["train_loss"] is None for line in run.metrics)
    log = (run.folder / "federation.log").read_text()
    assert "it sends no counts" in log
    assert "site worked" not in log


def test_a_run_goes_on_when_a_budget_is_spent(tmp_path: Path) -> None:
    """Two splits in every round: the budget holds two rounds, and the third is trained and not
    evaluated. Noised counts come without losses, which are recorded as null.
    """
    transport = InProcessTransport({1: site_of(tmp_path, {"epsilon": 2.0})})
    run = run_in_process(make_config(rounds=4), transport, tmp_path / "run")
    lines = [line for line in run.metrics if line["split"] == "test"]
    assert [line["replies"] for line in lines] == [2, 2, 2, 2]
    assert [line["accuracy"] is None for line in lines] == [False, False, True, True]
    assert all(line["loss"] is None for line in lines)
    log = (run.folder / "federation.log").read_text()
    assert log.count("site ward sends no more counts in this run") == 1
    requests = [m.header for _, m in transport.sent if m.header["kind"] == "score"]
    assert len(requests) == 5  # one was declined


def test_personal_models_are_not_covered_by_noise(tmp_path: Path) -> None:
    """One training example changes the personal model, and with it many counts."""
    config = make_config("fedbabu")
    training = record_training(tmp_path / "trial", config)
    message = training._replace(header=training.header | {"kind": "personal"})
    answer = site_of(tmp_path, {"epsilon": 1.0}).answer(message)
    assert answer.header["code"] == "policy"
    assert "personal model" in answer.header["reason"]
    allowed = site_of(tmp_path / "open", {"label_counts": True}).answer(message)
    assert set(allowed.arrays) == {"confusion", "loss"}


def test_a_sites_own_statistics_are_not_covered_by_noise(tmp_path: Path) -> None:
    """Normalized with their own mean, all examples change with one."""
    name = "sites(kind='table', shape='3', classes='a b c')"
    training = record_training(tmp_path / "trial", make_config(**{"data.name": name}))
    site = site_of(tmp_path, {"epsilon": 1.0})
    assert (
        "give the experiment's data a mean and std"
        in (site.answer(score(training, "test")).header["reason"])
    )
    assert spent(site) == {}
    private = training.header["experiment"] | {"method": "fedavg+dp_sgd(noise=1)"}
    answer = site.answer(training._replace(header=training.header | {"experiment": private}))
    assert "dp_sgd hides single examples, but" in answer.header["reason"]
    plain = private | {"data": private["data"] | {"normalize": False}}
    answer = site.answer(training._replace(header=training.header | {"experiment": plain}))
    assert answer.header["kind"] == "trained"


@pytest.mark.parametrize("method", ["random(peers=1)", "hast(peers=1, depth=2)", "feddrift"])
def test_methods_that_choose_models_by_losses_are_declined(method: str, tmp_path: Path) -> None:
    """They would take missing losses for bad models."""
    training = record_training(tmp_path / "trial")
    experiment = training.header["experiment"] | {"method": method}
    ping = WireMessage(training.header | {"kind": "ping", "experiment": experiment}, {})
    for number, policy in enumerate(({}, {"epsilon": 1.0, "label_counts": True})):
        answer = site_of(tmp_path / str(number), policy).answer(ping)
        assert answer.header["code"] == "policy"
        assert "chooses models by their losses" in answer.header["reason"]
    allowed = site_of(tmp_path / "open", {"label_counts": True}).answer(ping)
    assert allowed.header["kind"] == "site_info"


def test_tiny_noise_of_an_experiment_is_no_protection(tmp_path: Path) -> None:
    """A coordinator chooses the noise of a method: with a constant model, the examples that it
    forgets are the examples of a class.
    """
    training = record_training(tmp_path / "trial")
    experiment = training.header["experiment"] | {"method": "fedwavg(noise=1e-9)"}
    header = training.header | {"experiment": experiment}
    answer = site_of(tmp_path, {}).answer(training._replace(header=header))
    assert answer.header["code"] == "policy"


def test_small_updates_do_not_leave(tmp_path: Path) -> None:
    """18 training examples in batches of 4 are five steps; a coordinator that trains a single
    step gets the gradient of a batch.
    """
    sites = {
        1: site_of(tmp_path / "a", {"min_steps": 6}),
        2: site_of(tmp_path / "b", {"min_examples": 19}),
        3: site_of(tmp_path / "c", {"min_steps": 5, "min_examples": 18}),
    }
    training = record_training(tmp_path / "trial")
    answers = [site.answer(training).header for site in sites.values()]
    assert [answer["kind"] for answer in answers] == ["declined", "declined", "trained"]
    assert "5 local steps, and this site sends none from fewer than 6" in answers[0]["reason"]
    assert "18 training examples, and this site sends none from fewer" in answers[1]["reason"]
    single = training.header["experiment"] | {"local": {"steps": 1}}
    default = site_of(tmp_path / "d", {})
    answer = default.answer(training._replace(header=training.header | {"experiment": single}))
    assert "1 local steps" in answer.header["reason"]
    run = run_in_process(make_config(), InProcessTransport({1: sites[1]}), tmp_path / "run")
    assert [rejection["code"] for rejection in run.metrics[0]["rejected"]] == ["policy"] * 2


def test_an_update_reveals_the_mix_of_labels(tmp_path: Path) -> None:
    """What docs/flower.md says is not protected: after one step on all 18 examples from a model of
    zeros, each bias has moved by lr * (share of the class - 1/3).
    """
    training = record_training(tmp_path / "trial")
    experiment = training.header["experiment"] | {"local": {"steps": 1, "batch_size": 32}}
    arrays = {name: np.zeros_like(array) for name, array in training.arrays.items()}
    header = training.header | {
        "experiment": experiment,
        "optimizer_hparams": training.header["optimizer_hparams"] | {"lr": 1.0},
    }
    site = site_of(tmp_path, {"min_steps": 1})
    answer = site.answer(WireMessage(header, arrays))
    shares = answer.arrays[f"params/{BIAS}"][0] + 1 / 3
    data = next(iter(site.tasks.values()))
    labels = data.experiment.labels[data.task.population.at(0).train.for_client(0)]
    assert (18 * shares).round(6).tolist() == np.bincount(labels, minlength=3).tolist()
