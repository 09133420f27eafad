"""The files of one run, under the user's state folder.

    STATE_DIR/NAME/lock            held by the running pdctl of that name
    STATE_DIR/NAME/run-PID-XXXX/   state.json  transfers.json  remarks.json
                                   config/  certificates/  etcd/  logs/

A run's folder stays for its logs until the next run of the same name removes it.
"""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from pdcluster_api.errors import StartError


@dataclass(frozen=True)
class RunDirectory:
    path: Path

    @classmethod
    def create(cls, state_dir: Path, name: str) -> "RunDirectory":
        """A fresh folder with mode 0700; removes those of ended runs.

        Raises StartError when it cannot be written.
        """
        parent = state_dir / name
        try:
            parent.mkdir(parents=True, exist_ok=True)
            for old in runs(state_dir, name):
                if not old.is_alive:
                    shutil.rmtree(old.path, ignore_errors=True)
            run = cls(Path(tempfile.mkdtemp(prefix=f"run-{os.getpid()}-", dir=parent)))
            for folder in (run.config, run.certificates, run.logs):
                folder.mkdir()
        except OSError as e:
            raise _cannot_write(parent, e) from e
        return run

    @staticmethod
    @contextlib.contextmanager
    def name_taken(state_dir: Path, name: str, port: int) -> Iterator[None]:
        """Hold the name of a run.  Raises StartError when another run holds it."""
        path = state_dir / name / "lock"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a+")
        except OSError as e:
            raise _cannot_write(path.parent, e) from e
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as e:
                raise StartError(
                    f"{name} runs here already: {path.read_text().strip()}; end that one first, or "
                    "give this one another metadata.name",
                    exit_code=2,
                ) from e
            file.truncate(0)
            file.write(f"process {os.getpid()}, port {port}\n")
            file.flush()
            yield

    @property
    def config(self) -> Path:
        return self.path / "config"

    @property
    def certificates(self) -> Path:
        return self.path / "certificates"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def etcd_data(self) -> Path:
        return self.path / "etcd"

    @property
    def policy(self) -> Path:
        return self.config / "policy.yaml"

    @property
    def pid(self) -> int:
        """Process id of the pdctl that made the folder."""
        return int(self.path.name.split("-")[1])

    @property
    def is_alive(self) -> bool:
        return psutil.pid_exists(self.pid)

    def write_state(self, state: dict[str, Any]) -> None:
        replace_file(self.path / "state.json", json.dumps(state, indent=2) + "\n")

    def read_state(self) -> dict[str, Any] | None:
        """None until it is written."""
        return _read_json(self.path / "state.json")

    def write_remarks(self, remarks: list[str]) -> None:
        replace_file(self.path / "remarks.json", json.dumps({"remarks": remarks}) + "\n")

    def read_remarks(self) -> dict[str, Any]:
        return _read_json(self.path / "remarks.json") or {}

    def write_transfers(self, content: dict[str, Any]) -> None:
        replace_file(self.path / "transfers.json", json.dumps(content, indent=2) + "\n")

    def read_transfers(self) -> dict[str, Any]:
        return _read_json(self.path / "transfers.json") or {}


def default_state_dir() -> Path:
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "pdcluster"


def runs(state_dir: Path, name: str = "*") -> list[RunDirectory]:
    """The newest last."""
    return [
        RunDirectory(path)
        for path in sorted(state_dir.glob(f"{name}/run-*-*"), key=lambda path: path.stat().st_mtime)
    ]


def _cannot_write(folder: Path, error: OSError) -> StartError:
    return StartError(
        f"cannot write {folder}: {error.strerror}; choose another folder with --state-dir",
        exit_code=1,
    )


def write_yaml(path: Path, content: dict[str, Any]) -> None:
    replace_file(path, yaml.safe_dump(content, sort_keys=False))


def replace_file(path: Path, text: str) -> None:
    """Atomic, also with two writers."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    temporary.write_text(text)
    temporary.replace(path)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return content
