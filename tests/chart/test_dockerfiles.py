"""Promises of both Dockerfiles, read from them; e2e shows that they build and run."""

import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
NAMES = ["Dockerfile.operator", "Dockerfile.worker"]
CUDA_PACKAGES = (ROOT / "scripts" / "cuda_packages.txt").read_text().split()
"""Not installed by `make setup` on a machine without an NVIDIA GPU."""


@dataclass(frozen=True)
class Stage:
    """One FROM and the instructions below it, as (word, rest)."""

    base: str
    instructions: tuple[tuple[str, str], ...]

    def all(self, word: str) -> list[str]:
        return [rest for found, rest in self.instructions if found == word]


def parse(name: str) -> tuple[list[tuple[str, str]], list[Stage]]:
    """Arguments before the first FROM, and the stages."""
    text = re.sub(r"^#.*\n", "", (ROOT / name).read_text(), flags=re.MULTILINE).replace("\\\n", "")
    lines = [
        (line.split(None, 1)[0], line.split(None, 1)[1].strip())
        for line in text.splitlines()
        if line.strip()
    ]
    starts = [index for index, (word, _) in enumerate(lines) if word == "FROM"]
    stages = [
        Stage(lines[start][1], tuple(lines[start + 1 : end]))
        for start, end in zip(starts, [*starts[1:], len(lines)], strict=True)
    ]
    return lines[: starts[0]], stages


@pytest.mark.parametrize("name", NAMES)
def test_base_image_is_an_argument_of_every_stage(name: str) -> None:
    before, stages = parse(name)
    made = {stage.base.partition(" AS ")[2] for stage in stages}

    assert before == [("ARG", "BASE_IMAGE=python:3.12-slim")]
    assert {stage.base.partition(" AS ")[0] for stage in stages} <= {"${BASE_IMAGE}", *made}
    # its packages are installed where they stay: copied, gigabytes would be written twice
    assert stages[-1].base == "dependencies"


@pytest.mark.parametrize("name", NAMES)
def test_image_runs_without_rights_and_gets_its_signals(name: str) -> None:
    final = parse(name)[1][-1]
    words = [word for word, _ in final.instructions]
    (entry,) = final.all("ENTRYPOINT")

    assert final.all("USER") == ["65532:65532"]
    assert "RUN" not in words[words.index("USER") :]
    assert entry.startswith('["')  # exec form: no shell between the container runtime and Python
    assert final.all("CMD") == final.all("STOPSIGNAL") == []


