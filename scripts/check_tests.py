"""Check what test files import: helpers, never another test file, and one program each.

A test that compares operator and worker stands in tests/contract.  Helpers under
tests/operator and tests/worker keep to their distribution too; those at the root
of tests/ may serve both.  Prints one line for each breach and exits 1 when there
is one.  Imports are read, not followed.

    check_tests.py [FOLDER ...]
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from sources import python_files

FOLDERS = ("tests", "e2e")
OPERATOR = {"pdcluster_api", "pdcluster_operator", "pdctl"}
WORKER = {"pdcluster_worker"}
BOTH = "contract"
"""Folder of the tests that import operator and worker."""

Import = tuple[int, str]
"""Line, and the module in full."""


def main(arguments: list[str]) -> int:
    """Check the named folders, or the default ones; returns the exit status."""
    files = python_files([Path(name) for name in arguments or FOLDERS])
    problems = [problem for path in files for problem in check_file(path)]
    print("\n".join([*problems, f"check_tests: {len(files)} files, {len(problems)} problems"]))
    return 1 if problems else 0


def check_file(path: Path) -> Iterator[str]:
    """Every breach of one file, as a line that starts with file:line."""
    imports = list(imports_of(ast.parse(path.read_text(encoding="utf-8"))))
    for line, module in sorted({(line, _test_file(module)) for line, module in imports}):
        if module:
            yield f"{path}:{line}: imports {module}, a test file: move what both need into a helper"
    yield from _foreign(path, imports)


def _test_file(module: str) -> str:
    """The module up to the part that is a test file; empty = there is none."""
    parts = module.split(".")
    found = [index for index, part in enumerate(parts) if part.startswith("test_")]
    return ".".join(parts[: found[0] + 1]) if found else ""


def imports_of(tree: ast.AST) -> Iterator[Import]:
    """Yield every module, and name of a module, that is imported anywhere in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def _foreign(path: Path, imports: list[Import]) -> Iterator[str]:
    """Imports of the other distribution, by the folder or by what else the test imports."""
    of_operator, of_worker = (
        [each for each in imports if each[1].partition(".")[0] in packages]
        for packages in (OPERATOR, WORKER)
    )
    folders = path.parts[:-1]
    if BOTH in folders:
        return
    if "schema" in folders:
        foreign, home = of_operator + of_worker, "tests/schema"
    elif "operator" in folders:
        foreign, home = of_worker, "tests/operator"
    elif "worker" in folders:
        foreign, home = of_operator, "tests/worker"
    else:
        foreign, home = (
            (of_worker if of_operator and path.name.startswith("test_") else []),
            "a test of the operator",
        )
    for line, module in foreign[:1]:
        package = module.partition(".")[0]
        yield (
            f"{path}:{line}: {home} imports {package}: what compares both distributions stands in "
            "tests/contract"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
