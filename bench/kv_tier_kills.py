"""Kill writers of a tier in the middle of a write, and count blocks that are read wrong.

    bench/kv_tier_kills.py [--kills 1000] [--seed 0] [--tier disk | shared]

A process writes blocks that follow from their key, over and over, and is killed by
SIGKILL after a random time of its first 30 ms: to the file of a disk tier, or to the
directory of a shared one, which another process writes to and deletes from all the
time.  Each time the tier is opened as an engine does that starts again: a block that
is found must be that of its key, or be a miss.  A wrong block ends the run with
status 1, and so do files of a shared directory that are more than its size.
"""

import argparse
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path

from pdcluster_worker.kv_tiers.directory_store import FOLDER, NUM_FOLDERS, DirectoryStore
from pdcluster_worker.kv_tiers.disk import DiskTier
from pdcluster_worker.kv_tiers.shared import SharedTier, fingerprint_of

BLOCK_BYTES, SIZE = 60_000, 4 << 20
SHARED_SIZE = 256 * 12 * 65_536
KEY_FOLDERS, NUM_KEYS = 24, 384
"""Folders of a shared directory, which are full then, and keys in them."""


def main() -> int:
    options = parse()
    folder = Path(tempfile.mkdtemp())
    chosen = random.Random(options.seed)
    is_shared = options.tier == "shared"
    fill, check = (fill_shared, check_shared) if is_shared else (fill_disk, check_disk)
    others = os.fork() if is_shared else 0
    if is_shared and others == 0:
        fill_shared(folder, -1)
    found = misses = 0
    written: set[int] = set()
    try:
        for number in range(options.kills):
            kill_a_writer(partial(fill, folder, number), chosen.uniform(0.0, 0.03))
            with stopped(others):  # or sizes that are added up are of no one moment
                whole, torn, wrong = check(folder, written)
            found, misses = found + whole, misses + torn
            if wrong:
                print(f"kill {number}: {wrong} wrong blocks, or bytes over the size")
                return 1
    finally:
        if others:
            os.kill(others, signal.SIGKILL)
            os.waitpid(others, 0)
        shutil.rmtree(folder)
    print(f"{options.kills} kills: {found} blocks found whole, {misses} misses, 0 wrong")
    return 0


@contextmanager
def stopped(process: int) -> Iterator[None]:
    """0 = none."""
    if process:
        os.kill(process, signal.SIGSTOP)
    yield
    if process:
        os.kill(process, signal.SIGCONT)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tier", choices=["disk", "shared"], default="disk")
    return parser.parse_args()


def open_disk(folder: Path) -> DiskTier:
    return DiskTier("disk", folder, SIZE, BLOCK_BYTES, b"kills")


def open_shared(folder: Path) -> SharedTier:
    fingerprint = fingerprint_of(b"kills")
    store = DirectoryStore("shared", folder, SHARED_SIZE, BLOCK_BYTES, fingerprint)
    return SharedTier("shared", store, fingerprint, BLOCK_BYTES, NUM_KEYS)


def key_of(number: int) -> bytes:
    """In one of `KEY_FOLDERS`."""
    return bytes([number % KEY_FOLDERS]) + number.to_bytes(31, "big")


@lru_cache(NUM_KEYS)
def block_of(number: int) -> memoryview:
    return memoryview(random.Random(number).randbytes(BLOCK_BYTES))


def kill_a_writer(fill: Callable[[int], None], seconds: float) -> None:
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        fill(writing)
    os.close(writing)
    os.read(reading, 1)  # it has opened the tier
    os.close(reading)
    time.sleep(seconds)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def fill_disk(folder: Path, seed: int, ready: int) -> None:
    """Until it is killed."""
    tier, chosen = open_disk(folder), random.Random(f"writer {seed}")
    blocks = [
        (number, block_of(number)) for number in (chosen.randrange(1 << 40) for _ in "8bytes")
    ]
    os.write(ready, b"1")
    while True:
        number, block = chosen.choice(blocks)
        tier.write(chosen.randrange(tier.facts.num_slots), number.to_bytes(32, "big"), block)


def fill_shared(folder: Path, seed: int, ready: int | None = None) -> None:
    """Until it is killed."""
    tier, chosen = open_shared(folder), random.Random(f"writer {seed}")
    blocks = [block_of(number) for number in range(NUM_KEYS)]
    if ready is not None:
        os.write(ready, b"1")
    while True:
        number = chosen.randrange(NUM_KEYS)
        with suppress(OSError):  # no room while others write
            tier.write(0, key_of(number), blocks[number])
        if chosen.random() < 0.2:
            tier._store.delete(key_of(chosen.randrange(NUM_KEYS)))


def check_disk(folder: Path, written: set[int]) -> tuple[int, int, int]:
    """Blocks that are whole, that are misses, and that are other than their key says.

    written: slots that held a block before; one that holds none now is a miss.
    """
    tier, target = open_disk(folder), memoryview(bytearray(BLOCK_BYTES))
    slots = {slot for slot, _ in tier.facts.stored}
    whole, torn, wrong = 0, len(written - slots), 0
    written |= slots
    for slot, key in tier.facts.stored:
        if not tier.read(slot, key, target):
            torn += 1
        elif target == block_of(int.from_bytes(key, "big")):
            whole += 1
        else:
            wrong += 1
    tier.close()
    return whole, torn, wrong


def check_shared(folder: Path, _: set[int]) -> tuple[int, int, int]:
    """The same; a wrong one too for each folder of more bytes than its share."""
    tier, target = open_shared(folder), memoryview(bytearray(BLOCK_BYTES))
    whole = torn = wrong = 0
    for number in range(NUM_KEYS):
        try:
            if not tier.read(0, key_of(number), target):
                torn += 1
            elif target == block_of(number):
                whole += 1
            else:
                wrong += 1
        except LookupError:
            torn += 1
    for number in range(KEY_FOLDERS):
        wrong += num_bytes(folder / FOLDER / f"{number:02x}") > SHARED_SIZE // NUM_FOLDERS
    return whole, torn, wrong


def num_bytes(folder: Path) -> int:
    """On the disk."""
    return sum(each.stat().st_blocks * 512 for each in folder.iterdir())


if __name__ == "__main__":
    raise SystemExit(main())
