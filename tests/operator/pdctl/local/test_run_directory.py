"""The files of a run, and what the machine gives."""

import errno
import fcntl
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from pdcluster_api.errors import StartError
from pdctl.local.gpus import Gpu
from pdctl.local.machine import available_cores, port_is_free
from pdctl.local.run_directory import (
    RunDirectory,
    default_state_dir,
    remove_api_keys,
    replace_file,
    runs,
    write_api_key,
)

UNUSED_PID = 2**22 + 1  # above the kernel's largest pid


def test_run_directory_is_fresh_and_private(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "chat")

    assert run.is_alive
    assert run.pid == os.getpid()
    assert run.path.stat().st_mode & 0o777 == 0o700
    assert run.logs.is_dir()
    assert run.read_state() is None
    run.write_state({"name": "chat"})
    assert run.read_state() == {"name": "chat"}


def test_a_run_has_ended_where_its_pid_is_that_of_a_later_process(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "chat")
    pid, started = run.path.name.split("-")[1:3]
    later = RunDirectory(run.path.with_name(f"run-{pid}-{int(started) - 1}-x"))

    assert (run.is_alive, later.is_alive) == (True, False)


def test_next_run_removes_ended_runs_of_its_name_only(tmp_path: Path) -> None:
    ended, other = (
        tmp_path / "chat" / f"run-{UNUSED_PID}-1-x",
        tmp_path / "other" / f"run-{UNUSED_PID}-1-x",
    )
    for path in (ended, other):
        path.mkdir(parents=True)
    alive = RunDirectory.create(tmp_path, "chat")

    assert not ended.exists()
    assert other.exists()
    second = RunDirectory.create(tmp_path, "chat")
    assert {run.path for run in runs(tmp_path, "chat")} == {alive.path, second.path}


@pytest.mark.parametrize("name", ["*", "ch?t", "/etc", "..", ".", ""])
def test_a_name_is_no_pattern_and_no_path(name: str, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "chat")

    assert runs(tmp_path, name) == []
    assert runs(tmp_path, "chat") == [run]


def test_runs_that_are_removed_during_a_look_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, removed = (RunDirectory.create(tmp_path, "chat") for _ in range(2))
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    stat = Path.stat

    def vanish(path: Path, **options: bool) -> os.stat_result:
        if path == removed.path:
            raise FileNotFoundError(path)
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", vanish)
    assert runs(tmp_path) == [run]


def test_a_name_is_taken_for_as_long_as_its_run_lives(tmp_path: Path) -> None:
    with (
        RunDirectory.name_taken(tmp_path, "chat", 8000),
        RunDirectory.name_taken(tmp_path, "other", 8001),
        pytest.raises(StartError) as refused,
        RunDirectory.name_taken(tmp_path, "chat", 8002),
    ):
        pass
    with RunDirectory.name_taken(tmp_path, "chat", 8002):
        pass

    assert str(refused.value) == (
        f"chat runs here already: process {os.getpid()}, port 8000; end that one first, or give "
        "this one another metadata.name, a MODEL by --name"
    )
    assert refused.value.exit_code == 2


def test_a_gpu_is_taken_for_as_long_as_its_run_lives(tmp_path: Path) -> None:
    """By its UUID: a container that has some GPUs of the machine counts them from 0."""
    taken = RunDirectory.gpus_taken
    gpus = [Gpu(index, f"GPU-{index}", "NVIDIA H200") for index in range(4)]
    again = replace(gpus[2], index=0)
    with (
        taken(tmp_path, "chat", 8000, [gpus[0], gpus[2]]),
        taken(tmp_path, "other", 8001, [replace(gpus[1], index=0)]),
        pytest.raises(StartError) as refused,
        taken(tmp_path, "third", 8002, [gpus[3], again]),
    ):
        pass
    with taken(tmp_path, "third", 8002, [gpus[3], again]):
        pass

    assert str(refused.value) == (
        f"GPU 0 is used by chat, process {os.getpid()}, port 8000; end that one first, or leave "
        "the GPU out with CUDA_VISIBLE_DEVICES"
    )
    assert refused.value.exit_code == 2
    assert runs(tmp_path) == []


def test_keys_of_runs_are_removed_and_nothing_else(tmp_path: Path) -> None:
    run, other = (RunDirectory.create(tmp_path, name) for name in ("chat", "other"))
    for each in (run, other):
        write_api_key(each.path / "api-keys", "sesame")
    remove_api_keys(tmp_path, "chat")

    assert not (run.path / "api-keys").exists()
    assert run.logs.is_dir()
    assert (other.path / "api-keys/key").read_text() == "sesame"


def test_unwritable_state_folder_is_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartError) as refused:
        RunDirectory.create(tmp_path / "file", "chat")
    with (
        pytest.raises(
            StartError, match=r"cannot be written: .* choose another folder with --state"
        ),
        RunDirectory.name_taken(tmp_path / "file", "chat", 8000),
    ):
        pass

    assert (
        str(refused.value)
        == f"{tmp_path}/file/chat: cannot be written: Not a directory; choose another folder with "
        "--state-dir"
    )
    assert refused.value.exit_code == 1


def test_a_state_folder_without_locks_is_named_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.raises(
            StartError, match="/chat: cannot be written: No locks available; choose another"
        ),
        RunDirectory.name_taken(tmp_path, "chat", 8000),
    ):
        pass


def test_state_dir_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_state_dir() == tmp_path / "pdcluster"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/user")
    assert default_state_dir() == Path("/home/user/.local/state/pdcluster")


def test_replaced_file_leaves_no_other(tmp_path: Path) -> None:
    replace_file(tmp_path / "a", "1")
    replace_file(tmp_path / "a", "2")

    assert [path.read_text() for path in tmp_path.iterdir()] == ["2"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        replace_file(tmp_path / "folder", "3")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "folder"]


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_cores_are_limited_by_the_cgroup(
    files: dict[str, str], limit: int | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    assert available_cores(tmp_path) == (limit or len(os.sched_getaffinity(0)))


def test_port_is_free_until_a_process_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not port_is_free(port)
    assert port_is_free(port)
    assert port_is_free(0)
