"""Uses of kopf beyond its public interface: this fails when a release moves or renames one."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import kopf
import pytest
from kopf._core.reactor import processing

from pdcluster_operator.handlers import kopf_private
from pdcluster_operator.handlers.kopf_private import NoMemories
from tests.operator import bodies

HOME = Path(kopf_private.__file__)
SOURCES = HOME.parents[2]


def private_imports(path: Path) -> Iterator[tuple[str, str]]:
    """Module and name of each import from kopf that is not of its public package."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kopf._"):
            yield from ((str(node.module), each.name) for each in node.names)
        if isinstance(node, ast.Import):
            yield from ((each.name, "") for each in node.names if each.name.startswith("kopf._"))


def test_only_one_file_imports_private_parts_of_kopf():
    files = sorted(SOURCES.rglob("*.py"))

    assert [path for path in files if any(private_imports(path))] == [HOME]


@pytest.mark.parametrize(("module", "name"), list(private_imports(HOME)))
def test_each_of_them_is_where_it_is_imported_from(module: str, name: str):
    assert hasattr(importlib.import_module(module), name), (
        f"kopf has moved {module}.{name}: change {HOME.name}"
    )


def test_kopf_takes_memories_of_ours_and_asks_them_as_we_answer():
    assert "memories" in inspect.signature(kopf.operator).parameters
    source = inspect.getsource(processing.process_resource_event)
    assert (
        "await memories.recall(raw_body, noticed_by_listing=raw_type is None, memobase=memobase)"
        in source
    )


async def test_kopf_remembers_nothing_of_an_object():
    memories, body = NoMemories(), bodies.cluster()
    first = await memories.recall(body, noticed_by_listing=True, memobase=None)
    assert await memories.recall(body, noticed_by_listing=False, memobase=None) is not first
    assert list(memories.iter_all_memories()) == []
    await memories.forget(body)
