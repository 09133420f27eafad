"""Workers whose KV is quantized: half the bytes of bf16 in blocks and on the wire, the same tokens
remotely as locally, and a pair of two dtypes that is refused.
"""

import pytest

from tests.system.cluster import NewCluster

MEMORY = 4 << 20
LENGTHS = (17, 100, 300)
BLOCK = 16
VALUES = 2 * 2 * 2 * BLOCK  # of a block: 2 layers, 2 KV heads, keys and values


@pytest.mark.parametrize(("kind", "row_bytes"), [("int8", 20), ("fp8_e4m3", 20), ("bf16", 32)])
def test_a_pair_moves_and_holds_what_its_dtype_takes(new_cluster, prompts, kind, row_bytes):
    """The heads of this model have 16 numbers."""
    cluster: NewCluster = new_cluster(f"kv-{kind.replace('_', '-')}")
    pair = [
        cluster.add_worker(
            role, f"kv-{role}", kvCacheDtype=kind, kvCacheMemory=MEMORY, numBlocks=None
        )
        for role in ("prefill", "decode")
    ]
    cluster.wait_ready()
    target = pair[1]
    assert target.block_bytes == VALUES * row_bytes
    assert sum(target.blocks().values()) == MEMORY // target.block_bytes
    before = target.metrics()
    for length in LENGTHS:
        prompt = prompts(length)
        remote = target.client.complete(prompt, "remote")
        assert remote.prefill == "remote"
        local = target.client.complete(prompt, "local", cache_salt="not cached")
        assert (remote.tokens, local.cached_tokens) == (local.tokens, 0)
    num_blocks = sum(-(-length // BLOCK) for length in LENGTHS)
    target.wait_growth(
        before, "kv_transfer_bytes_total", num_blocks * target.block_bytes, direction="received"
    )


def test_workers_of_two_dtypes_are_no_pair(new_cluster, prompts):
    cluster = new_cluster("kv-unequal")
    cluster.add_worker("prefill", "kv-prefill", kvCacheDtype="int8")
    target = cluster.add_worker("decode", "kv-decode")
    for worker in cluster.workers.values():
        worker.wait_ready()
    target.wait_for(
        lambda: target.metrics().value("peer_refused_total", reason="kv_geometry") == 1,
        "the refused pair",
    )
    assert target.client.complete(prompts(100)).prefill == "local"
    assert "engine.kvCacheDtype" in target.log_tail(200)
