"""docs/http.md says what this server does: endpoints and fields; docs/clients.md has blocks for
OpenAI's client, run as they stand there.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from client_blocks import blocks, with_port
from clients_table import PAGE, with_fields

from pdcluster_worker.server.http.run import HttpServer, serve
from pdcluster_worker.server.text.tokenizer import Tokenizer
from tests.worker.server.conftest import Rig

ROOT = Path(__file__).parents[3]
TEXT = PAGE.read_text()
CLIENTS = (ROOT / "docs" / "clients.md").read_text()
OPENAI = [block for block in blocks(CLIENTS) if block.title == "OpenAI, Python"]
SAYS = {
    'stream_options={"include_usage": True}': ("Paris.", "Paris."),
    "response_format=City": (
        '{"name": "Paris", "country": "France"}',
        "name='Paris' country='France'",
    ),
    "client.responses.create": ("Paris.", "Paris."),
    'tool_choice="required"': (
        '[{"name": "weather", "parameters": {"city": "Paris"}}]',
        'weather {"city": "Paris"}',
    ),
}
"""Answers of the model, and the output of the block, by a piece of its code."""


@pytest.fixture
async def ready(rig: Rig, model_folder: Path) -> AsyncIterator[HttpServer]:
    """The page's server, but for its model."""
    rig.tokenizer = Tokenizer.load(model_folder, "chatml-tools")
    rig.backend.model_name, rig.backend.max_model_len = "smollm2-135m-instruct", 4000
    server = await serve(rig.make_app(), "127.0.0.1", 0)
    yield server
    await server.close()


def test_the_table_of_fields_is_that_of_the_schemas():
    assert with_fields(TEXT) == TEXT, "run scripts/clients_table.py"


def test_every_endpoint_is_on_the_page(rig):
    served = {
        (method, route.path)
        for route in rig.app.routes
        if not route.path.startswith("/page/")  # files of the page at /
        for method in route.methods - {"HEAD"}
    }
    listed = set(re.findall(r"`(GET|POST|DELETE) ([^`]+)`", TEXT))
    paths = {(method, re.sub(r":path", "", path)) for method, path in served}

    assert paths == listed


@pytest.mark.parametrize("piece", SAYS)
async def test_a_block_for_openais_client_runs_as_it_stands(rig, ready, monkeypatch, capsys, piece):
    (block,) = [block for block in OPENAI if piece in block.code]
    message, printed = SAYS[piece]
    rig.say(message)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    code = compile(with_port(block.code, ready.port), "docs/clients.md", "exec")
    await asyncio.to_thread(exec, code, {"__name__": "__main__"})

    assert printed in capsys.readouterr().out
