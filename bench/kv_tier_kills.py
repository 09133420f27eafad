"""Kill writers of a disk tier in the middle of a write, and count blocks that are read wrong.

    bench/kv_tier_kills.py [--kills 1000] [--seed 0]

A process writes blocks that follow from their key to one file, over and over, and is
killed by SIGKILL after a random time of its first 30 ms.  Each time the file is
opened as an engine does that starts again: a block that is found must be that of its
key, or be a miss.  A wrong block ends the run with status 1.
"""

import argparse
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path

from pdcluster_worker.kv_tiers.disk import DiskTier

BLOCK_BYTES, SIZE = 60_000, 4 << 20


def main() -> int:
    options = parse()
    folder = Path(tempfile.mkdtemp())
    chosen = random.Random(options.seed)
    found = misses = 0
    written: set[int] = set()
    try:
        for number in range(options.kills):
            kill_a_writer(folder, number, chosen.uniform(0.0, 0.03))
            whole, torn, wrong = check(folder, written)
            found, misses = found + whole, misses + torn
            if wrong:
                print(f"kill {number}: {wrong} wrong blocks")
                return 1
    finally:
        shutil.rmtree(folder)
    print(f"{options.kills} kills: {found} blocks found whole, {misses} misses, 0 wrong")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def open_tier(folder: Path) -> DiskTier:
    return DiskTier("disk", folder, SIZE, BLOCK_BYTES, b"kills")


def block_of(number: int) -> memoryview:
    return memoryview(random.Random(number).randbytes(BLOCK_BYTES))


def kill_a_writer(folder: Path, seed: int, seconds: float) -> None:
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        write(folder, seed, writing)
    os.close(writing)
    os.read(reading, 1)  # it has opened the file
    os.close(reading)
    time.sleep(seconds)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def write(folder: Path, seed: int, ready: int) -> None:
    """Until it is killed."""
    tier, chosen = open_tier(folder), random.Random(f"writer {seed}")
    blocks = [
        (number, block_of(number)) for number in (chosen.randrange(1 << 40) for _ in "8bytes")
    ]
    os.write(ready, b"1")
    while True:
        number, block = chosen.choice(blocks)
        tier.write(chosen.randrange(tier.facts.num_slots), number.to_bytes(32, "big"), block)


def check(folder: Path, written: set[int]) -> tuple[int, int, int]:
    """Blocks that are whole, that are misses, and that are other than their key says.

    written: slots that held a block before; one that holds none now is a miss.
    """
    tier, target = open_tier(folder), memoryview(bytearray(BLOCK_BYTES))
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


if __name__ == "__main__":
    raise SystemExit(main())
