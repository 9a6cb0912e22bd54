from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remanence.core.errors import InputError
from remanence.data import load_dataset
from remanence.data.fast_json import read_decimals


def page(users: dict[str, list[int]], shade: float = 0.0) -> dict[str, object]:
    """Users with one image a label: all pixels `shade`, the first one label / 100."""
    data = {
        user: {"x": [[label / 100, *[shade] * 783] for label in labels], "y": labels}
        for user, labels in users.items()
    }
    return {
        "users": list(users),
        "num_samples": [len(labels) for labels in users.values()],
        "user_data": data,
    }


def write(folder: Path, pages: dict[str, object], **style: object) -> None:
    for name, content in pages.items():
        path = folder / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, **style))  # type: ignore[arg-type]


@pytest.mark.parametrize("style", [{}, {"indent": 1}, {"separators": (",", ":")}])
@pytest.mark.parametrize("folder", ["femnist", "femnist/data", "leaf/femnist/data"])
def test_users_become_groups_that_train_and_test_share(
    tmp_path: Path, folder: str, style: dict[str, object]
) -> None:
    """Users b, c train in two files; a and b test: groups are a, b, c. Pixel .61 becomes
    round(155.55) = 156 of 255.
    """
    train = {"train/one": page({"b": [61, 0]}, 1.0), "train/two": page({"c": [5]})}
    write(tmp_path / folder, {**train, "test/one": page({"b": [7], "a": [10]})}, **style)
    dataset = load_dataset("femnist", {}, tmp_path)
    assert dataset.group_names == ("a", "b", "c")
    assert dataset.train.y.tolist() == [61, 0, 5]
    assert dataset.train.groups is not None
    assert dataset.train.groups.tolist() == [1, 1, 2]
    assert dataset.test.groups is not None
    assert dataset.test.groups.tolist() == [1, 0]
    assert dataset.train.x.shape == (3, 1, 28, 28)
    assert dataset.train.x[:, 0, 0, 0].tolist() == [156, 0, 13]
    assert dataset.train.x[:, 0, 27, 27].tolist() == [255, 255, 0]
    assert dataset.classes[61] == "z"


def test_numbers_a_plain_reader_cannot_read_are_left_to_json(tmp_path: Path) -> None:
    """1e-1 and -0.0 are fine JSON: .1 * 255 = 25.5 rounds to the even 26."""
    write(tmp_path / "femnist", {"train/a": page({"a": [0, 1]}), "test/a": page({"a": [0]})})
    path = tmp_path / "femnist" / "train" / "a.json"
    path.write_text(path.read_text().replace("0.01, 0.0,", "1e-1, -0.0,", 1))
    dataset = load_dataset("femnist", {}, tmp_path)
    assert dataset.train.x[1, 0, 0, :2].tolist() == [26, 0]


def test_users_without_examples_are_left_out(tmp_path: Path) -> None:
    write(
        tmp_path / "leaf-mnist-by-writer",
        {"train/a": page({"a": [0, 1], "z": []}), "test/a": page({"a": [0]})},
    )
    dataset = load_dataset("mnist_by_writer", {}, tmp_path)
    assert dataset.group_names == ("a",)
    assert len(dataset.classes) == 10


def spoil(**changes: object) -> dict[str, object]:
    return {**page({"a": [0, 1]}), **changes}


def of_a(**parts: object) -> dict[str, object]:
    images = [[0.0] * 784] * 2
    return spoil(user_data={"a": {"x": images, "y": [0, 1], **parts}})


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (json.dumps(page({"a": [0, 1]}))[:-5], "a complete JSON file"),
        (json.dumps(page({"a": [0, 1]})) + "]", "text after the end"),
        ("[1, 2]", "no object at character 0"),
        ("", "a complete JSON file"),
        ('{"users"', "a complete JSON file"),
        ('{"users": ' + "[" * 100_000, "a complete JSON file"),
        (json.dumps(spoil(num_samples=[3])), "3 examples of the user 'a', found 2"),
        (json.dumps(spoil(users=["b"])), "2 examples of the user 'b', found none"),
        (json.dumps(spoil(users=[["b"]])), "found none"),
        (json.dumps(spoil(users=["a", "b"])), "lists 'users' and 'num_samples' as long as"),
        (json.dumps(spoil(user_data={"a": 5})), "no object"),
        (json.dumps(of_a(y=[0])), "lists 'x' and 'y' of one length"),
        (json.dumps(of_a(y=[0, 62])), "labels of the user 'a' from 0 to 61"),
        (json.dumps(of_a(y=[0, 1.5])), "labels of the user 'a' from 0 to 61"),
        (json.dumps(of_a(x=[[0.0] * 784, [0.0] * 783])), "lists of 784 numbers"),
        (json.dumps(of_a(x=[[0.0] * 784, [[]] * 784])), "something that is no number"),
        (json.dumps(of_a(x=[[0.0] * 784, [1.5] * 784])), "pixels of the user 'a' from 0 to 1"),
        (
            json.dumps(of_a(x=[[0.0] * 784, [float("nan")] * 784])),
            "pixels of the user 'a' from 0 to 1",
        ),
    ],
)
def test_damage_is_named(tmp_path: Path, content: str, complaint: str) -> None:
    write(tmp_path / "femnist", {"train/a": page({"a": [0]}), "test/a": page({"a": [0]})})
    (tmp_path / "femnist" / "test" / "a.json").write_text(content)
    with pytest.raises(InputError, match=rf"test/a\.json is damaged .*{complaint}"):
        load_dataset("femnist", {}, tmp_path)


def test_one_user_in_two_files_is_refused(tmp_path: Path) -> None:
    write(
        tmp_path / "femnist",
        {"train/a": page({"a": [0]}), "train/b": page({"a": [0]}), "test/a": page({"a": [0]})},
    )
    with pytest.raises(InputError, match="the user 'a', and so does another file"):
        load_dataset("femnist", {}, tmp_path)


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    write(tmp_path / "femnist", {"train/a": page({"a": [0]})})
    (tmp_path / "femnist" / "test").mkdir()
    with pytest.raises(InputError, match=r"femnist/test holds no examples in 0 \*\.json files"):
        load_dataset("femnist", {}, tmp_path)


plain_numbers = st.one_of(
    st.just("0"),
    st.just("1"),
    st.integers(0, 10**18 - 1).map(lambda digits: f"0.{digits:018d}"),
    st.floats(0, 1).map(lambda x: f"{x:.4f}"),
)


@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_plain_tables_are_read_as_json_reads_them(
    rows: int, columns: int, data: st.DataObject
) -> None:
    numbers = [[data.draw(plain_numbers) for _ in range(columns)] for _ in range(rows)]
    text = "[" + ", ".join("[" + " , ".join(row) + "]" for row in numbers) + "]"
    read = read_decimals("{" + text + ', "y"', 1, columns)
    assert read is not None
    assert read[1] == 1 + len(text)
    assert np.allclose(read[0], np.array(json.loads(text), dtype=float), rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    "text",
    ["[]", "[[]]", "[[0.5]", "[[0.5, 0.5]]", "[[0.5], [0.5]] ]", "[[-0.5]]", "[[5e-1]]", "[[.5]]", "[[0.]]", "[[00.5]]", "[[0.5.5]]", "[[0..5]]", "[[12]]",
     "[[],[0.5, 0.5]]", "[0.5[]]", "[[0.5]0.5,[]]", "[[null]]", "[[9.000000000000000000]]", "0.5", "", "[[0.5/0]]"],
)  # fmt: skip
def test_anything_else_is_not_plain(text: str) -> None:
    assert read_decimals(text, 0, 1) is None
