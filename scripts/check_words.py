"""Check the words of docstrings, comments and messages: the field's words, as docs/glossary.md has them.

Reports a private word where the field has one, and a docstring that opens with a
bare question word in place of a verb or a noun that names the thing.  Prints one
line for each and exits 1 when there is one.  It reads words, not meaning: a
sentence that it lets through may still be a bad one.

    check_words.py [FOLDER ...]
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from sources import python_files

FOLDERS = ("operator/src",)

OPENINGS = ("What", "Whether", "How", "Who", "Whose", "Why", "Which", "Of")
"""First words that name neither an action nor a thing."""

WORDS = {
    "told": "name the event, or what is reported",
    "nobody": "name what does not happen",
    "somebody": "name the user, the client or the pod",
    "someone": "name the user, the client or the pod",
    "anybody": "name the user, the client or the pod",
    "whoever": "name the caller",
    "anew": "again",
    "wish": "recommendation",
    "wishes": "recommendations",
    "wished": "recommended",
    "unheard": "missing",
    "happening": "event",
    "happenings": "events",
    "besides": "also",
    "for ever": "indefinitely, or until it is restarted",
    "made due": "enqueued",
    "make due": "enqueue",
    "makes due": "enqueues",
    "for a person": "as text",
    "put back": "revert drift",
}
"""Private word -> what to write instead; compared in lower case, as whole words."""

_PRIVATE = re.compile(r"\b(?:" + "|".join(WORDS).replace(" ", r"\s+") + r")\b", re.IGNORECASE)
_OWNERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def main(arguments: list[str]) -> int:
    """Check the named folders, or the default ones; returns the exit status."""
    files = python_files([Path(name) for name in arguments or FOLDERS])
    problems = [problem for path in files for problem in check_file(path)]
    print("\n".join([*problems, f"check_words: {len(files)} files, {len(problems)} problems"]))
    return 1 if problems else 0


def check_file(path: Path) -> Iterator[str]:
    """Every problem of one file, as a line that starts with file:line."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    found = [*_private_words(text, tree), *_openings(tree)]
    return (f"{path}:{line}: {problem}" for line, problem in sorted(found))


def _private_words(text: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    for line, prose in (*_comments(text), *_strings(tree)):
        for match in _PRIVATE.finditer(prose):
            word = " ".join(match.group().lower().split())
            at = line + prose.count("\n", 0, match.start())
            yield at, f'"{word}" is a private word; instead: {WORDS[word]}'


def _comments(text: str) -> Iterator[tuple[int, str]]:
    if "#" in text:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def _strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def _openings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, _OWNERS):
            first = node.body[0] if node.body else None
            opening = (ast.get_docstring(node) or "").partition(" ")[0].rstrip(",.:")
            if first is not None and opening in OPENINGS:
                yield first.lineno, f'docstring opens with "{opening}": open with a verb or a noun'


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
