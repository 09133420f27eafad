"""Names, types, labels and help of what a worker's /metrics page has."""

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.golden import records
from tests.golden.worker.rig import Scene, serving
from tests.golden.worker.transcripts import exchange, request_bytes

RECORD = Path(__file__).parent / "records" / "metrics.txt"


async def test_metrics_of_a_worker(model: Path, tmp_path: Path) -> None:
    async with serving(Scene(), model, tmp_path) as worker:
        scrape = {"method": "GET", "path": "/metrics"}
        answer = await exchange(worker.port, request_bytes(scrape, stream=None))
        # a metric whose labels have no values yet shows none of them on the page
        labels = {
            family.name: collector._labelnames
            for collector in set(worker.metrics.registry._names_to_collectors.values())
            for family in collector.describe()
        }
    head, _, page = answer.partition("\n\n")
    content_type = next(line for line in head.splitlines() if line.startswith("content-type"))
    lines = [content_type]
    for family in sorted(text_string_to_metric_families(page), key=lambda each: each.name):
        if family.name.endswith("_created"):
            continue
        shown = {name for sample in family.samples for name in sample.labels} - {"le"}
        names = ",".join(sorted(shown | set(labels.get(family.name, ()))))
        lines.append(f"{family.name} {family.type} {{{names}}} {family.documentation}")
    records.check(RECORD, "\n".join(lines) + "\n")
