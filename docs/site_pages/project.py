"""Pages that live in the root of the repository, with links that work in the site."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# page of the repository -> page of the site
PAGES = {
    "SECURITY.md": "project/security.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CODE_OF_CONDUCT.md": "project/code-of-conduct.md",
    "CHANGELOG.md": "project/changelog.md",
    "AGENTS.md": "project/agents.md",
    "benchmarks/README.md": "project/benchmarks.md",
}
FRONT_PAGE = "README.md"
NO_PAGE = ("LICENSE", "CITATION.cff")


def pages() -> dict[str, str]:
    """The pages by their path below `docs`."""
    return {
        page: in_project_folder((ROOT / source).read_text(encoding="utf-8"))
        for source, page in PAGES.items()
    }


def in_project_folder(text: str) -> str:
    """Rewrite links that are relative to the root: `docs/x.md` is `../x.md` in the site."""

    def rewrite(link: re.Match[str]) -> str:
        words, target = link[1], link[2]
        path, mark, anchor = target.partition("#")
        if path in NO_PAGE:
            return words
        if path == FRONT_PAGE:
            return f"[{words}](../index.md)"
        if path in PAGES:
            return f"[{words}](../{PAGES[path]}{mark}{anchor})"
        if path.startswith("docs/"):
            return f"[{words}](../{path.removeprefix('docs/')}{mark}{anchor})"
        return link[0]

    return re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", rewrite, text)


def in_docs_folder(text: str) -> str:
    """Rewrite the links of a page in `docs` to pages of the root: `../SECURITY.md`."""

    def rewrite(link: re.Match[str]) -> str:
        return f"]({PAGES[link[1]]}{link[2] or ''})" if link[1] in PAGES else link[0]

    return re.sub(r"\]\(\.\./([\w./]+)(#[\w-]+)?\)", rewrite, text)
