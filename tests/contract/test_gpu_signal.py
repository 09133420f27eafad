"""GPU utilization from the driver to the autoscaler: the worker's page, its scrape, and the signal
of prefill.
"""

from dataclasses import replace

import pytest
from prometheus_client import generate_latest

from pdcluster_api.manifests.vllm import GPU_REPORT
from pdcluster_api.plan.autoscale.signals import Signal, signals_of
from pdcluster_api.plan.autoscale.totals import read_pool
from pdcluster_api.plan.autoscale.values import PoolFacts, PoolSample
from pdcluster_operator.scrape.page import parse_page
from pdcluster_operator.scrape.windows import worker_sample
from pdcluster_schema.autoscale import AutoscaleSpec
from pdcluster_worker.messages.facts import DeviceFacts
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.system.nvidia import REPORT, parse_report


def utilization(report: str) -> Signal:
    """The signal of two workers: one whose GPUs say this, and one that has nothing to do."""
    samples = []
    for pod, text in (("a", report), ("b", "B200, 8, 4, 0, 0")):
        metrics = Metrics()
        metrics.watch_gpu(DeviceFacts("cuda", "B200"), parse_report(text).use)
        page = parse_page(generate_latest(metrics.registry))
        samples.append(worker_sample(pod, replace(page, at=1.0), None))
    facts = PoolFacts("prefill", "big", "B200", 2, 2, 2)
    sample = PoolSample(1.0, tuple(samples))
    totals = read_pool(facts, [sample], [sample])
    return next(
        signal
        for signal in signals_of("prefill", totals, totals, AutoscaleSpec())
        if signal.name in ("gpu_utilization_ratio", "engine_busy_ratio")
    )


def test_prefill_grows_by_the_utilization_of_its_gpus() -> None:
    found = utilization("B200, 8, 4, 100, 9\nB200, 8, 4, 80, 9\n")

    assert (found.name, found.value) == ("gpu_utilization_ratio", pytest.approx(0.45))
    assert found.up == AutoscaleSpec().prefill.utilization_up


def test_a_driver_that_says_nothing_leaves_the_page_and_its_other_numbers() -> None:
    found = utilization("No devices were found")

    assert (found.name, found.value) == ("gpu_utilization_ratio", 0.0)


def test_probe_writes_the_report_where_the_server_reads_it() -> None:
    assert str(REPORT) == GPU_REPORT
