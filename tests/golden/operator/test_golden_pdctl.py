"""Exit code and output of pdctl's commands, as a user types them, in a folder of small files."""

import copy
import io
import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdcluster_schema.load import parse
from pdctl.local.ineffective import ineffective_remarks
from pdctl.local.run_directory import RunDirectory
from tests.golden.operator.golden_yaml import RECORDS
from tests.golden.operator.operator_adapter import main, reported
from tests.golden.operator.status_scenes import CHAT, NEXT, RECREATE, SCENES, chat
from tests.golden.records import check, check_names
from tests.ports import free_port
from tests.schema.object_cases import at, without

TRACE = "seconds,requests_per_second,input_tokens,output_tokens\n0,1,1000,100\n60,12,1000,100\n"
FOLDER = RECORDS / "pdctl"
HERE = Path(__file__).parent
COMMANDS, WRONG, INPUTS, RUNS, INEFFECTIVE = (
    yaml.safe_load((HERE / f"{name}.yaml").read_text())
    for name in ("commands", "wrong_fields", "inputs", "runs", "ineffective")
)
RUNS_OF = {"run": ["chat"], "several_runs": ["chat", "refused"]}
OTHERS = ("wrong_fields", "examples", "ineffective")
EXAMPLES = HERE.parents[2] / "examples"
OF_AUTOSCALER = "autoscaled, and scaled by hand"

Pdctl = Callable[[str], str]


def files() -> dict[str, Any]:
    """Files that the commands read, by name."""
    scaled, seen = SCENES[OF_AUTOSCALER]
    wrong = chat({"engine": {"blocksize": 16, "threads": "two"}})
    mixed = {"mixed": {"pools": [{"name": "cpu", "replicas": 1}]}}
    budget = {"mode": "On", "budget": {"total": 9}}
    return {
        "chat.yaml": CHAT,
        "next.yaml": NEXT,
        "recreate.yaml": RECREATE,
        "bigger.yaml": chat({"roles.decode.pools.0.replicas": 4}),
        "scaled.yaml": chat({"autoscale": budget}),
        "pools.yaml": chat({"roles.decode.pools": [{"name": "new", "replicas": 3}]}),
        "b300.yaml": chat({"roles.decode.pools.0.gpu": "B300"}),
        "other.yaml": {**CHAT, "metadata": {"name": "other"}},
        "spaced.yaml": {**CHAT, "metadata": {"name": "chat", "namespace": "home"}},
        "mixed.yaml": chat({"roles": mixed}),
        "wrong.yaml": wrong,
        "two.yaml": yaml.safe_dump_all([CHAT, NEXT]),
        "why.yaml": {**scaled, **reported(scaled, seen)},
        "status.yaml": reported(*SCENES["autoscaled, short of capacity"])["status"],
        "trace.csv": TRACE,
        "wrong.csv": TRACE + "30,nan,1,1\n90,-1,1,1\n",
        "notes.txt": "a: [",
        "list.yaml": [1, 2],
        "kubeconfig.yaml": "a: [",
        "empty.yaml": {},
        "date.yaml": yaml.safe_dump(
            chat({"routing": {"offload": {"prefillQueueMax": "2020-13-45"}}})
        ).replace("'", ""),
        "short.yaml": chat({"engine": {"maxModelLen": 64}}),
        **table_files(),
    }


def table_files() -> dict[str, Any]:
    """Files of inputs.yaml, and those with a decision in other forms."""
    bases = {"chat": CHAT, **INPUTS["bases"]}
    found = {name: changed(bases, **entry) for name, entry in INPUTS["files"].items()}
    scaled, four = bases["scaled"], copy.deepcopy(bases["scaled"])
    newest = four["status"]["autoscaling"]["lastDecisions"][0]
    modes = ({}, {}, {"mode": "Advise"}, {"mode": "On"})
    four["status"]["autoscaling"]["lastDecisions"] = [
        {**newest, "at": f"2026-03-04T12:0{3 - number}:05Z", **mode}
        for number, mode in enumerate(modes)
    ]
    return {
        **found,
        "decided.yaml": bases["decided"],
        "scaled-pools.yaml": scaled,
        "unquoted.yaml": re.sub(r"'(\S+Z)'", r"\1", yaml.safe_dump(scaled)),
        "decided-four-times.yaml": four,
        "status.json": json.dumps(scaled["status"]),
    }


