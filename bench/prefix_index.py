"""Cost of the prefix index: lookups over all workers, events a second, memory, and the longest
call.

    bench/prefix_index.py [--blocks 1000000] [--workers 64] [--shared 500]

The index holds `--blocks` blocks of chains of 256 (prompts of 4096 tokens, 16 a block), each at one
worker, reported in batches of 32 in random order; then all workers also have the first `--shared`
chains, so that a lookup answers for all of them.  A lookup's hashes are objects of their own, as
those of a new request are. Times are of the thread's CPU.
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from pdcluster_worker.routing.prefix_index import PrefixIndex

CHAIN = 256
BATCH = 32
LOOKUPS = 1000


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--shared", type=int, default=500)
    options = parser.parse_args()
    draw = random.Random(1)
    index = PrefixIndex(max_blocks=2 * options.blocks)
    workers = [f"decode-{n}" for n in range(options.workers)]
    before = _resident_bytes()
    chains = [[os.urandom(32) for _ in range(CHAIN)] for _ in range(options.blocks // CHAIN)]
    batches = [
        (draw.choice(workers), chain[n : n + BATCH])
        for chain in chains
        for n in range(0, CHAIN, BATCH)
    ]
    draw.shuffle(batches)
    seconds = _seconds(*[partial(index.apply, worker, batch, ()) for worker, batch in batches])
    print(
        f"stored: {len(batches) * BATCH / sum(seconds):,.0f} blocks/s, index of {len(index):,} "
        "blocks"
    )
    print(
        f"memory: {(_resident_bytes() - before) / len(index):.0f} bytes a block, its hash and the "
        "trace's batches among them"
    )
    shared = [block for chain in chains[: options.shared] for block in chain]
    seconds = _seconds(
        *[lambda worker=worker: index.apply(worker, shared, ()) for worker in workers]
    )
    print(f"stored what others have: {len(shared) * len(workers) / sum(seconds):,.0f} blocks/s")
    _print_lookups(
        "lookup, all workers have the prompt",
        index,
        draw.choices(chains[: options.shared], k=LOOKUPS),
    )
    _print_lookups(
        "lookup, one worker has 32 blocks", index, draw.choices(chains[options.shared :], k=LOOKUPS)
    )
    strange: list[Sequence[bytes]] = [
        [os.urandom(32) for _ in range(CHAIN)] for _ in range(LOOKUPS)
    ]
    _print_lookups("lookup, no worker has any", index, strange)
    seconds = _seconds(
        *[lambda batch=batch: index.apply(batch[0], (), batch[1]) for batch in batches[::10]]
    )
    print(f"removed: {len(batches[::10]) * BATCH / sum(seconds):,.0f} blocks/s")
    calls = [partial(index.drop, workers[0]), *[partial(index.apply, workers[1], (), ())] * 400]
    print(
        f"worker dropped: longest call {max(_seconds(*calls)) * 1e3:.1f} ms, {len(index):,} blocks "
        "left"
    )


def _print_lookups(what: str, index: PrefixIndex, prompts: list[Sequence[bytes]]) -> None:
    copies = [[bytes(bytearray(block)) for block in prompt] for prompt in prompts]
    seconds = _seconds(*[lambda prompt=prompt: index.match_all(prompt) for prompt in copies])
    p50, p99 = statistics.median(seconds), statistics.quantiles(seconds, n=100)[98]
    print(f"{what}: median {p50 * 1e6:.0f} us, p99 {p99 * 1e6:.0f} us")


def _seconds(*calls: Callable[[], object]) -> list[float]:
    taken = []
    for call in calls:
        start = time.thread_time()
        call()
        taken.append(time.thread_time() - start)
    return taken


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
