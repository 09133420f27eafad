"""A store in a directory: entries are whole or absent, its size holds for all workers together."""

import errno
import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from pdcluster_worker.errors import ModelError
from pdcluster_worker.kv_tiers import directory_store
from pdcluster_worker.kv_tiers.directory_store import FOLDER, LEFT_SECONDS, DirectoryStore
from pdcluster_worker.kv_tiers.disk import DiskTier
from pdcluster_worker.kv_tiers.shared import SharedTier, fingerprint_of

BLOCK_BYTES = 3000
ENTRY = 4096
SIZE = 256 * 4 * ENTRY
FORK = multiprocessing.get_context("fork")


def key_of(number, folder=None):
    """folder: of the store, of which a key is in one."""
    digest = random.Random(f"key {number}").randbytes(32)
    return digest if folder is None else bytes([folder]) + digest[1:]


def block_of(key):
    return memoryview(random.Random(key).randbytes(BLOCK_BYTES))


def open_tier(path, model=b"model", size=SIZE):
    fingerprint = fingerprint_of(model)
    store = DirectoryStore("shared", path, size, BLOCK_BYTES, fingerprint)
    return SharedTier("shared", store, fingerprint, BLOCK_BYTES, size // BLOCK_BYTES)


def read(tier, key):
    """Return whether it has the block; one that is read is the right one."""
    target = memoryview(bytearray(BLOCK_BYTES))
    try:
        is_whole = tier.read(0, key, target)
    except LookupError:
        return False
    assert not is_whole or target == block_of(key), "a block that is read is another one"
    return is_whole


def write(tier, key):
    tier.write(0, key, block_of(key))


def files(path):
    return [each for each in (path / FOLDER).rglob("*") if each.is_file()]


@pytest.fixture
def pair(tmp_path):
    return open_tier(tmp_path), open_tier(tmp_path)


def test_what_one_worker_writes_another_finds(pair):
    first, second = pair
    keys = [key_of(number) for number in range(5)]
    for key in keys[:3]:
        write(first, key)
    assert second.has(keys) == 3
    assert all(read(second, key) for key in keys[:3])
    with pytest.raises(LookupError):
        second.read(0, keys[3], memoryview(bytearray(BLOCK_BYTES)))
    assert first.facts.store == second.facts.store != ""


def test_models_share_a_directory_and_no_blocks(tmp_path):
    mine, other = open_tier(tmp_path), open_tier(tmp_path, b"other")
    write(mine, key_of(1))
    assert other.has([key_of(1)]) == 0
    assert mine.facts.store != other.facts.store


def test_files_are_readable_by_the_workers_user_alone(pair, tmp_path):
    write(pair[0], key_of(1))
    assert all(each.stat().st_mode & 0o77 == 0 for each in files(tmp_path))


@pytest.mark.parametrize("change", ["cut", "grown", "empty", 0, 8, 12, 60, 90, 100, 2000])
def test_an_entry_that_is_not_whole_is_a_miss_and_deleted(pair, tmp_path, change):
    tier = pair[0]
    write(tier, key_of(1))
    (path,) = files(tmp_path)
    if change == "cut":
        os.truncate(path, 2000)
    elif change == "empty":
        os.truncate(path, 0)
    elif change == "grown":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        flip(path, change)
    assert not read(tier, key_of(1))
    assert tier.has([key_of(1)]) == 0
    write(tier, key_of(1))
    assert read(tier, key_of(1))


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_an_entry_under_another_key_is_a_miss(pair, tmp_path):
    tier, right, wrong = pair[0], key_of(1, folder=3), key_of(2, folder=3)
    write(tier, right)
    (path,) = files(tmp_path)
    path.rename(path.with_name(path.name.replace(right.hex(), wrong.hex())))
    assert tier.has([wrong]) == 1
    assert not read(tier, wrong)


def test_a_full_folder_drops_the_least_recently_used(pair):
    tier = pair[0]
    keys = [key_of(number, folder=7) for number in range(5)]
    for age, key in enumerate(keys[:4]):
        write(tier, key)
        set_age(tier, key, 1000 - 100 * age)
    assert read(tier, keys[0])  # a use
    write(tier, keys[4])
    assert [read(tier, key) for key in keys] == [True, False, True, True, True]


def set_age(tier, key, seconds):
    then = time.time() - seconds
    os.utime(tier._store._path(key), (then, then))


def test_a_file_of_a_killed_worker_is_deleted_and_a_fresh_one_counts(pair, tmp_path):
    tier = pair[0]
    folder = tmp_path / FOLDER / "07"
    old, fresh = folder / f"old.new-{3 * ENTRY}", folder / f"fresh.new-{3 * ENTRY}"
    for each in (old, fresh):
        each.touch()
    os.utime(old, (0, time.time() - LEFT_SECONDS - 1))
    write(tier, key_of(1, folder=7))
    assert not old.exists()
    assert fresh.exists()
    assert read(tier, key_of(1, folder=7))
    (folder / f"more.new-{ENTRY}").touch()
    with pytest.raises(OSError, match="size is too small for its writers"):
        write(tier, key_of(2, folder=7))
    assert not read(tier, key_of(2, folder=7))


def test_a_write_that_fails_leaves_nothing(pair, tmp_path, monkeypatch):
    def full(descriptor, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(directory_store.os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write(pair[0], key_of(1))
    assert files(tmp_path) == []


@pytest.mark.parametrize("is_unmounted", [True, False])
def test_a_volume_that_is_gone_is_an_error_and_no_miss(tmp_path, monkeypatch, is_unmounted):
    """Unmounted: the path is there, and empty."""
    tier = open_tier(tmp_path / "kv")
    (tmp_path / "kv").rename(tmp_path / "elsewhere")
    if is_unmounted:
        (tmp_path / "kv").mkdir()
        monkeypatch.setattr(tier._store, "_device", -1)
    with pytest.raises(FileNotFoundError):
        tier.has([key_of(1)])
    with pytest.raises(FileNotFoundError):
        tier.read(0, key_of(1), memoryview(bytearray(BLOCK_BYTES)))
    with pytest.raises(FileNotFoundError):
        write(tier, key_of(1))
    assert not (tmp_path / "kv" / FOLDER).exists()


@pytest.mark.parametrize("emptied", ["*", FOLDER, f"{FOLDER}/07"])
def test_a_folder_that_was_emptied_is_used_on(pair, tmp_path, emptied):
    """By workers that run; they still share it, also with one that starts."""
    first, second = pair
    old, new = key_of(1, folder=7), key_of(2, folder=7)
    write(first, old)
    for each in tmp_path.glob(emptied):
        shutil.rmtree(each)
    assert second.has([old]) == 0
    assert not read(first, old)
    write(first, new)
    assert read(second, new)
    assert open_tier(tmp_path).facts.store == first.facts.store


def test_a_folder_may_hold_files_of_disk_tiers_too(tmp_path):
    """As of two clusters with one volume."""
    disks = []
    for _ in range(3):
        disks.append(DiskTier("disk", tmp_path, 1 << 20, BLOCK_BYTES, b"model"))
        write(open_tier(tmp_path), key_of(1))
    for disk in disks:
        disk.close()
    assert read(open_tier(tmp_path), key_of(1))


def test_a_path_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "kv").write_text("a file")
    with pytest.raises(ModelError, match=r"cannot use .*kv: .* give the path of a mounted volume"):
        open_tier(tmp_path / "kv")


def test_a_size_that_holds_too_few_blocks_is_refused(tmp_path):
    least = 256 * 2 * ENTRY
    open_tier(tmp_path, size=least)
    with pytest.raises(ModelError, match=rf"is less than the {least} bytes .* raise it, or leave"):
        open_tier(tmp_path, size=least - 1)


def keep_writing(path, seed, num_writes=None):
    """Entries of few keys, until it is killed or has written so many; others are deleted."""
    tier, chosen = open_tier(path, size=2 * SIZE), random.Random(seed)
    while num_writes is None or num_writes > 0:
        key = key_of(chosen.randrange(40), folder=chosen.randrange(2))
        if chosen.random() < 0.2:
            tier._store.delete(key)
        else:
            write(tier, key)
        num_writes = None if num_writes is None else num_writes - 1


def start(*arguments):
    process = FORK.Process(target=keep_writing, args=arguments)
    process.start()
    return process


def test_writers_and_deleters_at_once_keep_the_size_and_every_block_right(tmp_path):
    tier = open_tier(tmp_path)
    writers = [start(tmp_path, seed, 300) for seed in range(4)]
    most = found = 0
    while any(writer.is_alive() for writer in writers):
        for folder in range(2):
            names = [each.name for each in (tmp_path / FOLDER / f"{folder:02x}").iterdir()]
            most = max(most, sum(map(directory_store._bytes_of, names)))
            found += sum(read(tier, key_of(number, folder)) for number in range(40))
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert found > 0
    # A name is counted before its file has bytes: entries, and the files that wait for room.
    assert most <= 2 * SIZE // 256 + 4 * ENTRY
    sizes = sum(each.stat().st_blocks * 512 for each in (tmp_path / FOLDER / "00").iterdir())
    assert sizes <= 2 * SIZE // 256


def test_a_writer_that_is_killed_leaves_no_wrong_block(tmp_path):
    """bench/kv_tier_kills.py does it a thousand times."""
    tier = open_tier(tmp_path)
    for seed in range(3):
        writer = start(tmp_path, seed)
        time.sleep(0.05)
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        for folder in range(2):
            for number in range(40):
                read(tier, key_of(number, folder))


def fail_writes(monkeypatch, code, num_times=None):
    """Writes to files fail: so many of them, or all."""
    write_ok, left = os.write, [num_times]

    def write(descriptor, data):
        if left[0] == 0:
            return write_ok(descriptor, data)
        left[0] = None if left[0] is None else left[0] - 1
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(directory_store.os, "write", write)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_volume_that_is_full_before_the_size_is_reached_drops_the_oldest(pair, monkeypatch, code):
    tier, keys = pair[0], [key_of(number, folder=7) for number in range(3)]
    for age, key in enumerate(keys[:2]):
        write(tier, key)
        set_age(tier, key, 1000 - 100 * age)
    fail_writes(monkeypatch, code, num_times=1)
    write(tier, keys[2])
    assert [read(tier, key) for key in keys] == [False, True, True]


def test_a_volume_that_fails_for_another_reason_keeps_its_entries(pair, monkeypatch):
    tier, keys = pair[0], [key_of(number, folder=7) for number in range(2)]
    write(tier, keys[0])
    fail_writes(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        write(tier, keys[1])
    assert read(tier, keys[0])


def test_a_size_above_the_volume_is_refused(tmp_path):
    with pytest.raises(
        ModelError, match=r"size \d+ is more than the \d+ bytes of the volume of .*: lower size"
    ):
        open_tier(tmp_path, size=1 << 60)


def fail_new_files(monkeypatch, code):
    """Neither files nor folders can be made."""
    make = Path.mkdir

    def fail(path, *_, **settings):
        if path.is_dir() and settings.get("exist_ok"):
            return make(path, *_, **settings)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "mkdir", fail)
    monkeypatch.setattr(Path, "touch", fail)


def test_a_volume_that_is_full_at_the_start_is_read_and_given_blocks(tmp_path, monkeypatch):
    first = open_tier(tmp_path)
    write(first, key_of(1))
    fail_new_files(monkeypatch, errno.ENOSPC)
    second = open_tier(tmp_path)
    assert second.facts.store == first.facts.store
    assert read(second, key_of(1))
    write(second, key_of(2))
    assert read(first, key_of(2))


def test_a_volume_that_is_away_at_the_start_is_used_once_it_answers(tmp_path, monkeypatch):
    with monkeypatch.context() as away:
        fail_new_files(away, errno.ESTALE)
        tier = open_tier(tmp_path)
        assert tier.facts.store != ""
        with pytest.raises(OSError, match="Stale"):
            tier.has([key_of(1)])
        with pytest.raises(OSError, match="Stale"):
            write(tier, key_of(1))
    write(tier, key_of(1))
    assert tier.has([key_of(1)]) == 1
    assert read(open_tier(tmp_path), key_of(1))


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_volume_that_the_worker_may_not_write_is_refused(tmp_path, monkeypatch, code):
    open_tier(tmp_path)
    fail_new_files(monkeypatch, code)
    with pytest.raises(ModelError, match="give the path of a mounted volume"):
        open_tier(tmp_path)
