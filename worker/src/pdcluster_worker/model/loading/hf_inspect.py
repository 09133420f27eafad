"""Asks transformers about a model in a separate process and caches the answer on disk.

transformers' modeling code takes seconds to import and stays in memory.  No torch here.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pdcluster_worker.config.requested_device import requested_device
from pdcluster_worker.config.worker import WorkerConfig
from pdcluster_worker.errors import WRONG_SETTING, ModelError
from pdcluster_worker.model.loading.family import FAMILIES
from pdcluster_worker.model.loading.support import read_config
from pdcluster_worker.system.fingerprint import fingerprint
from pdcluster_worker.system.native_dtype import DType, dtype_of_device

logger = logging.getLogger(__name__)

# environment variable: folder of cached answers, in place of ~/.cache
FOLDER_VARIABLE = "PDCLUSTER_ANSWERS"

MAX_KEPT = 16  # a few megabytes each

_LIBRARIES = ("torch", "transformers", "safetensors")


@dataclass(frozen=True, slots=True)
class InspectRequest:
    path: Path
    dtype: DType
    max_model_len: int | None
    threads: int = 0  # of the inspecting process; 0 = from the machine

    def key(self) -> str:
        """Cache key.  Raises ModelError where the folder cannot be read."""
        digest = hashlib.sha256(fingerprint(self.path).encode())
        versions = [importlib.metadata.version(name) for name in _LIBRARIES]
        digest.update(json.dumps([self.dtype, self.max_model_len, versions]).encode())
        for source in sorted(Path(__file__).parent.rglob("*.py")):
            digest.update(source.read_bytes())
        return digest.hexdigest()


class Inspection:
    """A cached answer, or the process that writes it."""

    def __init__(
        self,
        question: InspectRequest,
        file: Path,
        folder: "tempfile.TemporaryDirectory[str] | None",
    ) -> None:
        """folder: temporary, for an answer that cannot be cached."""
        self.question = question
        self.is_kept = file.exists()
        self._file = file
        self._folder = folder
        self._process = None if self.is_kept else _start(question, file)

    def wait(self) -> Path | None:
        """None when the process failed (logged).  Raises ModelError when the model is refused."""
        if self._process is None:
            return self._file
        output, _ = self._process.communicate()
        status = self._process.returncode
        if status == WRONG_SETTING:
            raise ModelError(output.strip())
        if status:
            logger.warning(
                "the process that asks transformers ended with %d: the model is loaded by its code",
                status,
            )
            return None
        return self._file

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.communicate()
        if self._folder is not None:
            self._folder.cleanup()


def start_early(config: WorkerConfig) -> Inspection | None:
    """Start before torch is imported; None where it is not used, as with ranks.  Raises nothing."""
    model, engine = config.model, config.engine
    if engine.tensor_parallel_size * engine.pipeline_parallel_size > 1:
        return None
    dtype = dtype_of_device(requested_device(config).kind) if model.dtype == "auto" else model.dtype
    try:
        return start_inspection(
            InspectRequest(
                Path(model.path).expanduser(), dtype, engine.max_model_len, engine.threads
            )
        )
    except (ModelError, OSError):
        return None


def start_inspection(question: InspectRequest) -> Inspection | None:
    """None for a model type that our decoder does not know.  Raises ModelError, OSError."""
    if read_config(question.path)["model_type"] not in FAMILIES:
        return None
    name, passing = _name(question), None
    try:
        folder = folder_of_answers()
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / name).exists() and not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} cannot be written")
    except (OSError, RuntimeError) as e:  # a home that cannot be found or written
        logger.info("transformers' answer is not kept: %s", e)
        passing = tempfile.TemporaryDirectory(prefix="pdcluster-")
        folder = Path(passing.name)
    try:
        return Inspection(question, folder / name, passing)
    except OSError:
        if passing is not None:
            passing.cleanup()
        raise


def forget(question: InspectRequest) -> None:
    """Remove an answer that does not fit its model."""
    with contextlib.suppress(OSError, RuntimeError, ModelError):
        (folder_of_answers() / _name(question)).unlink(missing_ok=True)


def folder_of_answers() -> Path:
    """Raises RuntimeError for a user without a home."""
    output = os.environ.get(FOLDER_VARIABLE)
    return Path(output) if output else Path.home() / ".cache" / "pdcluster" / ".answers"


def drop_oldest(folder: Path) -> None:
    for file in sorted(
        folder.glob("*.safetensors"), key=lambda file: file.stat().st_mtime, reverse=True
    )[MAX_KEPT:]:
        file.unlink(missing_ok=True)


def _name(question: InspectRequest) -> str:
    return f"{question.key()}.safetensors"


def _start(question: InspectRequest, file: Path) -> "subprocess.Popen[str]":
    settings = json.dumps(
        [str(question.path), question.dtype, question.max_model_len, question.threads]
    )
    command = (
        sys.executable,
        "-m",
        "pdcluster_worker.model.hf_inspect_process",
        str(file),
        settings,
    )
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
