"""Requests to an engine, by the bodies that make them: with all that is not the default."""

import json
from pathlib import Path

import msgspec
import pytest

from pdcluster_worker.messages.requests import RequestSpec, SamplingParams
from tests.golden import records
from tests.golden.worker.tables import answers, read_tables, rig_of
from tests.worker.server.conftest import Rig

HERE = Path(__file__).parent
RECORDS = HERE / "records" / "engine_requests"
TABLES = read_tables(HERE / "engine_requests.yaml")
DEFAULTS = SamplingParams(max_tokens=0, seed=-1)


@pytest.mark.parametrize("name", TABLES)
async def test_engine_requests(name: str, model: Path) -> None:
    table, lines = TABLES[name], []
    rig = rig_of(model, table.get("scene"))
    async for fields, reply in answers(rig, table):
        assert reply.status_code == 200, reply.text
        asked = [(spec, prefill) for specs, prefill in rig.backend.calls for spec in specs]
        asked.sort(key=lambda each: each[0].request_id)
        rig.backend.calls.clear()
        has_seed = '"seed"' in fields
        lines += [fields, *(f"    {shown(rig, *each, has_seed=has_seed)}" for each in asked)]

    records.check(RECORDS / f"{name}.txt", "\n".join(lines) + "\n")


def shown(rig: Rig, spec: RequestSpec, prefill: str, *, has_seed: bool) -> str:
    """The request as JSON, its prompt as text; a seed that was drawn is left out."""
    prompt = rig.tokenizer._tokenizer.decode(spec.prompt, skip_special_tokens=False)
    sampling = {
        name: value
        for name, value in msgspec.to_builtins(spec.sampling).items()
        if value != getattr(DEFAULTS, name, None) and name != "eos_token_ids"
    }
    if not has_seed:
        del sampling["seed"]
    facts = msgspec.to_builtins(spec) | {"prompt": prompt, "sampling": sampling, "prefill": prefill}
    return json.dumps({name: facts[name] for name in facts if name != "request_id"})


def test_records_have_a_table_each() -> None:
    records.check_names(RECORDS, [f"{name}.txt" for name in TABLES])
