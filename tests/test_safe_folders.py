"""Files of a run, a comparison, an outcome and a site's state are opened through `SafePath` alone.

The test reads the source with `ast`. It finds calls of functions and methods that open, change or
ask for a file by its path; methods of `SafePath` have other names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "remanence"
# packages and modules that work in folders which another person may have prepared
CHECKED = (
    "results", "rounds", "sweeps", "metrics", "report", "diagnosis", "recipes", "export.py",
    "api.py", "cli/recipes.py", "cli/summary.py", "flower/site.py", "flower/site_storage.py",
    "flower/secure_noise.py", "flower/coordinator.py", "flower/daemon_client.py",
)  # fmt: skip
# of pathlib.Path
METHODS = {
    "chmod", "exists", "glob", "hardlink_to", "is_dir", "is_fifo", "is_file",
    "is_socket", "is_symlink", "iterdir", "lchmod", "lstat", "mkdir", "open", "read_bytes",
    "read_text", "readlink", "rename", "rglob", "rmdir", "stat", "symlink_to", "touch", "unlink",
    "walk", "write_bytes", "write_text",
}  # fmt: skip
FUNCTIONS = {
    "open", "io.open", "os.open", "os.stat", "os.lstat", "os.listdir", "os.scandir", "os.walk",
    "os.remove", "os.unlink", "os.rename", "os.replace", "os.mkdir", "os.makedirs", "os.rmdir",
    "os.link", "os.symlink", "os.truncate", "os.utime", "os.path.exists", "os.path.isfile",
    "os.path.isdir", "os.path.getsize", "os.path.getmtime", "np.load", "np.save", "np.savez",
    "np.fromfile", "np.memmap", "torch.load", "torch.save", "torch.jit.save", "torch.onnx.export",
    "save_file", "load_file", "safe_open",
}  # fmt: skip
MODULES = ("shutil.",)
# calls that open no file of such a folder
EXCEPTIONS = {
    # the package's own files
    "recipes/loader.py": {"iterdir", "read_text"},
    "report/live.py": {"read_bytes"},
    "report/page.py": {"read_text"},
    # a picture in memory
    "recipes/figure_plots.py": {"open"},
    # a temporary folder of this process, since torch's writers take paths
    "export.py": {"torch.jit.save", "torch.onnx.export", "iterdir", "read_bytes"},
    # the folder of the socket, in the system's folder of temporary files
    "flower/daemon_client.py": {"mkdir", "lstat"},
}


def find_calls(source: str) -> Iterator[tuple[str, int]]:
    """Calls that open files by path: name and line."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in FUNCTIONS or name.startswith(MODULES):
            yield name, node.lineno
        elif isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            yield node.func.attr, node.lineno


def modules() -> list[Path]:
    return sorted(
        path
        for place in CHECKED
        for path in ([SOURCE / place] if place.endswith(".py") else (SOURCE / place).rglob("*.py"))
    )


def test_files_of_folders_are_opened_through_safe_path() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line} calls {name}"
        for path in modules()
        for name, line in find_calls(path.read_text(encoding="utf-8"))
        if name not in EXCEPTIONS.get(str(path.relative_to(SOURCE)), set())
    ]
    assert not found, "\n".join(found)


def test_every_exception_is_needed() -> None:
    for module, names in EXCEPTIONS.items():
        calls = {name for name, _ in find_calls((SOURCE / module).read_text(encoding="utf-8"))}
        assert names <= calls, module


@pytest.mark.parametrize(
    "call",
    [
        *("open(path)", "path.open('rb')", "(folder / 'a').exists()", "os.replace(a, b)"),
        *("shutil.rmtree(folder)", "np.fromfile(path)", "[p for p in folder.glob('*')]"),
    ],
)
def test_a_call_is_found(call: str) -> None:
    assert list(find_calls(call))


def test_methods_of_safe_path_have_other_names() -> None:
    from remanence.core.safe_path import SafePath

    assert not METHODS & set(vars(SafePath))
