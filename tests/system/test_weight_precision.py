"""Workers whose weights are quantized as they load: a pair of two precisions is refused, with both
named, unless both sides allow it; in one precision remote answers are local ones.
"""

from tests.system.cluster import NewCluster


def test_a_pair_of_one_precision_answers_remotely_as_locally(new_cluster, prompts) -> None:
    cluster: NewCluster = new_cluster("weights-int8")
    for role in ("prefill", "decode"):
        cluster.add_worker(role, f"int8-{role}", quantization="int8")
    cluster.wait_ready()
    target = cluster.workers["int8-decode"]
    for prompt in (prompts(17), prompts(100)):
        remote = target.client.complete(prompt, "remote")
        assert remote.prefill == "remote"
        local = target.client.complete(prompt, "local", cache_salt="not cached")
        assert remote.tokens == local.tokens


def test_two_precisions_are_no_pair(new_cluster, prompts) -> None:
    cluster = new_cluster("weights-unequal")
    cluster.add_worker("prefill", "unequal-prefill", quantization="fp8_e4m3")
    target = cluster.add_worker("decode", "unequal-decode", allowMixedPrecision=True)
    for worker in cluster.workers.values():
        worker.wait_ready()
    target.wait_for(
        lambda: target.metrics().value("peer_refused_total", reason="precision") == 1,
        "the refused pair",
    )
    assert target.client.complete(prompts(100)).prefill == "local"
    assert "weights are held in float32 here and in fp8_e4m3 at the peer" in target.log_tail(200)


def test_two_precisions_are_a_pair_where_both_allow_it(new_cluster, prompts) -> None:
    cluster = new_cluster("weights-mixed")
    cluster.add_worker("prefill", "mixed-prefill", quantization="int8", allowMixedPrecision=True)
    target = cluster.add_worker("decode", "mixed-decode", allowMixedPrecision=True)
    cluster.wait_ready()
    assert target.client.complete(prompts(100), "remote").prefill == "remote"