def changed(bases: dict[str, Any], of: str | None = None, **changes: Any) -> Any:
    if of is None:
        return changes
    document = copy.deepcopy(bases[of])
    for path, value in changes.items():
        (without(path) if value is None else at(path, value))(document)
    return document


@pytest.fixture
def pdctl(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Pdctl:
    """Run one command line; returns it with its exit code and all that it wrote."""
    for name in ("KUBECONFIG", "PDCLUSTER_VLLM", "PDCLUSTER_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PDCLUSTER_PORT", str(free_port()))  # the default may be taken here
    terminal = {"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "100", "KUBECONFIG": "none"}
    for name, value in {**terminal, "XDG_STATE_HOME": "state", "HOME": "home"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)  # else its name is shown
    monkeypatch.chdir(tmp_path)

    def run(line: str) -> str:
        command, _, stdin = line.partition(" < ")
        monkeypatch.setattr("sys.argv", shlex.split(command))
        if stdin:
            monkeypatch.setattr("sys.stdin", io.StringIO(Path(stdin).read_text()))
        with pytest.raises(SystemExit) as ended:
            main()
        found = capfd.readouterr()
        out, err = (plain_text(text, tmp_path) for text in (found.out, found.err))
        said = "".join(f"{name}:\n{text}" for name, text in (("out", out), ("err", err)) if text)
        return f"$ {line}\nexit code {ended.value.code or 0}\n{said}\n"

    return run


def plain_text(text: str, folder: Path) -> str:
    """Without the path of the folder, the frames around errors and pages, and what fills them."""
    return re.sub(r"[ ─│╭╮╰╯]+$", "", text.replace(str(folder), "FOLDER"), flags=re.M)


def write(content: Any, path: Path) -> None:
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))


@pytest.mark.parametrize("group", COMMANDS)
def test_commands(group: str, pdctl: Pdctl) -> None:
    for name, content in files().items():
        write(content, Path(name))
    Path("binary").write_bytes(b"\xff\xfe")
    for name in ("m.gguf", "model.safetensors"):
        Path(name).touch()
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    for name in RUNS_OF.get(group, ()):
        RunDirectory.create(Path("state/pdcluster"), name).write_state(RUNS[name])
    check(FOLDER / f"{group}.txt", "".join(map(pdctl, COMMANDS[group])))


def test_every_record_of_pdctl_has_its_commands() -> None:
    check_names(FOLDER, [f"{name}.txt" for name in (*COMMANDS, *OTHERS)])


def test_validate_says_every_fault(pdctl: Pdctl) -> None:
    found = []
    for change in WRONG:
        document = chat()
        for path, value in change.items():
            at(path, value)(document)
        write(document, Path("chat.yaml"))
        found.append(f"{json.dumps(change)}\n{pdctl('pdctl validate chat.yaml')}")
    check(FOLDER / "wrong_fields.txt", "".join(found))


def test_validate_takes_every_example(pdctl: Pdctl) -> None:
    found = []
    for path in sorted(EXAMPLES.glob("*.yaml")):
        write(path.read_text(), Path(path.name))
        found.append(pdctl(f"pdctl validate {path.name}"))
    check(FOLDER / "examples.txt", "".join(found))


def test_sections_without_effect_are_remarked() -> None:
    found = []
    for change in INEFFECTIVE:
        remarks = ineffective_remarks(parse(changed({"chat": CHAT}, "chat", **change)))
        found.append("\n".join([json.dumps(change), *remarks, ""]))
    check(FOLDER / "ineffective.txt", "\n".join(found))
