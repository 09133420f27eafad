"""KV events as vLLM's own cache makes and encodes them, for a model with sliding windows."""

import json
import os
import subprocess

import pytest

from pdcluster_worker.messages.block_hash import block_hashes
from pdcluster_worker.stock_engine.cache_events import CacheEvents
from tests.system.stock_vllm import FOLDER, SWITCH

SIZE = 16
PROMPT = list(range(16 * SIZE))
SHOWN = """
import json, sys
import msgspec, torch
from vllm.distributed.kv_events import KVEventBatch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec,
)
from vllm.v1.request import Request

size, prompt, others = json.load(sys.stdin)
init_none_hash(sha256)
kinds = dict(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
groups = [
    KVCacheGroupSpec(["windowed"], SlidingWindowSpec(**kinds, sliding_window=2 * size)),
    KVCacheGroupSpec(["full"], FullAttentionSpec(**kinds)),
]
config = KVCacheConfig(num_blocks=41, kv_cache_tensors=[], kv_cache_groups=groups)
manager = KVCacheManager(config, 4096, size, size, enable_kv_cache_events=True)
hasher = get_request_block_hasher(size, sha256)

def request(name, tokens):
    return Request(name, tokens, SamplingParams(max_tokens=2), None, block_hasher=hasher)

def run(name, tokens):
    one = request(name, tokens)
    for start in range(0, len(tokens), 4 * size):
        assert manager.allocate_slots(one, 4 * size) is not None
        one.num_computed_tokens += 4 * size
    manager.free(one)

shown = []
for name, tokens in [("a", prompt), *others.items()]:
    run(name, tokens)
    batch = msgspec.msgpack.encode(KVEventBatch(ts=0.5, events=list(manager.take_events())))
    hit = manager.get_computed_blocks(request("again", prompt + [1]))[1]
    shown.append([batch.hex(), hit])
print(json.dumps(shown))
"""


@pytest.mark.skipif(os.environ.get(SWITCH) != "1", reason=f"set {SWITCH}=1 for stock vLLM")
def test_a_prefix_of_a_model_with_windows_is_what_vllm_finds() -> None:
    others = {"b": [7] * 8 * SIZE, "c": [8] * 16 * SIZE}
    done = subprocess.run(
        [FOLDER / "bin" / "python", "-c", SHOWN],
        input=json.dumps([SIZE, PROMPT, others]),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr

    cache, found = CacheEvents(SIZE), []
    for sequence, (batch, hit) in enumerate(json.loads(done.stdout.splitlines()[-1])):
        cache.take(sequence, bytes.fromhex(batch))
        found.append((cache.matched(block_hashes(PROMPT, SIZE)), hit // SIZE))

    assert found == [(16, 16), (16, 16), (0, 0)]
