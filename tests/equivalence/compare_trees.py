"""Compare this tree with an earlier commit, bit for bit: every tensor of the final states of the
jobs in `final_states.py`.

    python tests/equivalence/compare_trees.py [--base COMMIT] [--only TEXT] [--tolerance 0]

The base commit (by default the one named in the file `BASE` beside this script) is checked out as a
git worktree in a temporary folder. Both versions run their own `final_states.py` with the same
interpreter. Tensors are matched through `RENAMED`: words of the base on the left, of this tree on
the right. A commit that replaces an operator, and so changes bits, states that, stays within 1e-12,
and writes its own hash into `BASE`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DRIVER = "tests/equivalence/final_states.py"

# Names of tensors in the base -> in this tree, as patterns. First the rules for states, then those for
# metrics, whose names begin with "metrics/".
STATES: tuple[tuple[str, str], ...] = (
    (r"/centralised/", "/centralized/"),
    (r"^own/", "client_states/"),
    (r"/reply/own/", "/reply/client_state/"),
    (r"/reply/extras/", "/reply/payload/"),
    (r"^others/", "extra_servers/"),
    (r"^uses$", "model_of_client"),
    (r"^assign/", "assignment_state/"),
    (r"^late/", "stale/"),
    (r"/began/", "/base_model/"),
    (r"/due$", "/arrival_round"),
    (r"^[cC]rowd/", "client_models/"),
    (r"/waited$", "/rounds_since_best"),
    (r"/stopped$", "/early_stopped"),
    (r"/heard$", "/peer_counts"),
)
METRICS: tuple[tuple[str, str], ...] = (
    (r"/centralised\.", "/centralized."),
    *(
        (rf"^(metrics/\d+)/{old}(?=/|$)", rf"\1/{new}")
        for old, new in {
            "refused": "rejected",
            "silent": "no_response",
            "asked": "invited",
            "extras": "payload",
            "late_used": "stale_used",
            "stopped": "early_stopped",
            "worst_tenth": "bottom_decile",
            "own_cluster": "same_cluster_share",
        }.items()
    ),
)
# columns of metrics.jsonl, and tables of the state, that the base does not have
ADDED = re.compile(
    r"(^|/)metrics/\d+/(unmoved|learned|valid_accuracy|epsilon\w*_replace)$"
    r"|/valid_accuracy$"
)
# jobs and columns that were wrong in the base: bytes_up counts the late replies of a round too, and
# none of clients that declined; fedreg projects what its authors' program does
CORRECTED = re.compile(
    r"setting~(over_selection|speeds|stale)~\w+\.safetensors metrics/\d+/bytes_up"
    r"|(part|drift)~fedreg~\w+\.safetensors .*"
)


def run_jobs(tree: Path, out: Path, only: str) -> None:
    environment = os.environ | {
        "PYTHONPATH": str(tree / "src"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    subprocess.run(
        [sys.executable, str(tree / DRIVER), str(out), "--only", only],
        cwd=tree,
        env=environment,
        check=True,
    )


def has_commit(name: str) -> bool:
    """Whether a commit is in this clone, which may be shallow."""
    found = subprocess.run(
        ["git", "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        check=False,
    )
    return found.returncode == 0


def translate(name: str) -> str:
    """The name of a tensor of the base in the words of this tree."""
    for pattern, new in METRICS if name.startswith("metrics/") else STATES:
        name = re.sub(pattern, new, name)
    return name


def translate_job(name: str) -> str:
    return name.replace("centralised", "centralized")


def compare(old: Path, new: Path, tolerance: float) -> list[str]:
    """A line for each difference."""
    before, after = (
        {path.name: path for path in folder.glob("*.safetensors")} for folder in (old, new)
    )
    before = {translate_job(name): path for name, path in before.items()}
    found = [f"{name}: not in this tree" for name in sorted(set(before) - set(after))]
    for name in sorted(set(after) - set(before)):
        print(f"{name}: a new job, with nothing to compare it to")
    for job in sorted(set(before) & set(after)):
        left = {translate(name): value for name, value in load_file(before[job]).items()}
        right = load_file(after[job])
        right = {name: right[name] for name in right if name in left or not ADDED.search(name)}
        if odd := sorted(set(left) ^ set(right)):
            found.append(f"{job}: {len(odd)} tensors only in one of the two, such as {odd[:6]}")
        different = {
            name: distance(left[name], right[name])
            for name in sorted(set(left) & set(right))
            if not CORRECTED.fullmatch(f"{job} {name}")
        }
        worst = max(different, key=lambda name: different[name], default="")
        if worst and different[worst] > tolerance:
            count = sum(value > tolerance for value in different.values())
            found.append(
                f"{job}: {count} of {len(different)} tensors differ, most by"
                f" {different[worst]:.1e} at {worst}"
            )
    return found


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, relative to the larger of 1 and the value; 0 only where all bits
    are equal.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if a.numpy().tobytes() == b.numpy().tobytes():
        return 0.0
    x, y = a.double(), b.double()
    gap = torch.where(x == y, 0.0, (x - y).abs() / y.abs().clamp(min=1.0)).nan_to_num(
        nan=float("inf")
    )
    return max(float(gap.max()), 1e-300)  # the same number in other bits (-0.0) is a difference too


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--base",
        default=(HERE / "BASE").read_text(encoding="utf-8").strip(),
        help="a commit; default: %(default)s",
    )
    parser.add_argument(
        "--only", default="", help="run only the jobs whose name contains this text"
    )
    parser.add_argument("--tolerance", type=float, default=0.0)
    parser.add_argument(
        "--cache", type=Path, help="keep the base's tensors in this folder and use them again"
    )
    options = parser.parse_args()
    if not has_commit(options.base):
        parser.error(
            f"the commit {options.base} is not in this clone: fetch the whole history"
            " (git fetch --unshallow), or name another commit, such as --base HEAD"
        )
    with tempfile.TemporaryDirectory(prefix="remanence-trees-") as temporary:
        old, new, worktree = (
            options.cache or Path(temporary, "old"),
            Path(temporary, "new"),
            Path(temporary, "base"),
        )
        if not (old.is_dir() and any(old.iterdir())):
            subprocess.run(
                ["git", "worktree", "add", "--detach", "--quiet", str(worktree), options.base],
                cwd=ROOT,
                check=True,
            )
            try:
                run_jobs(worktree, old, options.only)
            finally:
                subprocess.run(
                    ["git", "worktree", "remove", "--force", str(worktree)], cwd=ROOT, check=True
                )
        run_jobs(ROOT, new, options.only)
        if options.only:
            old = _only(old, Path(temporary, "some"), options.only)
        differences = compare(old, new, options.tolerance)
        count = len(list(new.iterdir()))
    print(
        "\n".join(differences)
        or f"no difference: {count} jobs, every tensor equal to {options.base}"
    )
    return 1 if differences else 0


def _only(folder: Path, target: Path, text: str) -> Path:
    """The files of a cached folder whose jobs were run."""
    target.mkdir()
    for path in folder.glob("*.safetensors"):
        if text.replace("/", "~") in translate_job(path.name):
            (target / path.name).symlink_to(path)
    return target


if __name__ == "__main__":
    sys.exit(main())
