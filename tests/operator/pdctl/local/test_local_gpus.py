"""GPUs of one machine: what the driver shows, and the workers that get them.  No GPU is here:
reports are given, and the refusal without a driver is real.
"""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pdcluster_schema.accelerators import accelerators
from pdcluster_schema.faults import InvalidObjectError
from pdcluster_schema.load import parse
from pdctl.cli.main import app
from pdctl.local.gpus import (
    DriverReport,
    Gpu,
    gpu_variables,
    is_of_type,
    read_driver,
    visible_gpus,
)
from pdctl.local.plan import LocalPlan, plan_local

BOX = "\n".join(
    f"{index}, GPU-{index}, NVIDIA {name}"
    for index, name in enumerate(("H200", "L40S", "H200 NVL", "GB200", "H200"))
)


def document_of(
    document: dict[str, Any], prefill: dict[str, Any], *decode: dict[str, Any]
) -> dict[str, Any]:
    spec = document["spec"]
    spec["roles"] = {"prefill": {"pools": [prefill]}, "decode": {"pools": list(decode)}}
    spec["accelerators"] = {"L40S": {"resource": "nvidia.com/gpu"}}
    return document


def planned(document: dict[str, Any], report: DriverReport) -> LocalPlan:
    return plan_local(parse(document), cores=8, port=0, driver=report)


def test_workers_get_devices_of_their_type_in_order_over_the_pools(
    document: dict[str, Any],
) -> None:
    pools = (
        {"name": "one", "gpu": "H200", "replicas": 1},
        {"name": "two", "gpu": "H200", "replicas": 1, "gpusPerReplica": 2},
        {"name": "cpu", "replicas": 1},
        {"name": "own", "gpu": "L40S", "replicas": 1},
    )
    plan = planned(document_of(document, *pools), visible_gpus(BOX, None))

    assert [
        (each.pool.name, tuple(gpu.index for gpu in each.devices)) for each in plan.processes
    ] == [
        ("one", (0,)),
        ("two", (2, 4)),
        ("cpu", ()),
        ("own", (1,)),
    ]
    assert gpu_variables(plan.processes[1].devices)["CUDA_VISIBLE_DEVICES"] == "2,4"
    assert gpu_variables(())["CUDA_VISIBLE_DEVICES"] == "-1"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", None),
        ("Tesla T4", "T4"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("NVIDIA RTX 6000 Ada Generation", None),
    ],
)
def test_a_driver_s_name_is_of_one_type_at_most(name: str, kind: str | None) -> None:
    gpu = Gpu(0, "GPU-a", name)
    found = [each for each in accelerators() if is_of_type(gpu, each)]

    assert found == ([] if kind is None else [kind])


def test_only_workers_without_a_gpu_share_cores(document: dict[str, Any]) -> None:
    pools = ({"name": "one", "gpu": "H200", "replicas": 1}, {"name": "cpu", "replicas": 1})
    plan = planned(document_of(document, *pools), visible_gpus(BOX, None))

    assert [each.shared_cores is None for each in plan.processes] == [True, False]


@pytest.mark.parametrize(
    ("gpu", "replicas", "report", "message"),
    [
        (
            "H200",
            2,
            visible_gpus(BOX, "0,1"),
            "pool one wants 2 H200 (replicas: 2, 1 each), and the driver shows 1 that no other "
            "pool has (of NVIDIA H200, NVIDIA L40S); lower replicas or gpusPerReplica",
        ),
        ("B200", 1, visible_gpus(BOX, None), "the driver shows 0 that no other pool has (of "),
        ("H200", 1, visible_gpus("No devices were found", None), "nvidia-smi: No devices were"),
        ("H200", 1, visible_gpus(BOX, "7"), "CUDA_VISIBLE_DEVICES names 7, which nvidia-smi does"),
        (
            "H200",
            1,
            visible_gpus(BOX, "0,MIG-7"),
            "CUDA_VISIBLE_DEVICES names MIG-7, a part of a GPU, and workers get whole ones here: "
            "name those, by index or UUID",
        ),
        ("H200", 1, visible_gpus(BOX, ""), "the driver shows 0: CUDA_VISIBLE_DEVICES is empty"),
    ],
)
def test_what_the_driver_does_not_show_is_refused(
    document: dict[str, Any], gpu: str, replicas: int, report: DriverReport, message: str
) -> None:
    pool = {"name": "one", "gpu": gpu, "replicas": replicas}
    with pytest.raises(InvalidObjectError) as refused:
        planned(document_of(document, pool, {"name": "cpu", "replicas": 1}), report)

    (fault,) = refused.value.faults
    assert fault.path == "spec.roles.prefill.pools[0].gpu"
    assert message in str(fault)


def test_pools_share_no_gpu(document: dict[str, Any]) -> None:
    pool = {"name": "one", "gpu": "H200", "replicas": 2}
    with pytest.raises(InvalidObjectError, match=r"pool one wants 2 H200.* shows 1 that no other"):
        planned(document_of(document, pool, pool), visible_gpus(BOX, None))


def test_up_without_a_driver_says_so(
    document: dict[str, Any],
    write_document: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    pool = {"name": "one", "gpu": "H200", "replicas": 1}
    path = write_document(document_of(document, pool, {"name": "cpu", "replicas": 1}))
    result = CliRunner().invoke(app, ["up", str(path), "--state-dir", str(tmp_path / "state")])

    assert result.exit_code == 2
    assert "pool one wants 1 H200" in result.stderr
    assert "the driver shows 0: no nvidia-smi is on the PATH" in result.stderr


@pytest.mark.parametrize(
    ("script", "report"),
    [
        ("echo '0, GPU-a, NVIDIA H200'", DriverReport((Gpu(0, "GPU-a", "NVIDIA H200"),))),
        (
            "echo 'NVIDIA-SMI has failed: no driver' >&2; exit 9",
            DriverReport(reason="nvidia-smi: NVIDIA-SMI has failed: no driver"),
        ),
    ],
)
def test_the_driver_is_read_by_nvidia_smi(
    script: str, report: DriverReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    assert read_driver() == report
