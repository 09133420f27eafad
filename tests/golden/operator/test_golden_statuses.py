"""Status, events and sizes of each scene, and decisions of the three replays."""

from pathlib import Path

import pytest
import yaml

from tests.golden.operator.condition_scenes import SCENES as FURTHER
from tests.golden.operator.decision_scenes import SCENES as OF_THE_AUTOSCALER
from tests.golden.operator.golden_yaml import RECORDS, as_yaml
from tests.golden.operator.operator_adapter import (
    Document,
    Observed,
    decisions,
    reported,
    sentences,
)
from tests.golden.operator.status_scenes import SCENES
from tests.golden.records import check, check_names
from tests.schema.object_cases import at

TRACES = Path(__file__).parents[3] / "examples" / "traces"
EVENING = 19 * 3600


@pytest.mark.parametrize("name", SCENES)
def test_status_of_a_scene(name: str) -> None:
    check(RECORDS / "statuses" / file_of(name), as_yaml(reported(*SCENES[name])))


def test_conditions_of_further_scenes() -> None:
    """Events of each scene, and its conditions that differ from those of the scene `ready`."""
    usual = conditions(*SCENES["ready"])
    lines = []
    for name, scene in FURTHER.items():
        found = conditions(*scene)
        lines += ["", name, *(line for line in found if line not in usual)]
    check(RECORDS / "conditions.txt", "\n".join(lines[1:]) + "\n")


def test_sentences_of_the_autoscaler() -> None:
    found = [(name, *sentences(outcome)) for name, outcome in OF_THE_AUTOSCALER.items()]
    check(RECORDS / "autoscaler.txt", "\n\n".join("\n".join(lines) for lines in found) + "\n")


def conditions(document: Document, observed: Observed) -> list[str]:
    found = reported(document, observed)
    return [
        *(
            f"  {each['type']} {each['status']} {each['reason']}: {each['message']}"
            for each in found["status"]["conditions"]
        ),
        *(f"  event {each['reason']}: {each['message']}" for each in found["events"]),
    ]


def test_every_record_of_a_status_has_its_scene() -> None:
    check_names(RECORDS / "statuses", [file_of(name) for name in SCENES])


def file_of(name: str) -> str:
    return name.replace(",", "").replace(" ", "-").lower() + ".yaml"


def evening(folder: Path) -> Path:
    """The day's curve from 19:00: the night begins, and half of its decisions are there."""
    header, *rows = (TRACES / "day-curve.csv").read_text().splitlines()
    parts = [row.partition(",") for row in rows]
    left = [
        f"{int(seconds) - EVENING},{rest}" for seconds, _, rest in parts if int(seconds) >= EVENING
    ]
    path = folder / "day-curve.csv"
    path.write_text("\n".join([header, *left, ""]))
    return path


@pytest.mark.parametrize("name", ["day-curve", "prompt-to-output-heavy", "step-burst"])
def test_decisions_of_a_replay(name: str, tmp_path: Path) -> None:
    document = yaml.safe_load((TRACES / "llm-70b.yaml").read_text())
    if name == "day-curve":  # with the workers that the whole day's replay has by then
        at("spec.roles.prefill.pools.0.replicas", 4)(document)
        at("spec.roles.decode.pools.0.replicas", 2)(document)
    trace = evening(tmp_path) if name == "day-curve" else TRACES / f"{name}.csv"
    check(RECORDS / "decisions" / f"{name}.yaml", as_yaml(decisions(document, trace)))
