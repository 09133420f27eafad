"""Two whole workers on one device: etcd, HTTP, a remote prefill's KV over each transport.

Tokens of remote prefills beside local ones, time to the first token of both, tokens a second of
many streams through HTTP, and every block free afterwards.  The model is an 8B llama of random
weights.
"""

import json
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from large_model import CONFIG, SIZES, make_module
from setting import DEVICE, REHEARSES, SITE, save

from tests.system.certificates import make_certificates
from tests.system.client import Client, body
from tests.system.cluster import Cluster, Pair
from tests.system.etcd_server import EtcdServer
from tests.system.tokens import write_tokenizer

FOLDERS = Path("/dev/shm")
PROMPTS = (40, 100) if REHEARSES else (300, 2048, 8192)
TRANSPORTS = ("tcp", "nixl")
NUM_FIRST = 2 if REHEARSES else 7
STREAMS, PROMPT, OUTPUT = (2, 20, 6) if REHEARSES else (64, 512, 128)
ENGINE: dict[str, Any] = {
    "device": DEVICE.type,
    "maxBatchedTokens": 256 if REHEARSES else 8192,
    "maxSequences": 4 if REHEARSES else 64,
    "maxModelLen": 512 if REHEARSES else 16384,
}
ENGINE |= {"numBlocks": 256} if REHEARSES else {"numBlocks": 12288}


def main() -> int:
    """Figures of each transport; one that fails stops no other."""
    figures: dict[str, Any] = {}
    with TemporaryDirectory(dir=FOLDERS) as name, _etcd(Path(name)) as etcd:
        folder = Path(name)
        model = write_model(folder / "model")
        certificates = make_certificates(folder / "tls")
        for transport in TRANSPORTS:
            cluster = Cluster(transport, folder, etcd, certificates, model)
            started = time.perf_counter()
            try:
                pair = _start(cluster, transport)
                seconds = time.perf_counter() - started
                figures[transport] = {"seconds to ready": round(seconds, 1), **measure(pair)}
            except (Exception, AssertionError) as e:
                figures[transport] = f"{type(e).__name__}: {e}"
                print(*cluster.logs().values(), sep="\n", flush=True)
            cluster.close()
            print(transport, json.dumps(figures[transport], indent=1), flush=True)
            save(figures)
    return int(any(isinstance(found, str) for found in figures.values()))


@contextmanager
def _etcd(folder: Path) -> Iterator[EtcdServer]:
    packed, program = SITE / "etcd", Path(sys.executable).parent / "etcd"
    if packed.exists() and not program.exists():
        program.symlink_to(packed)
    etcd = EtcdServer(folder)
    etcd.start()
    try:
        yield etcd
    finally:
        etcd.close()


def write_model(folder: Path) -> Path:
    """A folder as of a hub, with a tokenizer whose text shows its tokens."""
    from safetensors.torch import save_file

    folder.mkdir()
    state = make_module().state_dict()
    save_file(
        {name: weight.contiguous() for name, weight in state.items()}, folder / "model.safetensors"
    )
    del state
    if not REHEARSES:
        torch.cuda.empty_cache()
    config = {**CONFIG, "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
    config |= {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, SIZES["vocab_size"])
    return folder


def _start(cluster: Cluster, transport: str) -> Pair:
    workers = []
    for role in ("prefill", "decode"):
        worker = cluster.add_worker(
            role, f"{transport}-{role}", start=False, transport=transport, **ENGINE
        )
        worker.settings["model"]["dtype"] = "bfloat16"
        worker.start()
        workers.append(worker)
    for worker in workers:
        worker.wait_ready(150)
    cluster.wait_connected()
    return Pair(cluster, *workers)


def measure(pair: Pair) -> dict[str, Any]:
    """See the module."""
    found: dict[str, Any] = {"device": _get(pair.decode.client, "/version")}
    found["tokens"] = {str(number): equal_tokens(pair, number) for number in PROMPTS}
    found["first token"] = {
        f"{number} {place}": first_token(pair, number, place)
        for number in PROMPTS
        for place in ("local", "remote")
    }
    found["streams"] = {place: streams(pair, place) for place in ("local", "remote")}
    pair.cluster.wait_settled()
    found["metrics"] = _some_metrics(pair)
    return found


def _prompt(number: int, seed: int) -> list[int]:
    return Random(seed).choices(range(5, 400), k=number)


def equal_tokens(pair: Pair, number: int) -> str:
    """Tokens of a remote prefill that are those of a local one."""
    equal = total = 0
    for seed in range(3):
        prompt = _prompt(number, 1_000_000 + seed)
        local, remote = (
            pair.decode.client.complete(
                prompt, place, max_tokens=16 if REHEARSES else 48, cache_salt=place
            )
            for place in ("local", "remote")
        )
        assert (local.prefill, remote.prefill) == ("local", "remote")
        equal += sum(a == b for a, b in zip(local.tokens, remote.tokens, strict=True))
        total += len(local.tokens)
    return f"{equal} of {total}"


def first_token(pair: Pair, number: int, place: str) -> dict[str, float]:
    """Milliseconds to the first token of a prompt that no cache has, and to the second, which
    waits for its KV.
    """
    found: list[tuple[float, float]] = []
    for seed in range(NUM_FIRST):
        prompt = _prompt(number, 1000 * number + seed + 500 * (place == "remote"))
        started = time.perf_counter()
        with pair.decode.client.stream(prompt, place, max_tokens=2) as stream:
            stream.read_tokens(1)
            first = (time.perf_counter() - started) * 1e3
            stream.read_tokens(2)
            found.append((first, (time.perf_counter() - started) * 1e3))
    firsts, seconds = zip(*found, strict=True)
    return {
        "p50 ms": round(statistics.median(firsts), 1),
        "worst ms": round(max(firsts), 1),
        "p50 ms to the second": round(statistics.median(seconds), 1),
    }


def streams(pair: Pair, place: str) -> dict[str, float]:
    """Output tokens a second of streams that come at once, read as they come."""

    def read(number: int) -> float:
        prompt = _prompt(PROMPT, number + 500 * (place == "remote"))
        request = body(prompt, place, max_tokens=OUTPUT, stream=True)
        first = 0.0
        with pair.decode.client.http.stream("POST", "/v1/completions", json=request) as reply:
            for _ in reply.iter_raw():
                first = first or time.perf_counter() - started
        return first

    started = time.perf_counter()
    with ThreadPoolExecutor(STREAMS) as pool:
        firsts = list(pool.map(read, range(STREAMS)))
    seconds = time.perf_counter() - started
    return {
        "output tokens/s": round(STREAMS * OUTPUT / seconds, 1),
        "p50 ms to the first token": round(statistics.median(firsts) * 1e3, 1),
    }


def _get(client: Client, path: str) -> Any:
    return client.http.get(path).json()


def _some_metrics(pair: Pair) -> dict[str, list[str]]:
    """Lines that say what was transferred, and what the device is."""
    names = ("kv_transfer_bytes_total", "remote_prefill_total", "engine_device", "device_memory")
    return {
        worker.name: [
            line
            for line in worker.client.http.get("/metrics").text.splitlines()
            if any(line.startswith(f"pdcluster_{name}") for name in names)
        ]
        for worker in (pair.prefill, pair.decode)
    }


if __name__ == "__main__":
    sys.exit(main())
