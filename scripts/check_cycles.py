"""Check that no files import each other in a circle, whatever import-linter's rooms allow.

Imports for types alone count: a reader follows them too.  Prints one circle and exits 1 when
there is one.

    check_cycles.py [SOURCE_ROOT ...]
"""

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from sources import python_files

ROOTS = ("schema/src", "operator/src", "worker/src")


def main(arguments: list[str]) -> int:
    """Check the named source roots, or the default ones; returns the exit status."""
    modules = dict(_modules([Path(name) for name in arguments or ROOTS]))
    imports = {name: {*_imports(path, modules)} for name, path in modules.items()}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as e:
        print("check_cycles: these import each other: " + " <- ".join(e.args[1]))
        return 1
    print(f"check_cycles: {len(modules)} files, no circle")
    return 0


def _modules(roots: list[Path]) -> Iterator[tuple[str, Path]]:
    for root in roots:
        for path in python_files([root]):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            yield name.removesuffix(".__init__"), path


def _imports(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                yield inner if inner in modules else node.module
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
