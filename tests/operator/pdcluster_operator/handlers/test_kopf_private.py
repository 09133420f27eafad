"""Uses of kopf beyond its public interface: this fails when a release moves or renames one."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import kopf
import pytest
from kopf._cogs.clients import api, fetching
from kopf._core.reactor import processing

from pdcluster_operator.handlers import kopf_private
from pdcluster_operator.handlers.kopf_private import NoMemories, read_json_of_any_depth
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


def test_kopf_reads_lists_and_watches_where_ours_takes_the_place_of_its_own():
    get, stream = inspect.getsource(api), inspect.getsource(api.stream)
    assert "return await response.json()" in get
    assert "yield json.loads(line.decode('utf-8'))" in stream
    assert "await api.get(" in inspect.getsource(fetching)


def test_kopf_reads_objects_of_very_many_levels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(api, "json", api.json)
    monkeypatch.setattr(api, "get", api.get)
    read_json_of_any_depth()
    assert api.json.loads('{"a":' * 5000 + "1" + "}" * 5000)["a"]
