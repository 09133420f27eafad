"""Status, events and sizes of each scene."""

import pytest

from tests.golden.operator.condition_scenes import SCENES as FURTHER
from tests.golden.operator.decision_scenes import SCENES as OF_THE_AUTOSCALER
from tests.golden.operator.golden_yaml import RECORDS, as_yaml
from tests.golden.operator.operator_adapter import (
    Document,
    Observed,
    reported,
    sentences,
)
from tests.golden.operator.status_scenes import SCENES
from tests.golden.records import check, check_names


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
