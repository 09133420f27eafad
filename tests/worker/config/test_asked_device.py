"""A device that no engine of ours computes on is refused before the machine and etcd are asked."""

from pathlib import Path

import pytest

from pdcluster_worker import server_process
from pdcluster_worker.asked_device import asked_device
from pdcluster_worker.config import load_worker_config
from pdcluster_worker.errors import DeviceError
from tests.worker.config.test_worker_config_errors import MINIMUM, write


def with_device(folder: Path, device: str) -> Path:
    return write(folder, f"{MINIMUM}gpu: B200\nengine: {{device: {device}}}\n".replace("pool: cpu", "pool: big"))


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_engine_computes_on_no_accelerator_and_says_so(tmp_path: Path, device: str) -> None:
    with pytest.raises(DeviceError) as refusal:
        asked_device(load_worker_config(with_device(tmp_path, device)))

    assert str(refusal.value) == (
        f"pool big asks for cuda (engine.device: {device} with gpu: B200), "
        "but this engine computes on CPUs only: "
        "use a pool with gpu: cpu, or set engine.device: cpu, which leaves the accelerators idle"
    )


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_asked_device_may_be_implemented(tmp_path: Path, device: str) -> None:
    config = load_worker_config(with_device(tmp_path, device))

    assert asked_device(config, {"cpu", "cuda"}).kind == "cuda"


def test_cpu_of_a_pool_with_an_accelerator_is_no_refusal(tmp_path: Path) -> None:
    assert asked_device(load_worker_config(with_device(tmp_path, "cpu"))).kind == "cpu"


def test_worker_without_its_device_says_so_whatever_else_is_missing(tmp_path: Path) -> None:
    """It has no say in the dtype of its revision, and no etcd that is away hides the reason."""
    with pytest.raises(DeviceError, match="computes on CPUs only"):
        server_process.run(with_device(tmp_path, "auto"), None)
