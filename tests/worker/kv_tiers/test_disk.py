"""A disk tier: a block that is not whole is a miss, and a file is found again or emptied."""

import errno
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from pdcluster_worker.errors import ModelError
from pdcluster_worker.kv_tiers import disk
from pdcluster_worker.kv_tiers.disk import DiskTier

BLOCK_BYTES = 20_000
SIZE = 1 << 20


def key_of(number):
    return number.to_bytes(32, "big")


def block_of(number, num_bytes=BLOCK_BYTES):
    return memoryview(random.Random(number).randbytes(num_bytes))


@pytest.fixture
def opened(tmp_path):
    """Opens a tier in the test's folder; all are closed at the end."""
    tiers = []

    def build(fingerprint=b"model", size=SIZE, block_bytes=BLOCK_BYTES):
        tiers.append(DiskTier("disk", tmp_path / "kv", size, block_bytes, fingerprint))
        return tiers[-1]

    yield build
    for tier in tiers:
        tier.close()


@pytest.fixture
def reopened(opened):
    """A tier with blocks 0 to 9 in slots of these numbers, closed and opened again."""

    def build(change=lambda path: None, **settings):
        first = opened()
        for number in range(10):
            first.write(number, key_of(number), block_of(number))
        end(first)
        change(first.path)
        return opened(**settings)

    return build


def read(tier, slot, number):
    target = memoryview(bytearray(BLOCK_BYTES))
    return tier.read(slot, key_of(number), target) and target == block_of(number)


def overwrite(start, data):
    def change(path):
        with path.open("r+b") as file:
            file.seek(start)
            file.write(data)

    return change


def test_blocks_are_found_again_in_the_order_of_their_writes(reopened):
    tier = reopened()
    assert tier.facts.stored == [(number, key_of(number)) for number in range(10)]
    assert all(read(tier, number, number) for number in range(10))


def test_a_rewritten_slot_is_the_most_recent_one(opened, reopened):
    tier = reopened()
    tier.write(3, key_of(99), block_of(99))
    assert read(tier, 3, 99)
    assert not read(tier, 3, 3)


@pytest.mark.parametrize("kept", [0, 17, 4095, 4096, 4100, 90_000, 150_000])
def test_what_is_cut_off_is_a_miss_and_the_rest_is_found(reopened, kept):
    tier = reopened(lambda path: os.truncate(path, kept))
    whole = {slot for slot in range(10) if tier._start(slot) + 52 + BLOCK_BYTES <= kept}
    assert {slot for slot, _ in tier.facts.stored if read(tier, slot, slot)} == whole


@pytest.mark.parametrize("offset", [0, 8, 20, 40, 48, 52, 5000, 20_051])
def test_one_wrong_byte_is_a_miss(reopened, offset):
    at = 4096 + 3 * 20_480 + offset
    wrong = bytes([255 - block_at(3, offset)])
    tier = reopened(overwrite(at, wrong))
    assert not read(tier, 3, 3)
    assert read(tier, 4, 4)


def block_at(number, offset):
    """A byte of a slot, far from what it may be in a header."""
    return block_of(number)[offset - 52] if offset >= 52 else 0


@pytest.mark.parametrize(
    "settings", [{"fingerprint": b"other"}, {"block_bytes": BLOCK_BYTES + 5000}]
)
def test_a_file_of_another_model_or_layout_is_emptied(reopened, settings):
    tier = reopened(**settings)
    assert tier.facts.stored == []
    assert tier.path.stat().st_size == disk._HEADER.size


def test_a_file_of_another_format_is_emptied(reopened):
    assert reopened(overwrite(8, b"\7\0\0\0")).facts.stored == []


def test_a_smaller_size_keeps_the_slots_that_fit(reopened):
    tier = reopened(size=4096 + 4 * 20_480)
    assert [slot for slot, _ in tier.facts.stored] == [0, 1, 2, 3]
    assert tier.path.stat().st_size <= 4096 + 4 * 20_480


def test_each_engine_of_a_folder_has_a_file_of_its_own(opened):
    first, second = opened(), opened()
    assert first.path != second.path
    first.write(0, key_of(1), block_of(1))
    assert not read(second, 0, 1)
    assert first.path.stat().st_mode & 0o77 == 0


def test_a_size_above_the_disk_is_refused(opened):
    with pytest.raises(ModelError, match=r"size \d+ is more than the \d+ bytes .* lower size"):
        opened(size=1 << 60)


def test_a_worker_starts_again_though_its_disk_has_filled(reopened, monkeypatch):
    def statvfs(path):
        return os.statvfs_result((4096, 4096, 1 << 20, 0, 0, 0, 0, 0, 0, 255))

    monkeypatch.setattr(disk.os, "statvfs", statvfs)
    tier = reopened()
    assert all(read(tier, number, number) for number in range(10))


