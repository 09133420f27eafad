"""Every refusal of a field of a body: its status, code, field and words."""

import json
from pathlib import Path

import pytest

from tests.golden import records
from tests.golden.worker.tables import answers, read_tables, rig_of

HERE = Path(__file__).parent
RECORDS = HERE / "records" / "refusals"
TABLES = read_tables(HERE / "refusals.yaml")


@pytest.mark.parametrize("name", TABLES)
async def test_refusals(name: str, model: Path) -> None:
    table, lines = TABLES[name], []
    rig = rig_of(model, table.get("scene"))
    async for fields, reply in answers(rig, table):
        assert reply.headers["x-request-id"]
        lines.append(f"{fields}\n    {reply.status_code} {json.dumps(reply.json()['error'])}")

    assert rig.backend.calls == []
    records.check(RECORDS / f"{name}.txt", "\n".join(lines) + "\n")


def test_records_have_a_table_each() -> None:
    records.check_names(RECORDS, [f"{name}.txt" for name in TABLES])
