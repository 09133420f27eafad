"""Check the words of sources and docs: the field's words, as docs/glossary.md has them.

Reports a private word where the field has one, in docstrings, comments, messages,
names of tests and texts; and a docstring, or a description of a CRD, that opens
with a bare question word in place of a verb or a noun that names the thing.
Prints one line for each and exits 1 when there is one.  It reads words, not
meaning: a sentence that it lets through may still be a bad one.

    check_words.py [PATH ...]
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from sources import python_files

SOURCES = ("schema/src", "operator/src", "worker/src", "simulator/src")
SOURCES += ("tests", "e2e", "bench", "scripts")
TEXTS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile")
TEXTS += ("docs", "crds", "charts", "examples")
SUFFIXES = (".md", ".yaml", ".yml", ".tpl", ".json", ".lua")
QUOTING = ("check_names.py", "check_words.py", "test_checkers.py")
"""Files that quote private words."""

OPENINGS = ("What", "Whether", "How", "Who", "Whose", "Whom", "Why", "Which", "Of", "Where", "When")
"""First words that name neither an action nor a thing."""

WORDS = {
    "told": "name the event, or what is reported",
    "nobody": "name what does not happen",
    "(?:some|any)(?:body|one)": "name the user, the client or the pod",
    "whoever": "name the caller",
    r"(?<!user\s)(?<!users\s)(?<!attacker\s)who": "name the pod, the process or the request",
    "whom": "name the pod, the process or the request",
    "a person": "a user",
    "people": "users",
    "anew": "again",
    "wish(?:es|ed)?": "recommendation",
    "unheard": "missing",
    "hears?": "gets, reads",
    "heard": "got, read",
    "happenings?": "event",
    "of late": "recently",
    "besides": "also",
    "for ever": "indefinitely, or until it is restarted",
    "(?:made|makes?) due": "enqueue",
    "put back": "revert drift",
    "(?:stands?|stood) still": "stall",
    "gets on|got on": "makes progress",
    "serves? on": "keep serving",
    "(?:is|are|was|were) passed over": "ignored",
    "of before(?= is| are|[.,:;)]|$)": "previous, older",
}
"""Private word, a regular expression -> what to write instead; whole words, in any case."""

_PRIVATE = re.compile(
    r"\b(?:" + "|".join(f"({word})" for word in WORDS).replace(" ", r"\s+") + r")\b", re.IGNORECASE
)
_ADVICE = tuple(WORDS.values())
_CODE = re.compile(r"`[^`\n]*`")
_QUESTION = re.compile(rf"description: [\"']?({'|'.join(OPENINGS)})\b")
_OWNERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def main(arguments: list[str]) -> int:
    """Check the named paths, or the default ones; returns the exit status."""
    paths = [Path(name) for name in arguments or (*SOURCES, *TEXTS)]
    sources = python_files([path for path in paths if path.is_dir()])
    files = [path for path in (*sources, *_texts(paths)) if path.name not in QUOTING]
    problems = [problem for path in files for problem in check_file(path)]
    print("\n".join([*problems, f"check_words: {len(files)} files, {len(problems)} problems"]))
    return 1 if problems else 0


def check_file(path: Path) -> Iterator[str]:
    """Every problem of one file, as a line that starts with file:line."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        nodes = list(ast.walk(ast.parse(text)))
        prose = [*_comments(text), *_strings(nodes), *_test_names(nodes)]
        found = [*_private_words(prose), *_openings(nodes)]
    else:
        prose = [(1, _CODE.sub(lambda code: "x" * len(code.group()), text))]
        found = [*_private_words(prose), *_descriptions(text)]
    return (f"{path}:{line}: {problem}" for line, problem in sorted(found))


def _texts(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
        elif path.suffix != ".py":
            yield path


def _private_words(prose: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    for line, text in prose:
        for match in _PRIVATE.finditer(text):
            word = " ".join(match.group().lower().split())
            at = line + text.count("\n", 0, match.start())
            yield at, f'"{word}" is a private word; instead: {_ADVICE[(match.lastindex or 1) - 1]}'


def _comments(text: str) -> Iterator[tuple[int, str]]:
    if "#" in text and _PRIVATE.search(text):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def _strings(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Strings of more than one word; a single one is a name or a value."""
    for node in nodes:
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, str) and isinstance(node, ast.Constant) and " " in value.strip():
            yield node.lineno, value


def _test_names(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Names of tests as sentences."""
    for node in nodes:
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and node.name.startswith("test_"):
            yield node.lineno, node.name.replace("_", " ")


def _openings(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        if isinstance(node, _OWNERS):
            for before, statement in zip([None, *node.body], node.body, strict=False):
                is_of_name = isinstance(before, ast.Assign | ast.AnnAssign)
                opening = _text_of(statement).partition(" ")[0].rstrip(",.:")
                if (before is None or is_of_name) and opening in OPENINGS:
                    problem = f'docstring opens with "{opening}": open with a verb or a noun'
                    yield statement.lineno, problem


def _text_of(statement: ast.stmt) -> str:
    value = statement.value if isinstance(statement, ast.Expr) else None
    is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
    return value.value.strip() if is_text else ""


def _descriptions(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if match := _QUESTION.search(line):
            yield number, f'description opens with "{match.group(1)}": open with a noun'


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
