"""The folder that a model is fetched into: there whole or not at all, and safe between pods that
share it.

It is made under another name and renamed at the end.  One process at a time works on it, by a file
lock, which the system drops when the process ends.
"""

import contextlib
import errno
import fcntl
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdcluster_worker.errors import FetchError

logger = logging.getLogger(__name__)

LOG_SECONDS = 5.0
"""Between lines that say how far it is."""

MARKER = ".pdcluster-model.json"
READY = ".ready"  # of a converted model; says of which file
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_FOREIGN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.ENOTDIR, errno.EEXIST)


@dataclass(frozen=True)
class ModelDownload:
    """repo at revision, in `target`.  weights: whether they are part of it.  is_adapter: a LoRA
    adapter, with all of its weights.  gguf: the quantization of the one GGUF file that it is, empty
    = its only file, where it has no other model; None = never one.
    """

    repo: str
    revision: str
    target: Path
    weights: bool = True
    is_adapter: bool = False
    gguf: str | None = None

    @property
    def work(self) -> Path:
        return _work(self.target)

    def is_there(self) -> bool:
        """True if an earlier run has finished.  Raises FetchError for anything else there."""
        try:
            held = json.loads((self.target / MARKER).read_text())
            commit = held["commit"]
            is_same = self._what(held) == self._what(self._note(commit))
        except FileNotFoundError:
            if self.target.exists() and any(self.target.iterdir()):
                raise FetchError(
                    f"{self.target} is not empty and was not fetched: choose another folder, or "
                    "empty it"
                ) from None
            return False
        except (ValueError, KeyError, TypeError) as e:
            raise FetchError(
                f"{self.target / MARKER} cannot be read ({e}): remove {self.target}"
            ) from e
        if not is_same:
            what = f"{self._what(held)}, not {self._what(self._note(commit))}"
            raise FetchError(
                f"{self.target} holds {what}: choose a folder of its own for each revision"
            )
        logger.info(
            "model is there repo=%s revision=%s commit=%s folder=%s",
            *(self.repo, self.revision, commit, self.target),
        )
        return True

    def open_work(self, commit: str) -> Path:
        """The folder to make it in, with what an earlier run of the same commit has left."""
        note, held = json.dumps(self._note(commit)), self.work / MARKER
        if held.exists() and held.read_text() == note:
            return self.work
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        held.write_text(note)
        return self.work

    def publish(self, names: set[str]) -> None:
        """Put the finished folder in its place, with nothing in it but `names` and the note."""
        for path in self.work.iterdir():
            if path.name not in names | {MARKER}:
                path.unlink()
        self.work.rename(self.target)

    def _note(self, commit: str) -> dict[str, Any]:
        note = {"repo": self.repo, "revision": self.revision, "commit": commit}
        return note if self.weights else note | {"weights": False}

    @staticmethod
    def _what(note: dict[str, Any]) -> str:
        weights = "" if note.get("weights", True) else " without weights"
        return f"{note['repo']} at {note['revision']}{weights}"


def make_once(target: Path, make: Callable[[Path], None], source: Path | None = None) -> None:
    """Have `make` fill a folder, which then becomes `target`, unless that is there.

    source: the file that it is made of; None = always the same one.  Raises FetchError where that
    is missing, for anything else there, and what `make` raises.
    """
    note = "" if source is None else _state(source)
    with only_run(target):
        if (target / READY).exists():
            held = (target / READY).read_text()
            if held != note:
                raise FetchError(
                    f"{target} holds a model made of {held or 'an unknown file'}, not {note}: "
                    "choose a folder of its own for each file, or remove it"
                )
            return
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise FetchError(
                f"{target} exists and was not made here: remove it or choose another folder"
            )
        work = _work(target)
        shutil.rmtree(work, ignore_errors=True)  # of a run that was killed
        work.mkdir()
        try:
            make(work)
            make_readable(work)
            (work / READY).write_text(note)
            work.rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _state(file: Path) -> str:
    """Name, size and time of a file, which differ for an older one of its name."""
    if not file.is_file():
        raise FetchError(f"{file} is no file: correct the path")
    found = file.stat()
    return f"{file.name} ({found.st_size} bytes, changed at {found.st_mtime_ns} ns)"


def make_readable(folder: Path) -> None:
    """Let everyone read the files: safetensors makes its own for the owner alone, and a container's
    user is another.
    """
    for path in (folder, *folder.iterdir()):
        path.chmod(path.stat().st_mode | (0o755 if path.is_dir() else 0o644))


@contextlib.contextmanager
def only_run(target: Path) -> Iterator[None]:
    """Hold the lock of a folder; others wait."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another run that makes the same folder=%s", target)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _work(target: Path) -> Path:
    return target.parent / f".{target.name}.partial"


def check_space(folder: Path, missing_bytes: int) -> None:
    """Raises FetchError if there is less space."""
    free = shutil.disk_usage(folder).free
    if missing_bytes > free:
        raise FetchError(
            f"{folder.parent} has {_size_text(free)} free and {_size_text(missing_bytes)} are "
            "still missing: give the volume more space"
        )


def _size_text(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def meaning(error: OSError, folder: Path) -> str:
    """Describe an error of the file system."""
    if error.errno in _NO_SPACE:
        return f"no space is left in {folder.parent}: give the volume more space"
    if error.errno in _FOREIGN:
        return (
            f"{error.filename or folder} cannot be written: {error.strerror}: let this user write "
            "there, or choose another folder"
        )
    return f"{type(error).__name__}: {error}"
