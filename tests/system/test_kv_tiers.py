"""Prefixes that leave a worker's KV blocks come back from its tiers, also after it was killed, and
from a store to which another worker has written them.
"""

import pytest

from tests.system.cluster import NewCluster
from tests.system.waiting import wait_for
from tests.system.worker_process import WorkerProcess

BLOCK, NUM_BLOCKS = 16, 40


@pytest.fixture
def worker(new_cluster: NewCluster, tmp_path) -> WorkerProcess:
    tiers = [
        {"type": "host", "size": 1 << 20},
        {"type": "disk", "size": 64 << 20, "path": str(tmp_path / "kv")},
    ]
    cluster = new_cluster("tiers")
    found = cluster.add_worker("mixed", "tiers-mixed-0", numBlocks=NUM_BLOCKS, kvTiers=tiers)
    cluster.wait_ready()
    return found


def test_prefixes_come_back_from_host_memory_and_from_the_disk(worker, prompts, reference):
    all_prompts = [prompts(20 * BLOCK + 3) for _ in range(12)]
    before = worker.metrics()
    for prompt in (*all_prompts, *all_prompts):
        reference.check(prompt, worker.client.complete(prompt, max_tokens=4).tokens)
    after = worker.settled_metrics()
    assert after.value("kv_tier_reads_total", choice="read") > 0
    loaded = {
        tier: worker.growth(before, "kv_tier_bytes_total", tier=tier, direction="loaded")
        for tier in ("host", "disk")
    }
    assert sum(loaded.values()) > 0
    assert after.value("kv_tier_blocks", tier="disk", state="stored") > 0
    assert after.value("kv_tier_stopped", tier="disk") == 0
    assert after.value("prefix_cache_hit_tokens_total") > 0

    worker.kill()
    worker.restart()

    assert worker.settled_metrics().value("kv_tier_blocks", tier="disk", state="stored") > 0
    answers = [worker.client.complete(prompt, max_tokens=4) for prompt in all_prompts]
    for prompt, answer in zip(all_prompts, answers, strict=True):
        reference.check(prompt, answer.tokens)
    assert max(answer.cached_tokens for answer in answers) >= 16 * BLOCK
    assert worker.settled_metrics().value("kv_tier_damaged_blocks_total", tier="disk") <= 1


def test_a_worker_reads_what_another_has_computed_and_goes_on_without_the_store(
    new_cluster: NewCluster, tmp_path, prompts, reference
) -> None:
    tiers = [
        {"type": "host", "size": 8 << 20},
        {"type": "shared", "size": 256 << 20, "path": str(tmp_path / "kv")},
    ]
    clusters = [new_cluster(name) for name in ("one", "two")]
    first, second = (
        cluster.add_worker("mixed", f"{cluster.name}-mixed-0", numBlocks=NUM_BLOCKS, kvTiers=tiers)
        for cluster in clusters
    )
    for cluster in clusters:
        cluster.wait_ready()
    prompt = prompts(20 * BLOCK + 3)
    reference.check(prompt, first.client.complete(prompt, max_tokens=4).tokens)
    wait_for(lambda: len(list((tmp_path / "kv").rglob("??/*"))) >= 20, 30.0, "no 20 entries")

    answer = second.client.complete(prompt, max_tokens=4)

    reference.check(prompt, answer.tokens)
    assert answer.cached_tokens == 20 * BLOCK
    assert second.settled_metrics().value("kv_tier_lookups_total", outcome="found") == 1

    (tmp_path / "kv").rename(tmp_path / "gone")
    for other in (prompts(20 * BLOCK + 3) for _ in range(2)):
        reference.check(other, second.client.complete(other, max_tokens=4).tokens)
    after = second.settled_metrics()
    assert after.value("kv_tier_lookups_total", outcome="failed") >= 1
    assert after.value("kv_tier_stopped", tier="shared") == 1
