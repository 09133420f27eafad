"""A GPU that is asked for and is not there is refused before etcd is asked."""

from pathlib import Path

import pytest

from pdcluster_worker.config import worker as module
from pdcluster_worker.config.worker import check_gpu, load_worker_config, requested_device
from pdcluster_worker.errors import DeviceError
from pdcluster_worker.processes import worker_start
from tests.worker.config.engine_files import MINIMUM, write


def with_device(folder: Path, device: str) -> Path:
    return write(
        folder,
        f"{MINIMUM}gpu: B200\nengine: {{device: {device}}}\n".replace("pool: cpu", "pool: big"),
    )


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_node_without_a_gpu_is_refused_with_the_fix(tmp_path: Path, device: str) -> None:
    with pytest.raises(DeviceError) as refusal:
        check_gpu(requested_device(load_worker_config(with_device(tmp_path, device))), lambda: 0)

    assert str(refusal.value) == (
        f"pool big asks for cuda (engine.device: {device} with gpu: B200), but no CUDA device is "
        "visible: "
        "check the node's driver and device plugin, and that the pod requests an accelerator, "
        "use a pool with gpu: cpu, or set engine.device: cpu, which leaves the accelerators idle"
    )
    assert len(str(refusal.value)) < 400  # what a condition shows of it


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_gpu_that_is_there_may_be_requested(tmp_path: Path, device: str) -> None:
    requested = requested_device(load_worker_config(with_device(tmp_path, device)))

    check_gpu(requested, lambda: 1)

    assert requested.kind == "cuda"


def test_cpu_of_a_pool_with_an_accelerator_is_no_refusal(tmp_path: Path) -> None:
    requested = requested_device(load_worker_config(with_device(tmp_path, "cpu")))

    check_gpu(requested, lambda: 0)

    assert requested.kind == "cpu"


def test_worker_without_its_device_says_so_whatever_else_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no say in the dtype of its revision, and no etcd that is away hides the reason."""
    monkeypatch.setattr(module, "count_gpus", lambda: 0)
    with pytest.raises(DeviceError, match="no CUDA device is visible"):
        worker_start.run(with_device(tmp_path, "auto"), None)
