"""The table of results as a LaTeX table (booktabs), and escaping of text for LaTeX.

A method's name may contain any characters: those with a meaning in LaTeX are escaped, so that no
name can end a cell, start a command or become a comment.
"""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Collection, Sequence

SIGNS = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "%": r"\%",
    "#": r"\#",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "`": r"\textasciigrave{}",
    '"': r"\char34{}",
    "'": "'{}",
    "[": "{[}",
    "]": "{]}",
    "*": "{*}",
    "-": "-{}",
    "±": r"$\pm$",
    "–": "--",
    "—": "---",
    "…": r"\ldots{}",
    "×": r"$\times$",
    "−": "$-$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "∞": r"$\infty$",
    "\N{NO-BREAK SPACE}": "~",
}
# Greek letters that LaTeX has under another name, or no command for
NO_SUCH_COMMAND = {"omicron": "o", "final sigma": r"$\varsigma$"}
BARE_CAPITALS = [
    "ALPHA",
    "BETA",
    "EPSILON",
    "ZETA",
    "ETA",
    "IOTA",
    "KAPPA",
    "MU",
    "NU",
    "OMICRON",
    "RHO",
    "TAU",
    "CHI",
]  # same glyphs as Latin capitals; LaTeX has no commands for them


def escape_latex(text: object) -> str:
    r"""Text on one line that LaTeX prints as it is; letters of other scripts are left as they are,
    which some LaTeX engines support.

    >>> escape_latex("fedprox(mu=0.1) & 50% of_{x}")
    'fedprox(mu=0.1) \\& 50\\% of\\_\\{x\\}'
    >>> escape_latex("λ--")
    '$\\lambda$-{}-{}'
    """
    flat = " ".join(str(text).split())
    return "".join(SIGNS.get(sign) or _write_greek(sign) for sign in flat if sign.isprintable())


def render_latex(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    caption: str,
    label: str,
    strong: Collection[tuple[int, int]] = (),
) -> str:
    """A table* environment as wide as the page.

    Args:
        headings: Of the columns, as plain text.
        rows: Cells, as plain text.
        caption: Of the table.
        label: Of the table, without the prefix `tab:`.
        strong: Cells (row, column) in bold.
    """
    lines = [
        r"% needs \usepackage{booktabs}",
        r"\begin{table*}",
        r"  \centering",
        r"  \small",
        rf"  \caption{{{escape_latex(caption)}}}",
        rf"  \label{{tab:{re.sub(r'[^a-z0-9-]', '-', label.lower())}}}",
        rf"  \begin{{tabular}}{{l{'r' * (len(headings) - 1)}}}",
        r"    \toprule",
        f"    {' & '.join([escape_latex(headings[0]), *map(_stack_words, headings[1:])])} \\\\",
        r"    \midrule",
    ]
    for index, row in enumerate(rows):
        texts = [escape_latex(cell) for cell in row]
        cells = [
            rf"\textbf{{{text}}}" if (index, column) in strong else text
            for column, text in enumerate(texts)
        ]
        lines.append(f"    {' & '.join(cells)} \\\\")
    return "\n".join([*lines, r"    \bottomrule", r"  \end{tabular}", r"\end{table*}"]) + "\n"


def _stack_words(heading: str) -> str:
    """A long heading on several lines, so that the numbers determine the column width."""
    lines = textwrap.wrap(heading, 12, break_long_words=False)
    if len(lines) < 2:
        return escape_latex(heading)
    stacked = r" \\ ".join(map(escape_latex, lines))
    return rf"\begin{{tabular}}[b]{{@{{}}r@{{}}}}{stacked}\end{{tabular}}"


def _write_greek(sign: str) -> str:
    name = unicodedata.name(sign, "")
    found = re.fullmatch(r"GREEK (SMALL|CAPITAL) LETTER ([A-Z ]+)", name)
    if not found or " WITH " in name:
        return sign
    size, letter = found.groups()
    if size == "CAPITAL" and letter in BARE_CAPITALS:
        return (
            letter[0]
            if letter not in ("ETA", "RHO", "CHI")
            else {"ETA": "H", "RHO": "P", "CHI": "X"}[letter]
        )
    word = letter.lower().replace("lamda", "lambda")
    return NO_SUCH_COMMAND.get(word) or rf"$\{word.capitalize() if size == 'CAPITAL' else word}$"
