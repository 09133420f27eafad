"""docs/bench/README.md names every workload, system and option of the bench."""

import re
from pathlib import Path

import run as run_module
from typer.testing import CliRunner
from workload import FULL

from pdctl.cli.main import app

TEXT = (Path(__file__).parents[2] / "docs" / "bench" / "README.md").read_text()


def test_every_workload_and_system_has_its_row() -> None:
    assert [
        name
        for name in (*(one.name for one in FULL), *run_module.SYSTEMS)
        if f"`{name}`" not in TEXT
    ] == []


def test_sizes_in_the_table_are_those_that_run() -> None:
    sizes = {
        (one.num_prompt_tokens, one.num_output_tokens)
        for one in FULL
        if one.shape != "chat" and one.name != "client"
    }
    told = {(int(a), int(b)) for a, b in re.findall(r"of (\d+) in / (\d+) out", TEXT)}

    assert {pair for pair in sizes if pair not in told} == set()


def test_options_of_pdctl_in_the_examples_are_there() -> None:
    lines = TEXT.replace("\\\n", " ").splitlines()
    examples = [line.split()[2:] for line in lines if line.startswith("    pdctl bench ")]
    assert len(examples) == 4
    for command, *arguments in examples:
        shown = (
            CliRunner()
            .invoke(app, ["bench", command, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
            .output
        )
        assert [word for word in arguments if word.startswith("--") and word not in shown] == []
