"""transformers' answer about a model: its form, and logits that our decoder is compared with.

Asked for once, then kept.

transformers' modeling code takes seconds to import and stays in memory, and an engine
with our decoder needs it for this alone.  So a process of its own is asked
(`model.hf_inspect_process`), beside the import of torch here, and its answer is kept for the
next starts.  An answer belongs to a model (`system.fingerprint`), a dtype and a limit,
to these versions of torch and transformers, and to the sources of this room: a change
of any is another question.  Kept or not, our decoder is compared with it at every
load (`model.logits_check`).  Nothing here needs torch.
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

FOLDER_VARIABLE = "PDCLUSTER_ANSWERS"
"""Environment variable: the folder that answers are kept in, instead of one in the user's cache."""

MAX_KEPT = 16
"""Answers in that folder, of a few megabytes each; the oldest go."""

_LIBRARIES = ("torch", "transformers", "safetensors")


@dataclass(frozen=True, slots=True)
class InspectRequest:
    """Question to a process.  threads: of the process that answers; 0 = from the machine."""

    path: Path
    dtype: DType
    max_model_len: int | None
    threads: int = 0

    def key(self) -> str:
        """A name for the answer.  Raises ModelError where the folder cannot be read."""
        digest = hashlib.sha256(fingerprint(self.path).encode())
        versions = [importlib.metadata.version(name) for name in _LIBRARIES]
        digest.update(json.dumps([self.dtype, self.max_model_len, versions]).encode())
        for source in sorted(Path(__file__).parent.rglob("*.py")):
            digest.update(source.read_bytes())
        return digest.hexdigest()


class Inspection:
    """An answer that is there, or a process that writes it.

    question: what was asked.  is_kept: whether the answer was there already.
    """

    def __init__(
        self,
        question: InspectRequest,
        file: Path,
        folder: "tempfile.TemporaryDirectory[str] | None",
    ) -> None:
        """folder: for an answer that cannot be kept; it goes with `close`."""
        self.question = question
        self.is_kept = file.exists()
        self._file = file
        self._folder = folder
        self._process = None if self.is_kept else _start(question, file)

    def wait(self) -> Path | None:
        """The file of the answer; None when there is none, and the log says why.

        Raises ModelError when the model is refused.
        """
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
        """End a process that still runs, and drop what cannot be kept."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.communicate()
        if self._folder is not None:
            self._folder.cleanup()


def start_early(config: WorkerConfig) -> Inspection | None:
    """Ask for the model of an engine; None where that is of no use, as with ranks.

    Raises nothing: loading it will.

    For `auto` the device's own dtype is asked for, which most often is what the revision agrees on.
    """
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
    """Find or ask for an answer; None for a model type that our decoder does not know.

    Raises ModelError, OSError.
    """
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
    """Folder of stored answers.  Raises RuntimeError for a user without a home."""
    output = os.environ.get(FOLDER_VARIABLE)
    return Path(output) if output else Path.home() / ".cache" / "pdcluster" / ".answers"


def drop_oldest(folder: Path) -> None:
    """Remove all answers but the newest ones."""
    for file in sorted(
        folder.glob("*.safetensors"), key=lambda file: file.stat().st_mtime, reverse=True
    )[MAX_KEPT:]:
        file.unlink(missing_ok=True)


def _name(question: InspectRequest) -> str:
    return f"{question.key()}.safetensors"


def _start(question: InspectRequest, file: Path) -> "subprocess.Popen[str]":
    """Start the process that answers; what it logs goes where this one's log goes."""
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
