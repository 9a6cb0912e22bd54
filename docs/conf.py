"""Sphinx: `make docs` builds the site into build/docs/html and fails at the first warning."""

from __future__ import annotations

import json
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
EXTRA = ROOT / "build" / "docs" / "extra"  # files that are copied as they are
sys.path.insert(0, str(DOCS))

import site_pages  # noqa: E402
from site_pages.schemas import schemas  # noqa: E402

from remanence.version import __version__  # noqa: E402

project = "Remanence"
author = "The Remanence authors"
copyright = "2026, the Remanence authors"
release = version = __version__

extensions = ["myst_parser", "sphinx_gallery.gen_gallery"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["results/outcomes", "gallery/*.ipynb", "**/GALLERY_HEADER.rst"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4  # links to headings are checked
suppress_warnings = ["config.cache"]
highlight_language = "none"  # indented blocks: commands and files of several kinds
python_maximum_signature_line_length = 78
nitpicky = False  # annotations name types of torch and numpy, which have no pages here

html_theme = "furo"
html_title = f"Remanence {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = [str(EXTRA)]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#9c2f1a", "color-brand-content": "#9c2f1a"},
    "dark_css_variables": {"color-brand-primary": "#f0a58f", "color-brand-content": "#f0a58f"},
}

sphinx_gallery_conf = {
    "examples_dirs": str(ROOT / "examples"),
    "gallery_dirs": "gallery",
    "filename_pattern": r"/[a-z_]+\.py",
    "ignore_pattern": r"__init__\.py",
    "within_subsection_order": "site_pages.gallery_order.reading_order",
    "backreferences_dir": None,
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_memory": False,
    "capture_repr": (),  # printed text alone
    "remove_config_comments": True,
    "min_reported_time": 0,
}


def write_pages() -> None:
    """Write the generated pages and schemas; an unchanged file keeps its time."""
    for path, text in site_pages.pages().items():
        _write(DOCS / path, text)
    for name, schema in schemas().items():
        _write(EXTRA / "reference" / name, json.dumps(schema, indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def setup(app) -> None:  # type: ignore[no-untyped-def]
    """Generate pages, and make links to pages of the root work."""
    write_pages()

    def rewrite(_app, _page, source) -> None:  # type: ignore[no-untyped-def]
        source[0] = site_pages.project.in_docs_folder(source[0])

    app.connect("source-read", rewrite)
