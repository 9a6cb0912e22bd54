"""Data of users in every form: floats as they are, sites by name, tables, texts as labels."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import remanence as rem
from remanence.cli.main import app
from remanence.config import parse_experiment
from remanence.core.errors import InputError
from remanence.data import DATASETS, from_dataset, load_dataset
from remanence.data.naming import parse_data
from remanence.experiment.build import build
from remanence.experiment.data_setup import load_data, tabulate_partition
from remanence.results.client_names import client_label

Y = torch.arange(60) % 3
RANDOM = np.random.default_rng(0)
NORMAL = RANDOM.standard_normal((60, 1, 6, 6)).astype(np.float32)


def build_with(source: Any, changes: dict[str, Any] | None = None) -> Any:
    small = {"clients.count": 3, "data.partition": "iid", "rounds": 1}
    return build(parse_experiment({}, small | (changes or {})), source=source)


def test_normalized_images_are_kept_bit_for_bit() -> None:
    source = from_dataset(TensorDataset(torch.from_numpy(NORMAL), Y), classes=list("abc"))
    kept = np.concatenate([source.train.x, source.test.x])
    assert source.kind == "image"
    assert kept.dtype == np.float32
    assert sorted(kept.reshape(-1).tolist()) == sorted(NORMAL.reshape(-1).tolist())


def test_small_values_do_not_collapse() -> None:
    source = from_dataset(TensorDataset(torch.rand(60, 1, 4, 4) * 0.001, Y))
    assert len(np.unique(source.train.x)) > 500


def test_bytes_divided_by_255_are_stored_as_these_bytes() -> None:
    raw = RANDOM.integers(0, 256, (60, 1, 5, 5)).astype(np.uint8)
    scaled = from_dataset((torch.from_numpy(raw) / 255, Y))
    plain = from_dataset((torch.from_numpy(raw), Y))
    assert scaled.train.x.dtype == np.uint8
    assert np.array_equal(scaled.train.x, plain.train.x)
    off = torch.from_numpy(raw) / 255
    off[3, 0, 0, 0] += 1e-4
    assert from_dataset((off, Y)).train.x.dtype == np.float32


def test_training_and_test_images_have_one_scale() -> None:
    fractions = torch.randint(0, 256, (60, 1, 4, 4)) / 255
    source = from_dataset((fractions, Y), test=(torch.rand(60, 1, 4, 4), Y))
    assert source.train.x.dtype == source.test.x.dtype == np.float32
    assert source.train.x.max() <= 1
    with pytest.raises(InputError, match="give both the same type"):
        from_dataset((fractions, Y), test=((fractions * 255).byte(), Y))


@pytest.mark.parametrize(
    ("shape", "kind", "wanted"),
    [
        ((60, 7, 3), "", "sequence"),
        ((60, 7, 3), "image", "image"),
        ((60, 1, 4, 5, 6), "", "volume"),
        ((60, 4, 5, 6), "volume", "volume"),
        ((60, 9), "", "table"),
    ],
)
def test_floats_of_every_kind_train(shape: tuple[int, ...], kind: str, wanted: str) -> None:
    x = RANDOM.standard_normal(shape) * 3 + 5
    source = from_dataset((x, Y.numpy()), kind=kind)
    assert source.kind == wanted
    experiment = build_with(source)
    inputs = experiment.task.train.inputs(torch.arange(len(source.train)))
    features = {"sequence": -1, "table": -1}.get(wanted, 1)
    flat = inputs.movedim(features, 0).reshape(inputs.shape[features], -1)
    torch.testing.assert_close(flat.mean(1), torch.zeros(len(flat)), atol=1e-4, rtol=0)
    torch.testing.assert_close(flat.std(1), torch.ones(len(flat)), atol=1e-1, rtol=0)


def test_ct_values_of_int16_are_kept() -> None:
    x = RANDOM.integers(-1000, 3000, (60, 1, 4, 4)).astype(np.int16)
    source = from_dataset((x, Y))
    assert source.train.x.dtype == np.float32
    assert source.train.x.min() < -900


@pytest.mark.parametrize(("rows", "first"), [([2, 5], 2), ([59], 59)])
def test_nan_is_named_with_the_array_and_the_number_of_examples(
    tmp_path: Path, rows: list[int], first: int
) -> None:
    x = NORMAL.copy()
    x[rows, 0, 1, 1] = np.nan
    problem = rf"NaN or infinity \({len(rows)} of 60, the first is number {first}\)"
    with pytest.raises(InputError, match=problem):
        from_dataset((x, Y))
    np.savez(tmp_path / "a.npz", x=NORMAL, y=Y, x_test=x, y_test=Y)
    with pytest.raises(InputError, match=rf"a\.npz x_test.*{problem}"):
        load_dataset("npz", {"path": str(tmp_path / "a.npz")}, None)


def test_augmentation_and_corruption_know_floats() -> None:
    source = from_dataset((torch.rand(60, 1, 8, 8), Y))
    drift = {
        "drift.schedule": "random(clusters=2)", "drift.time_steps": 2,
        "drift.concepts": "corrupt(kinds='clean|brightness', severity=5)",
    }  # fmt: skip
    x = build_with(source, drift).task.train.x
    assert x.dtype == torch.float32
    assert x.max() <= source.train.x.max()
    assert len(torch.unique(x)) > 1000  # not rounded
    with pytest.raises(InputError, match="negative ones: give images that are not normalized"):
        build_with(from_dataset((NORMAL, Y)), drift)
    rotated = build_with(
        from_dataset((NORMAL, Y)), drift | {"drift.concepts": "rotate(degrees='0|45')"}
    )
    assert rotated.task.train.x.dtype == torch.float32


def test_a_backdoor_fits_sequences() -> None:
    source = from_dataset((RANDOM.standard_normal((60, 5, 4)), Y))
    experiment = build_with(source, {"attack": "backdoor(clients='0', size=2, share=1)"})
    poisoned = experiment.task.train.x[len(source.train) :]
    assert (poisoned[:, -2:, -2:] == source.train.x.max()).all()


def sites(**sizes: int) -> dict[str, Any]:
    return {
        name.replace("_", "-"): TensorDataset(torch.randn(size, 4), torch.arange(size) % 3)
        for name, size in sizes.items()
    }


def test_named_sites_are_the_clients(tmp_path: Path) -> None:
    run = rem.run(
        data=sites(ward_7=30, ward_10=20, lab=1), rounds=1, out=tmp_path / "r", quiet=True
    )
    assert run.config.data.partition == "by_group"
    assert run.config.clients.count == 3
    assert run.metadata["client_names"] == ["lab", "ward-10", "ward-7"]
    counts = [sum(row) for row in run.metadata["label_counts"]]
    assert counts[0] == 1
    assert counts[1] < counts[2]


def test_names_of_sites_are_in_ledger_report_and_diagnosis(tmp_path: Path) -> None:
    wards = {
        f"<ward-{name}>": (torch.randn(40, 4) + 3 * name, torch.full((40,), name) + torch.arange(40) % 2)
        for name in (0, 1)
    }  # fmt: skip
    run = rem.run(
        data=wards, rounds=8, epochs=30, lr=0.5, record_local=True, out=tmp_path / "r", quiet=True
    )
    names = {"<ward-0>", "<ward-1>"}
    assert client_label(run, 1) == "<ward-1>"
    assert client_label(run, 2) == "client 2"
    frame = run.ledger.to_pandas()
    assert set(frame[frame.model >= 0].client_name) == names
    assert set(frame[frame.model < 0].client_name) == {""}
    page = Path(rem.report(run)).read_text(encoding="utf-8")
    assert "<ward-0>" not in page.replace("\\u003cward-0\\u003e", "")
    assert "ward-0" in page
    assert "ward-" in " ".join(finding.sentence for finding in rem.diagnose([run])[0].findings)


def test_a_partition_that_is_named_wins_over_sites() -> None:
    source = from_dataset(sites(a=30, b=30))
    experiment = build_with(source, {"data.partition": "iid", "clients.count": 5})
    assert experiment.task.info.num_clients == 5
    assert "client_names" not in experiment.metadata


def test_sites_with_other_classes_are_joined_by_name() -> None:
    first, second = sites(a=30, b=30).values()
    first.classes, second.classes = ["cat", "dog", "owl"], ["dog", "owl", "zebra"]
    source = from_dataset({"a": first, "b": second})
    assert source.classes == ("cat", "dog", "owl", "zebra")
    held = {
        source.group_names[g]: {
            source.classes[y] for y in source.train.y[source.train.groups == g]
        }
        for g in (0, 1)
    }  # fmt: skip
    assert held == {"a": {"cat", "dog", "owl"}, "b": {"dog", "owl", "zebra"}}


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ({}, "has no sites"),
        (
            {"a": (torch.randn(6, 4), Y[:6]), "b": (torch.randn(6, 5), Y[:6])},
            r"float32 \(5,\) at b and float32 \(4,\) at a",
        ),
        ({"a": (torch.randn(6, 4), Y[:6]), "b": torch.randn(6, 4)}, "'dataset b' has no labels"),
        ((torch.randn(6, 4), torch.rand(6)), "train.* to choose one class"),
        ((torch.randn(6, 4), torch.zeros(6, 3)), r"shape \(6, 3\)"),
    ],
)
def test_sites_and_pairs_that_cannot_be_used_are_named(data: Any, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        from_dataset(data)


def test_texts_are_labels(tmp_path: Path) -> None:
    words = np.array(["sick", "well", "dead"])[Y]
    source = from_dataset((NORMAL, words))
    assert source.classes == ("dead", "sick", "well")
    np.savez(tmp_path / "a.npz", x=NORMAL, y=words)
    assert load_dataset("npz", {"path": str(tmp_path / "a.npz")}, None).classes == source.classes
    items = [(torch.randn(3), str(word)) for word in words]
    assert from_dataset(items).classes == source.classes


CSV = "age,height,ward,outcome\n" + "".join(
    f"{20 + i},{150.5 + i},{'north' if i % 4 else 'south'},{['no', 'yes'][i % 2]}\n"
    for i in range(40)
)


def csv(folder: Path, text: str = CSV, name: str = "patients.csv") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_a_csv_is_read_with_its_sites(tmp_path: Path) -> None:
    path = csv(tmp_path)
    config = parse_experiment({}, {"data.name": f"{path}(label=outcome, site=ward)"})
    source = load_data(config)
    assert (source.kind, source.shape, source.classes) == ("table", (2,), ("no", "yes"))
    assert source.group_names == ("north", "south")
    table = tabulate_partition(config)
    assert table.names == ["north", "south"]
    assert table.label_counts.sum() + sum(table.validation) == len(source.train)


@pytest.mark.parametrize("separator", [";", "\t"])
def test_other_separators_are_seen(tmp_path: Path, separator: str) -> None:
    path = csv(tmp_path, CSV.replace(",", separator))
    assert load_dataset("table", {"path": str(path), "label": "outcome", "drop": "ward"}, None).shape == (2,)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "options", "complaint"),
    [
        (CSV, {}, "has the columns age, height, ward, outcome: name that of the labels"),
        (CSV, {"label": "outcom"}, "has no column 'outcom': did you mean outcome?"),
        (CSV, {"label": "outcome"}, "column 'ward' .* holds 'south' where numbers are needed"),
        (CSV.replace("21,", ",", 1), {"label": "outcome", "site": "ward"}, r"nothing in 1 of 40 rows \(columns age\)"),
        (CSV + "1,2\n", {"label": "outcome"}, "expected 4 columns in every row, found 2 in row 41"),
        ("", {"label": "outcome"}, "expected a table with a header line"),
        ("a,a,label\n1,2,3\n", {}, "'a' twice"),
        ("label\n1\n2\n", {}, "has no columns besides label"),
    ],
)  # fmt: skip
def test_tables_that_cannot_be_used_are_named(
    tmp_path: Path, text: str, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(InputError, match=complaint):
        load_dataset("table", {"path": str(csv(tmp_path, text))} | options, None)


def test_a_frame_a_parquet_file_and_a_csv_are_the_same(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    path = csv(tmp_path)
    frame = pandas.read_csv(path)
    frame.to_parquet(tmp_path / "patients.parquet")
    options = {"label": "outcome", "site": "ward"}
    found = [
        load_dataset("table", {"path": str(path)} | options, None),
        load_dataset("table", {"path": str(tmp_path / "patients.parquet")} | options, None),
        from_dataset(frame, **options),
    ]
    for source in found[1:]:
        assert source.classes == found[0].classes
        assert source.group_names == found[0].group_names
        assert np.array_equal(source.train.x, found[0].train.x)
        assert np.array_equal(source.test.y, found[0].test.y)


def test_numbers_that_do_not_count_from_0_are_names(tmp_path: Path) -> None:
    rows = "".join(f"{i},{10 - i % 2 * 8}\n" for i in range(20))
    path = csv(tmp_path, f"x,label\n{rows}")
    assert load_dataset("table", {"path": str(path)}, None).classes == ("2", "10")


def test_medmnist_files_are_read(tmp_path: Path) -> None:
    x = RANDOM.integers(0, 256, (30, 28, 28, 3)).astype(np.uint8)
    y = (np.arange(30) % 3)[:, None]
    np.savez(
        tmp_path / "bloodmnist.npz", train_images=x, train_labels=y, val_images=x, val_labels=y,
        test_images=x[:9], test_labels=y[:9],
    )  # fmt: skip
    source = load_data(parse_experiment({}, {"data.name": str(tmp_path / "bloodmnist.npz")}))
    assert (source.shape, len(source.train), len(source.test)) == ((3, 28, 28), 30, 9)
    assert np.array_equal(source.train.x, x.transpose(0, 3, 1, 2))


def pfllib(folder: Path) -> Path:
    for part, count in (("train", 12), ("test", 4)):
        (folder / part).mkdir(parents=True)
        for client in (0, 1, 10):
            x = RANDOM.random((count + client, 1, 5, 5)).astype(np.float32)
            content = {"x": x, "y": np.arange(count + client) % 3}
            np.savez_compressed(folder / part / f"{client}.npz", data=content)
    return folder


def test_a_folder_of_pfllib_is_read(tmp_path: Path) -> None:
    folder = pfllib(tmp_path / "mnist")
    config = parse_experiment({}, {"data.name": str(folder)})
    source = load_data(config)
    assert source.group_names == ("0", "1", "10")
    assert (len(source.train), len(source.test)) == (47, 23)
    raw = np.load(folder / "train" / "10.npz", allow_pickle=True)["data"].item()
    assert np.array_equal(source.train.x[source.train.groups == 2], raw["x"])
    assert tabulate_partition(config).names == ["0", "1", "10"]


class Evil:
    def __reduce__(self) -> Any:
        return print, ("run",)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"x": Evil(), "y": 1}, "is rejected because it contains"),
        ({"a": np.zeros(3)}, "expected equally long arrays x and y"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(2)}, "expected equally long arrays x and y"),
        ({"x": np.array([{}]), "y": np.zeros(1)}, "an array of type O8"),
    ],
)
def test_a_file_of_pfllib_runs_nothing(
    tmp_path: Path, content: Any, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = pfllib(tmp_path / "mnist")
    np.savez(folder / "train" / "1.npz", data=content)
    with pytest.raises(InputError, match=complaint):
        load_dataset("pfllib", {"path": str(folder)}, None)
    with zipfile.ZipFile(folder / "train" / "1.npz", "w") as archive:
        archive.writestr("other.npy", b"")
    with pytest.raises(InputError, match="expected an array named data"):
        load_dataset("pfllib", {"path": str(folder)}, None)
    assert capsys.readouterr().out == ""


def pictures(folder: Path, layout: dict[str, int]) -> Path:
    image = pytest.importorskip("PIL.Image")
    for name, count in layout.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            image.new("L", (4, 4), number).save(folder / name / f"{number}.png")
    return folder


def test_a_folder_of_sites_has_sites_not_classes(tmp_path: Path) -> None:
    layout = {"hospA/cat": 5, "hospA/dog": 5, "hospB/cat": 4, "hospB/owl": 4}
    folder = pictures(tmp_path / "all", layout)
    config = parse_experiment({}, {"data.name": str(folder)})
    source = load_data(config)
    assert (source.classes, source.group_names) == (("cat", "dog", "owl"), ("hospA", "hospB"))
    assert tabulate_partition(config).names == ["hospA", "hospB"]
    plain = load_dataset("folder", {"path": str(folder), "sites": False}, None)
    assert (plain.classes, plain.group_names) == (("hospA", "hospB"), ())


def test_sites_may_lie_below_train_and_test(tmp_path: Path) -> None:
    layout = {f"{part}/{site}/{name}": 3 for part in ("train", "test") for site in "ab" for name in "xy"}  # fmt: skip
    source = load_dataset("folder", {"path": str(pictures(tmp_path / "all", layout))}, None)
    assert (source.classes, source.group_names) == (("x", "y"), ("a", "b"))
    assert (len(source.train), len(source.test)) == (12, 12)
    assert source.train.groups is not None
    assert np.bincount(source.train.groups).tolist() == [6, 6]


def test_a_class_without_training_images_is_named(tmp_path: Path) -> None:
    layout = {"train/a/x": 2, "train/b/x": 2, "test/a/x": 1, "test/a/y": 1}
    with pytest.raises(InputError, match=r"found no images in .*/y: give"):
        load_dataset("folder", {"path": str(pictures(tmp_path / "all", layout))}, None)


def test_limits_keep_shares_of_classes_and_sites_for_every_seed() -> None:
    changes = {"data.name": "synthetic(samples=1000)", "data.limit": 100, "data.test_limit": 30}
    first, second = (
        load_data(parse_experiment({}, changes | {"seed": seed})) for seed in (0, 1)
    )  # fmt: skip
    assert (len(first.train), len(first.test)) == (100, 30)
    assert np.array_equal(first.train.x, second.train.x)
    whole = load_data(parse_experiment({}, {"data.name": "synthetic(samples=1000)"}))
    shares = np.bincount(whole.train.y) / len(whole.train)
    assert (np.abs(np.bincount(first.train.y) - 100 * shares) < 1).all()
    experiment = build_with(whole, {"data.limit": 100, "data.test_limit": 30})
    assert np.array_equal(experiment.dataset.train.x, first.train.x)
    assert len(load_data(parse_experiment({}, {"data.limit": 10**6})).train) > 1000


@pytest.mark.parametrize("name", sorted(DATASETS))
def test_names_of_datasets_are_not_paths(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    assert parse_data(name, DATASETS).name == ("folder" if name not in DATASETS else name)


def test_one_text_means_the_same_in_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    csv(tmp_path)
    text = "patients.csv(label=outcome, site=ward)"
    run = ["run", "--data", text, "--rounds", "1", "--out", "r", "--quiet"]
    app(run, standalone_mode=False)
    for words in (["--data", text], [text]):
        for command in ("show", "check"):
            capsys.readouterr()
            app(["data", command, *words], standalone_mode=False)
            shown = capsys.readouterr().out
            assert "north" in shown
            assert "south" in shown
    app(["evaluate", "r", "--data", text], standalone_mode=False)
    assert "test examples of patients" in capsys.readouterr().out
    for command in (["run", "--out", "x"], ["data", "show"], ["data", "check"], ["evaluate", "r"]):
        with pytest.raises(InputError, match=r"nowhere/x\.csv|no file|was not found"):
            app([*command, "--data", "nowhere/x.csv(label=outcome)"], standalone_mode=False)
    assert not Path("x").exists()


def test_paths_with_spaces_and_brackets_are_read(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "my data (1)", {"a": 3, "b": 3})
    assert load_data(parse_experiment({}, {"data.name": str(folder)})).classes == ("a", "b")
    path = csv(tmp_path, name="my table.csv")
    config = parse_experiment({}, {"data.name": f"{path}(label=outcome, drop=ward)"})
    assert load_data(config).shape == (2,)


def test_a_leading_number_needs_no_name() -> None:
    experiment = build_with(None, {"data.partition": "dirichlet(0.3)", "method": "fedprox(0.2)"})
    named = build_with(
        None, {"data.partition": "dirichlet(alpha=0.3)", "method": "fedprox(mu=0.2)"}
    )
    assert experiment.metadata["label_counts"] == named.metadata["label_counts"]
    assert experiment.task.method.hyper == named.task.method.hyper
    with pytest.raises(InputError, match="partition 'iid' has no leading number: it takes none"):
        build_with(None, {"data.partition": "iid(3)"})


def test_a_missing_dataset_names_the_command_that_fetches_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="remanence data fetch cifar10 --data-dir DIR"):
        load_dataset("cifar10", {}, tmp_path)
