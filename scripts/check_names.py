"""Check names: a class name is defined once, and no identifier or file has a private word in it.

Prints one line for each excess and exits 1 when there is one.  The words that texts may not use
are check_words.py's.

    check_names.py [FOLDER ...]
"""

import ast
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from sources import python_files

FOLDERS = ("schema/src", "operator/src", "worker/src", "simulator/src")

_WORDS = """
anew asked asking asks beside besides crew crowd course door doors fate foreseen giving here journey
landed landing leg legs looking nobody outlook pulse pulses room rooms said say says seat seats
spoken stranded stranger strangers taking tell told unheeded want wanted wants
"""
BANNED = frozenset(_WORDS.split())

ALLOWED = {
    "bootstrap_room": "a field of SGLang's HTTP API",
    "credit_wants": "a metric",
    "journeys": "files and a command of pdctl",
    "tell": "of Python's files",
    "want": "a field of a gRPC message",
    "Want": "a gRPC message",
}

_PARTS = re.compile(r"[a-z]+|[A-Z][a-z]*|[0-9]+")


def main(arguments: list[str]) -> int:
    """Check the named folders, or the default ones; returns the exit status."""
    files = python_files([Path(name) for name in arguments or FOLDERS])
    problems = [*_defined_twice(files), *(each for path in files for each in check_file(path))]
    print("\n".join([*problems, f"check_names: {len(files)} files, {len(problems)} problems"]))
    return 1 if problems else 0


def _defined_twice(files: list[Path]) -> Iterator[str]:
    places = defaultdict(list)
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path}:{node.lineno}")
    for name, found in places.items():
        if len(found) > 1:
            yield f"{found[1]}: class {name} is defined in {found[0]} too: give one another name"


def check_file(path: Path) -> Iterator[str]:
    """Every private word in the file's name, and the first place of each in its identifiers."""
    if words := _banned(path.stem):
        yield f"{path}:1: the file's name has {', '.join(words)}: use the field's word"
    found = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.NAME and token.string not in found:
                found.add(token.string)
                if words := _banned(token.string):
                    yield (
                        f"{path}:{token.start[0]}: {token.string} has {', '.join(words)}: use the "
                        "field's word"
                    )


def _banned(name: str) -> list[str]:
    return [] if name in ALLOWED else sorted(BANNED & {p.lower() for p in _PARTS.findall(name)})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