@pytest.mark.parametrize("name", NAMES)
def test_image_needs_no_writable_root(name: str) -> None:
    environment = dict(
        item.split("=", 1) for text in parse(name)[1][-1].all("ENV") for item in shlex.split(text)
    )

    assert environment["HOME"] == "/tmp"
    assert environment["PYTHONDONTWRITEBYTECODE"] == "1"
    # dependencies, and our code
    assert (
        sum("compileall" in command for stage in parse(name)[1] for command in stage.all("RUN"))
        == 2
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_package_is_installed_at_its_pin(name: str) -> None:
    commands = [
        command
        for stage in parse(name)[1]
        for run in stage.all("RUN")
        for command in run.split("&&")
        if "pip install" in command
    ]

    assert len(commands) >= 3
    assert all(
        "-c constraints.txt" in command or "--build-constraint constraints.txt --no-deps" in command
        for command in commands
    )


@pytest.mark.parametrize(
    ("variant", "status", "chosen"),
    [
        ("cpu", 0, "[--torch-backend=cpu] []"),
        ("cuda", 0, "[] []"),
        ("cpu-pypi", 0, f"[] [triton {' '.join(CUDA_PACKAGES)}]"),
        ("server", 0, "[] [llguidance numpy safetensors torch transformers triton]"),
        ("gpu", 1, ""),
        ("", 1, ""),
    ],
)
def test_variant_of_the_worker_decides_which_torch_it_has(
    variant: str, status: int, chosen: str
) -> None:
    (dependencies,) = [
        stage for stage in parse("Dockerfile.worker")[1] if stage.base.endswith(" AS dependencies")
    ]
    (command,) = [run for run in dependencies.all("RUN") if "torch-backend" in run]
    choice, _, rest = command[command.index("case ") :].partition("esac &&")
    done = subprocess.run(
        ["/bin/sh", "-c", f'{choice} esac; echo "[$backend]" [$excluded]'],
        env={"VARIANT": variant, "PATH": os.defpath},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert {"VARIANT=cpu", "EXTRAS="} <= set(dependencies.all("ARG"))
    assert "printf '%s\\n' pdcluster-schema ${excluded} >excluded.txt" in rest
    assert {"${backend}", "--excludes"} <= set(
        next(part for part in rest.split("&&") if "uv pip install" in part).split()
    )
    assert (done.returncode, done.stdout) == (status, "" if status else f"{chosen}\n")
    assert bool(status) == ("VARIANT must be cpu, cpu-pypi, cuda or server" in done.stderr)


def test_a_compiler_is_in_the_image_for_cuda_alone(tmp_path: Path) -> None:
    """Triton compiles its way to the driver at its first kernel."""
    (dependencies,) = [
        stage for stage in parse("Dockerfile.worker")[1] if stage.base.endswith(" AS dependencies")
    ]
    (command,) = [run for run in dependencies.all("RUN") if "apt-get" in run]
    for program, does in (("apt-get", 'echo "$@"'), ("rm", ":")):
        (tmp_path / program).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / program).chmod(0o755)
    tried = [
        subprocess.run(
            ["/bin/sh", "-c", command],
            env={"VARIANT": variant, "PATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for variant in ("cpu", "cpu-pypi", "server", "cuda")
    ]
    assert tried[:3] == ["", "", ""]
    assert {"gcc", "libc6-dev"} <= set(tried[3].split())


@pytest.mark.parametrize("name", NAMES)
def test_a_mirrors_password_need_not_be_an_argument_which_the_history_keeps(name: str) -> None:
    installing = [
        run for stage in parse(name)[1] for run in stage.all("RUN") if "pip install" in run
    ]

    assert len(installing) >= 3
    assert all("--mount=type=secret,id=netrc,target=/root/.netrc" in run for run in installing)


@pytest.mark.parametrize("name", NAMES)
def test_image_keeps_no_tool_of_its_build(name: str) -> None:
    (stage,) = [stage for stage in parse(name)[1] if stage.base.endswith(" AS dependencies")]
    (installing,) = [run for run in stage.all("RUN") if "pip install" in run]

    assert stage.all("WORKDIR") == ["/build"]
    # a later instruction could not take it back
    assert installing.split("&&")[-1].strip() == "rm -rf /build/*"


def closure(names: Iterable[str]) -> dict[str, str]:
    """Versions of these distributions and of all that they need, as installed here, by normalized
    name.
    """
    found: dict[str, str] = {}
    waiting = [Requirement(name) for name in names]
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        if name not in found and name != "pdcluster-schema":  # our own
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                if name not in CUDA_PACKAGES:
                    raise
                continue
            needed = [Requirement(text) for text in requires(name) or ()]
            waiting += [
                need
                for need in needed
                if need.marker is None
                or any(need.marker.evaluate({"extra": e}) for e in one.extras or {""})
            ]
    return found


@pytest.mark.parametrize("part", ["schema", "operator", "worker"])
def test_everything_that_an_image_installs_has_a_pin(part: str) -> None:
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )
    needed = closure(
        tomllib.loads((ROOT / part / "pyproject.toml").read_text())["project"]["dependencies"]
    )

    assert len(needed) > 5
    assert {name: found for name, found in needed.items() if pins.get(name) != found} == {}


def test_operator_asks_for_no_torch() -> None:
    project = tomllib.loads((ROOT / "operator" / "pyproject.toml").read_text())["project"]

    assert not {"torch", "transformers", "pdcluster-worker"} & {
        re.split(r"[\[<>=~ ]", name)[0] for name in project["dependencies"]
    }
    assert "pdcluster-operator" in project["scripts"]


def test_build_context_is_what_is_copied() -> None:
    rules = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    let_in = {rule[1:] for rule in rules if rule.startswith("!")}
    copied = {
        source
        for name in NAMES
        for stage in parse(name)[1]
        for rest in stage.all("COPY")
        if "--from" not in rest
        for source in rest.split()[:-1]
    }

    assert rules[0] == "*"
    assert all((ROOT / path).exists() for path in let_in)
    assert all(
        any(path == source or path.startswith(f"{source}/") for path in let_in) for source in copied
    )
