"""Every refusal of a field of a body: its status, code, field and words."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.routing import DecodeScoreSpec
from pdcluster_worker.server.generation.chat_answer import ParserNames
from pdcluster_worker.server.text.tokenizer import Tokenizer
from tests.golden import records
from tests.worker.server.conftest import Rig, make_rig

HERE = Path(__file__).parent
RECORDS = HERE / "records" / "refusals"
OVERRIDES = PolicyConfig(decode_score=DecodeScoreSpec(allow_request_overrides=True))


class Loader(yaml.SafeLoader):
    """With the tags for what is too long to write out."""


def construct_times(loader: yaml.SafeLoader, node: yaml.SequenceNode) -> Any:
    times, value = loader.construct_sequence(node, deep=True)
    return value * times


def construct_members(loader: yaml.SafeLoader, node: yaml.SequenceNode) -> dict[str, Any]:
    number, value = loader.construct_sequence(node)
    return dict.fromkeys(map(str, range(number)), value)


def construct_nested(loader: yaml.SafeLoader, node: yaml.SequenceNode) -> dict[str, Any]:
    depth, name = loader.construct_sequence(node)
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {name: {"a": schema} if name == "properties" else schema}
    return schema


Loader.add_constructor("!times", construct_times)
Loader.add_constructor("!members", construct_members)
Loader.add_constructor("!nested", construct_nested)
TABLES = yaml.load((HERE / "refusals.yaml").read_text(), Loader)["tables"]  # noqa: S506


@pytest.fixture
def rigs(model: Path) -> dict[str | None, Rig]:
    """Applications by scene: with a template for tools, with a parser of reasoning, and one whose
    policy lets requests say how they are routed.
    """
    rigs = {scene: make_rig(model) for scene in (None, "tools", "reasoning", "overrides")}
    for scene, parsers in (("tools", ParserNames()), ("reasoning", ParserNames(reasoning="qwen3"))):
        rigs[scene].tokenizer = Tokenizer.load(model, "chatml-tools")
        rigs[scene].backend.max_model_len = 4000
        rigs[scene].policy = PolicyConfig()
        rigs[scene].app = rigs[scene].make_app(parsers=parsers)
    rigs["overrides"].policy = OVERRIDES
    return rigs


@pytest.mark.parametrize("name", TABLES)
async def test_refusals(name: str, rigs: dict[str | None, Rig]) -> None:
    table = TABLES[name]
    rig, lines = rigs[table.get("scene")], []
    transport = httpx.ASGITransport(rig.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        for fields in table["rows"]:
            reply = await http.post(
                table["path"],
                content=json.dumps(table["body"] | fields),
                headers={"content-type": "application/json"},
            )
            assert reply.headers["x-request-id"]
            error = json.dumps(reply.json()["error"])
            lines.append(f"{shortened(fields)}\n    {reply.status_code} {error}")

    assert rig.backend.calls == []
    records.check(RECORDS / f"{name}.txt", "\n".join(lines) + "\n")


def shortened(fields: dict[str, Any]) -> str:
    text = json.dumps(fields)
    return text if len(text) < 200 else f"{text[:150]}... of {len(text)} characters"


def test_records_have_a_table_each() -> None:
    records.check_names(RECORDS, [f"{name}.txt" for name in TABLES])
