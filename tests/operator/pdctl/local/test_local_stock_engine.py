"""A stock engine on this machine: its program, its ports, and the file that its worker gets."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from pdcluster_schema.load import parse
from pdctl.local.machine import vllm_settings, with_programs
from pdctl.local.plan import LocalPlan, plan_local
from pdctl.local.run_directory import Certificates, RunDirectory, RunSettings, write_process
from tests.schema.object_cases import CPU, at, sglang, vllm

Document = dict[str, Any]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "env" / "bin" / "vllm"
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def plan_of(document: Document) -> LocalPlan:
    return plan_local(parse(document), cores=4, port=8000)


def commands(plan: LocalPlan) -> set[tuple[str, ...] | None]:
    assert plan.ingress in plan.processes
    return {process.engine.command for process in plan.processes}


def test_program_is_that_of_the_path(
    document: Document, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm()(document)
    monkeypatch.setenv("PATH", str(program.parent))

    assert commands(with_programs(plan_of(document), Path("chat.yaml"), {})) == {
        (str(program), "serve")
    }


def test_program_of_the_object_is_found_from_the_folder_of_its_file(
    document: Document, program: Path, tmp_path: Path
) -> None:
    vllm(command=["env/bin/vllm", "serve", "-v"])(document)

    assert commands(with_programs(plan_of(document), tmp_path / "chat.yaml", {})) == {
        (str(program), "serve", "-v")
    }


def test_program_that_is_given_goes_over_the_object_s(document: Document, program: Path) -> None:
    vllm(command=["/nowhere/vllm", "serve"])(document)

    assert commands(with_programs(plan_of(document), Path("chat.yaml"), {"vllm": program})) == {
        (str(program), "serve")
    }


def test_program_of_sglang_is_the_python_of_its_environment(
    document: Document, program: Path
) -> None:
    sglang()(document)
    at("spec.roles", {"mixed": {"pools": [CPU]}})(document)

    given = {"vllm": Path("/nowhere"), "sglang": program}
    assert commands(with_programs(plan_of(document), Path("chat.yaml"), given)) == {
        (str(program), "-m", "sglang.launch_server")
    }


def test_our_own_engine_needs_no_program(document: Document) -> None:
    plan = plan_of(document)

    assert with_programs(plan, Path("chat.yaml"), {}) == plan


def test_worker_is_given_the_command_and_its_ports(
    document: Document, program: Path, tmp_path: Path
) -> None:
    vllm(args=["--enforce-eager"], env=[{"name": "UCX_TLS", "value": "tcp"}])(document)
    at("metadata.name", "tiny")(document)
    cluster = parse(document)
    plan = with_programs(plan_of(document), Path("chat.yaml"), {"vllm": program})
    run = RunDirectory.create(tmp_path / "state", "tiny")
    settings = RunSettings(
        run,
        tmp_path,
        ("127.0.0.1:1",),
        Certificates(Path("/a"), Path("/b"), Path("/c")),
        ("worker",),
    )
    write_process(cluster, plan.processes[0], settings)
    written = yaml.safe_load((run.config / f"{plan.processes[0].name}.yaml").read_text())["engine"]
    stock = written["vllm"]

    assert written["type"] == "vllm"
    assert stock["command"][:4] == [str(program), "serve", str(tmp_path), "--enforce-eager"]
    assert stock["command"][stock["command"].index("--port") + 1] == str(stock["port"])
    assert stock["env"]["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
    assert stock["env"]["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(stock["sideChannelPort"])
    # its share of the machine's cores
    assert stock["env"]["OMP_NUM_THREADS"] == "2"


def test_ports_of_an_engine_are_different() -> None:
    site = vllm_settings(2)
    rows = [site.kv_events, site.kv_events + 1, site.side_channel, site.side_channel + 1]

    assert len({site.http, *rows}) == 5
