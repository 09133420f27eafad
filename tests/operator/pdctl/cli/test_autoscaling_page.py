"""docs/autoscaling.md names every rule in its order, the defaults, and no rule that
is not there.
"""

import re
import shlex
import tomllib
from pathlib import Path

from typer.main import get_command

from pdcluster_api.plan.autoscale import rules
from pdcluster_schema.autoscale import AutoscaleSpec
from pdctl.cli import main

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "autoscaling.md").read_text()


def section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_every_rule_is_shown_in_its_order():
    shown = re.findall(r"^\| `(\w+)` \|", section("Rules, in order"), re.MULTILINE)
    names = [value for name, value in vars(rules).items() if name.isupper()]
    assert shown == [name for name in names if isinstance(name, str)]


def test_thresholds_are_the_defaults():
    told = re.findall(r"`(\w+(?:Up|Down))` ([\d.]+)", section("Signals"))
    spec = AutoscaleSpec().model_dump(by_alias=True)
    prefill, decode = (
        [(name, float(value)) for name, value in told[:4]],
        [(name, float(value)) for name, value in told[4:]],
    )

    assert len(told) == 8
    assert all(spec["prefill"][name] == value for name, value in prefill)
    assert all(spec["decode"][name] == value for name, value in decode)


def test_links_and_pictures_are_there_and_small():
    links = re.findall(r"\]\(([^)#:]+)\)", PAGE)
    pictures = [ROOT / "docs" / link for link in links if link.endswith(".png")]

    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
    assert len(pictures) == 1
    assert all(path.stat().st_size < 100_000 for path in pictures)


def options(command: list[str]) -> set[str]:
    """Options of the command itself, not of its help, which is styled and wrapped by the
    environment.
    """
    found = get_command(main.app)
    for name in command:
        found = found.commands[name]
    return {option for param in found.params for option in param.opts}


def test_commands_of_the_page_exist_with_their_options():
    lines = [
        line.partition("#")[0].strip()
        for line in PAGE.splitlines()
        if line.startswith("    pdctl ")
    ]
    assert len(lines) >= 5
    for line in lines:
        words = shlex.split(line)[1:]
        command = words[:2] if words[0] == "autoscale" else words[:1]
        assert {word for word in words if word.startswith("-")} <= options(command), line


def test_pdctl_is_a_plugin_of_kubectl_too():
    scripts = tomllib.loads((ROOT / "operator" / "pyproject.toml").read_text())["project"][
        "scripts"
    ]

    assert scripts["kubectl-pd"] == scripts["pdctl"] == "pdctl.cli.main:main"
    assert callable(main.main)
