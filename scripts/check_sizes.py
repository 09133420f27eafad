"""Check the hard limits of size and shape on every hand-written Python file.

A file has at most 400 lines and a module docstring, a function at most 60 lines
(its docstring included) and 5 positional parameters (self and cls not counted).
Prints one line for each excess and exits 1 when there is one.  It does not know
the sizes to aim for, which are smaller: see CONTRIBUTING.md.

    check_sizes.py [FOLDER ...]
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from sources import python_files

FOLDERS = ("schema/src", "operator/src", "worker/src", "simulator/src", "bench", "scripts")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_POSITIONAL = 5

Function = ast.FunctionDef | ast.AsyncFunctionDef


def main(arguments: list[str]) -> int:
    """Check the named folders, or the default ones; returns the exit status."""
    files = python_files([Path(name) for name in arguments or FOLDERS])
    problems = [problem for path in files for problem in check_file(path)]
    print("\n".join([*problems, f"check_sizes: {len(files)} files, {len(problems)} problems"]))
    return 1 if problems else 0


def check_file(path: Path) -> Iterator[str]:
    """Every excess in one file, as a line that starts with file:line."""
    text = path.read_text(encoding="utf-8")
    try:
        tree = ast.parse(text)
    except SyntaxError as e:
        yield f"{path}:{e.lineno}: not valid Python: {e.msg}"
        return
    num_lines = len(text.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield f"{path}:1: file has {num_lines} lines, limit {MAX_FILE_LINES}: split it by idea"
    if not ast.get_docstring(tree):
        yield f"{path}:1: no module docstring: say in one to three lines what the module does"
    methods = set(_bound_methods(tree))
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield from _check_function(path, node, is_bound=node in methods)


def _check_function(path: Path, node: Function, *, is_bound: bool) -> Iterator[str]:
    where = f"{path}:{node.lineno}: function {node.name}"
    num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if num_lines > MAX_FUNCTION_LINES:
        yield (
            f"{where} has {num_lines} lines, limit {MAX_FUNCTION_LINES}: move parts into functions "
            "of their own"
        )
    num_positional = len(node.args.posonlyargs) + len(node.args.args) - is_bound
    if num_positional > MAX_POSITIONAL and not _is_kernel(node):
        yield (
            f"{where} has {num_positional} positional parameters, limit {MAX_POSITIONAL}: make "
            "them keyword-only or a dataclass"
        )


def _is_kernel(node: Function) -> bool:
    """A kernel in Triton, which before 3.7 knows no keyword-only parameters; it is called by
    keyword all the same.
    """
    marks = (mark.func if isinstance(mark, ast.Call) else mark for mark in node.decorator_list)
    return any(isinstance(mark, ast.Attribute) and mark.attr == "jit" for mark in marks)


def _bound_methods(tree: ast.Module) -> Iterator[Function]:
    """Functions whose first parameter is self or cls."""
    for owner in ast.walk(tree):
        if isinstance(owner, ast.ClassDef):
            for node in owner.body:
                if isinstance(node, Function) and not any(
                    ast.unparse(mark) == "staticmethod" for mark in node.decorator_list
                ):
                    yield node


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
