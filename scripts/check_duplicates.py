"""Find runs of 10 or more equal code lines that stand at two places in the sources.

Lines are compared by their tokens, so spacing and comments do not hide a copy;
blank lines, comments, docstrings and imports are no code here.  Each run is
printed once, as long as it goes, with both places; any run exits 1.  Copies
with renamed variables are beyond it.

    check_duplicates.py [FOLDER ...]
"""

import ast
import io
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from sources import python_files

FOLDERS = ("schema/src", "operator/src", "worker/src", "simulator/src")
MIN_LINES = 10

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class CodeLine:
    """One line of code: its number in the file, and its tokens joined by blanks."""

    number: int
    text: str


@dataclass(frozen=True)
class Spot:
    """A position in the code lines of one file."""

    path: Path
    index: int


Code = dict[Path, list[CodeLine]]


def main(arguments: list[str]) -> int:
    """Check the named folders, or the default ones; returns the exit status."""
    files = python_files([Path(name) for name in arguments or FOLDERS])
    code: Code = {}
    problems = []
    for path in files:
        try:
            code[path] = code_lines(path.read_text(encoding="utf-8"))
        except SyntaxError as e:
            problems.append(f"{path}:{e.lineno}: not valid Python, so not compared: {e.msg}")
    problems += duplicates(code)
    print("\n".join([*problems, f"check_duplicates: {len(files)} files, {len(problems)} problems"]))
    return 1 if problems else 0


def code_lines(source: str) -> list[CodeLine]:
    """The lines of a module that count as code.  Raises SyntaxError for one that does not parse."""
    skipped = _lines_without_logic(ast.parse(source))
    texts: dict[int, list[str]] = defaultdict(list)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT and token.start[0] not in skipped:
            texts[token.start[0]].append(token.string)
    return [CodeLine(number, " ".join(words)) for number, words in sorted(texts.items())]


def duplicates(code: Code) -> Iterator[str]:
    """One line of text for each longest run of equal lines at two places that do not overlap."""
    for spots in _windows(code).values():
        for first, second in combinations(spots, 2):
            overlap = first.path == second.path and second.index - first.index < MIN_LINES
            if not overlap and not _same(code, first, second, -1):
                length = MIN_LINES
                while _same(code, first, second, length):
                    length += 1
                yield (
                    f"{_place(code, first)}: {length} lines equal those at {_place(code, second)}: "
                    "make one piece of code serve both"
                )


def _windows(code: Code) -> dict[tuple[str, ...], list[Spot]]:
    """Beginnings of each window of MIN_LINES lines."""
    windows: dict[tuple[str, ...], list[Spot]] = defaultdict(list)
    for path, lines in code.items():
        texts = [line.text for line in lines]
        for index in range(len(texts) - MIN_LINES + 1):
            windows[tuple(texts[index : index + MIN_LINES])].append(Spot(path, index))
    return windows


def _same(code: Code, first: Spot, second: Spot, offset: int) -> bool:
    """Return whether the lines `offset` after both spots exist and are equal."""
    a, b = first.index + offset, second.index + offset
    lines_a, lines_b = code[first.path], code[second.path]
    return 0 <= a < len(lines_a) and 0 <= b < len(lines_b) and lines_a[a].text == lines_b[b].text


def _place(code: Code, spot: Spot) -> str:
    return f"{spot.path}:{code[spot.path][spot.index].number}"


def _lines_without_logic(tree: ast.Module) -> set[int]:
    """Numbers of the lines that hold imports or bare strings (docstrings)."""
    return {
        number
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.Expr) and _is_string(node.value))
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def _is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