def test_a_disk_that_is_full_at_the_start_gets_its_header_with_the_first_block(
    reopened, opened, monkeypatch
):
    pwrite = os.pwrite

    def full(descriptor, data, start):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fill(path):
        monkeypatch.setattr(disk.os, "pwrite", full)

    tier = reopened(fill, fingerprint=b"other")
    with pytest.raises(OSError, match="No space left"):
        tier.write(0, key_of(0), block_of(0))
    monkeypatch.setattr(disk.os, "pwrite", pwrite)
    tier.write(0, key_of(0), block_of(0))
    end(tier)
    assert opened(fingerprint=b"other").facts.stored == [(0, key_of(0))]


def end(tier):
    """As a worker that is killed."""
    os.close(tier._fd)
    tier._fd = os.open(os.devnull, os.O_RDONLY)


def test_workers_of_two_models_find_their_files_whichever_starts_first(opened):
    first, second = opened(), opened(fingerprint=b"other")
    first.write(0, key_of(0), block_of(0))
    second.write(0, key_of(1), block_of(1))
    end(first)
    end(second)
    again = opened(fingerprint=b"other")
    assert again.path == second.path
    assert again.facts.stored == [(0, key_of(1))]
    assert opened().facts.stored == [(0, key_of(0))]


def test_a_worker_of_a_new_model_takes_over_the_file_of_one_that_has_ended(opened):
    first = opened()
    end(first)
    assert opened(fingerprint=b"other").path == first.path


def test_files_of_workers_that_have_not_run_for_a_day_are_removed(opened):
    kept, old, locked, fresh = (opened(fingerprint=name.encode()) for name in "abcd")
    own = opened()
    for tier in (old, locked):
        os.utime(tier.path, (0, time.time() - disk.UNUSED_SECONDS - 1))
    for tier in (old, fresh, own):
        end(tier)
    assert opened().path == own.path
    assert not old.path.exists()
    assert all(tier.path.exists() for tier in (kept, locked, fresh))


def test_a_file_that_another_engine_of_the_worker_may_take_is_kept_for_a_week(opened):
    """It begins after this one, and both have slept for long."""
    own, other, third = opened(), opened(), opened()
    for tier, seconds in ((own, -3600), (other, -3600), (third, 1)):
        os.utime(tier.path, (0, time.time() - 7 * 86400 - seconds))
        end(tier)
    assert [opened().path, opened().path] == [own.path, other.path]
    assert other.path.exists()
    assert not third.path.exists()


def test_a_file_that_is_removed_while_it_is_opened_is_not_taken(opened, monkeypatch):
    flock = disk.fcntl.flock
    removed = []

    def remove(descriptor, kind):
        flock(descriptor, kind)
        if not removed:
            removed.append(Path(f"/proc/self/fd/{descriptor}").readlink())
            removed[0].unlink()

    monkeypatch.setattr(disk.fcntl, "flock", remove)
    tier = opened()
    assert removed
    assert os.fstat(tier._fd).st_nlink == 1
    assert os.path.samestat(os.fstat(tier._fd), tier.path.stat())


def test_a_folder_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "kv").write_text("a file")
    with pytest.raises(ModelError, match=r"cannot use folder .* give a path that the worker may"):
        DiskTier("disk", tmp_path / "kv", SIZE, BLOCK_BYTES, b"")


def test_a_full_disk_fails_the_write_and_blocks_before_it_are_read(opened, monkeypatch):
    tier = opened()
    tier.write(0, key_of(0), block_of(0))

    def full(descriptor, data, start):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk.os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        tier.write(1, key_of(1), block_of(1))
    assert read(tier, 0, 0)


WRITER = """
import random, sys
from pathlib import Path
from pdcluster_worker.kv_tiers.disk import DiskTier
tier = DiskTier("disk", Path(sys.argv[1]), 1 << 20, 20_000, b"model")
chosen = random.Random(int(sys.argv[2]))
print("open", flush=True)
while True:
    number = chosen.randrange(1 << 30)
    block = memoryview(random.Random(number).randbytes(20_000))
    tier.write(chosen.randrange(tier.facts.num_slots), number.to_bytes(32, "big"), block)
"""


def test_a_writer_that_is_killed_leaves_no_wrong_block(opened, tmp_path):
    """bench/kv_tier_kills.py does it a thousand times."""
    for seed in range(3):
        killed_writer(tmp_path / "kv", seed)
        tier = opened()
        found = [(slot, int.from_bytes(key, "big")) for slot, key in tier.facts.stored]
        whole = [number for slot, number in found if read_any(tier, slot, number)]
        assert len(whole) >= len(found) - 1
        end(tier)


def read_any(tier, slot, number):
    target = memoryview(bytearray(BLOCK_BYTES))
    is_whole = tier.read(slot, key_of(number), target)
    assert not is_whole or target == block_of(number), "a block that is read is another one"
    return is_whole


def killed_writer(folder, seed):
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(folder), str(seed)],
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"open\n"
    process.stdout.close()
    try:
        process.wait(timeout=0.05 + 0.01 * seed)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL
