"""Pages of the documentation that are made from the code when the site is built.

- `docstrings`: a docstring, written as in Google's guide, as Markdown.
- `python_names`: the pages of `remanence` and `remanence.extend`.
- `tables`: settings, lists of parts, commands and measures.
- `project`: pages that live in the root of the repository.
- `gallery_order`: the order of the examples.
- `schemas`: JSON schemas of the experiment and of `remanence list --json`.

`pages()` returns all of them; `docs/conf.py` writes them, and `tests/test_site_pages.py` checks
that every public name, setting, part, option and measure has an entry.
"""

from __future__ import annotations

from site_pages import project, python_names, tables


def pages() -> dict[str, str]:
    """Every generated page: its path below `docs`, and its Markdown."""
    return {**python_names.pages(), **tables.pages(), **project.pages()}
