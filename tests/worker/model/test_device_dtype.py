"""`model.dtype: auto` follows the device that an engine computes on, whatever the CPU beside it."""

from pathlib import Path

import pytest

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.config.worker import ModelConfig
from pdcluster_worker.model import runner_loader
from pdcluster_worker.model.runner_loader import open_runner
from pdcluster_worker.system import native_dtype
from pdcluster_worker.system.native_dtype import DType


class OpenedError(Exception):
    """Says what was asked for in place of opening it."""


def asked_dtype(device: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    def stop(_: Path, dtype: str, **_settings: object) -> None:
        raise OpenedError(dtype)

    monkeypatch.setattr(runner_loader, "load_model", stop)
    with pytest.raises(OpenedError) as raised:
        open_runner(ModelConfig("m", str(folder)), EngineConfig(), device)
    return str(raised.value)


@pytest.mark.parametrize(
    ("capability", "dtype"), [((10, 0), "bfloat16"), ((8, 0), "bfloat16"), ((7, 5), "float32")]
)
@pytest.mark.parametrize("cpu", ["float32", "bfloat16"])
def test_auto_is_the_dtype_of_the_device(
    capability: tuple[int, int],
    dtype: str,
    cpu: DType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native_dtype, "compute_capability", lambda: capability)
    monkeypatch.setattr(native_dtype, "read_native_dtype", lambda: cpu)

    assert asked_dtype("cuda", tmp_path, monkeypatch) == dtype
    assert asked_dtype("cpu", tmp_path, monkeypatch) == cpu
