"""The command that compares two versions: what it says where there is nothing to compare with."""

from __future__ import annotations

import pytest
from equivalence import compare_trees


def test_a_base_that_is_not_in_the_clone_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = "0123456789" * 4
    monkeypatch.setattr("sys.argv", ["compare_trees.py", "--base", missing])
    with pytest.raises(SystemExit) as ended:
        compare_trees.main()
    assert ended.value.code == 2
    assert f"the commit {missing} is not in this clone: fetch" in capsys.readouterr().err
