"""The gauges under vLLM's names."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pdcluster_worker.metrics import Metrics
from pdcluster_worker.server.state_routes import VllmNames


def test_four_gauges_have_vllm_s_names_and_our_values() -> None:
    metrics = Metrics()
    page = CollectorRegistry()
    page.register(VllmNames(metrics))
    metrics.num_requests_running.set(3)
    metrics.num_requests_waiting.set_function(lambda: 5)
    metrics.kv_cache_usage_ratio.set(0.25)
    metrics.kv_blocks.labels("free").set(7)
    metrics.kv_blocks.labels("in_use").set(3)
    metrics.block_size = lambda: 16
    families = text_string_to_metric_families(generate_latest(page).decode())

    assert {
        (family.name, family.type, tuple(sample.labels.items()), sample.value)
        for family in families
        for sample in family.samples
    } == {
        ("vllm:num_requests_running", "gauge", (), 3.0),
        ("vllm:num_requests_waiting", "gauge", (), 5.0),
        ("vllm:kv_cache_usage_perc", "gauge", (), 0.25),
        (
            "vllm:cache_config_info",
            "gauge",
            (("block_size", "16"), ("num_gpu_blocks", "10")),
            1.0,
        ),
    }
