"""Numbers that the operator reads of a real worker under load: each in the meaning, unit and place
that the autoscaler assumes.

The pages come over HTTP from real processes; the parser and the rates are the operator's.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdcluster_api.plan.autoscale.values import WorkerSample
from pdcluster_operator.scrape.page import MetricsPage, parse_page
from pdcluster_operator.scrape.windows import latencies_since, worker_sample
from tests.chart.helm_chart import RELEASE, named, render
from tests.system.waiting import wait_for
from tests.system.worker_process import SETTLE_SECONDS, WorkerProcess

NUM_WAITING = 5
LIMITS = named(
    render({"monitoring": {"podMonitors": True}}), "PodMonitor", f"{RELEASE}-pdcluster-workers"
)["spec"]
# that Prometheus adds: job, instance, namespace, pod, container, endpoint, and four by the
# PodMonitor's relabelings
NUM_TARGET_LABELS = 10


def reading(worker: WorkerProcess) -> MetricsPage:
    body = worker.client.http.get("/metrics").raise_for_status().content
    return replace(parse_page(body), at=time.monotonic())


def gauges(worker: WorkerProcess) -> WorkerSample:
    return worker_sample(worker.name, reading(worker), None)


def wait_shown(worker: WorkerProcess, is_so: Callable[[WorkerSample], bool]) -> WorkerSample:
    """Wait until a scrape shows it; returns the sample of that scrape."""

    def fitting() -> WorkerSample | None:
        return sample if is_so(sample := gauges(worker)) else None

    sample = wait_for(fitting, SETTLE_SECONDS, lambda: gauges(worker))
    assert sample is not None
    return sample


def test_idle_worker_shows_every_number(pair):
    pair.cluster.wait_settled()
    for worker in (pair.prefill, pair.decode):
        page = reading(worker)
        assert (
            page.num_requests_running,
            page.num_requests_waiting,
            page.prefill_queue_requests,
            page.prefill_queue_tokens,
            page.kv_cache_usage_ratio,
        ) == (0, 0, 0, 0, 0)
        assert page.prompt_tokens_created is not None
        assert abs(time.time() - page.prompt_tokens_created) < 24 * 3600  # Unix seconds


def test_worker_says_what_it_computes_on(pair):
    for worker in (pair.prefill, pair.decode):
        told = worker.record["device"]
        assert (told["kind"], bool(told["name"])) == ("cpu", True)
        assert worker.client.http.get("/version").json()["device"] == {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            **told,
        }
        series = f'pdcluster_engine_device_info{{device="cpu",name="{told["name"]}"}} 1.0'
        assert series in worker.client.http.get("/metrics").text
        assert f"computes on device=cpu name={told['name']}" in worker.log.read_text()


def test_page_of_a_worker_stays_well_below_the_bounds_of_its_pod_monitor(pair, prompts):
    """A scrape beyond a bound fails whole, so there is room for five times of all that is here."""
    assert pair.decode.client.complete(prompts(100), "remote", max_tokens=2).prefill == "remote"
    pages = [
        worker.client.http.get("/metrics").raise_for_status().content
        for worker in (pair.prefill, pair.decode)
    ]
    samples = [
        [
            sample
            for family in text_string_to_metric_families(page.decode())
            for sample in family.samples
        ]
        for page in pages
    ]
    labels = [sample.labels for page in samples for sample in page]

    assert 5 * max(map(len, pages)) < 10**6
    assert LIMITS["bodySizeLimit"] == "1MB"
    assert 5 * max(map(len, samples)) < LIMITS["sampleLimit"]
    assert 5 * max(len(name) for each in labels for name in each) < LIMITS["labelNameLengthLimit"]
    assert (
        5 * max(len(value) for each in labels for value in each.values())
        < LIMITS["labelValueLengthLimit"]
    )
    assert max(map(len, labels)) + NUM_TARGET_LABELS < LIMITS["labelLimit"] / 2


@pytest.mark.parametrize("place", ["local", "remote"])
def test_rates_of_a_load_are_where_it_was_served(pair, prompts, place):
    num_requests, prompt_tokens, output_tokens = 4, 100, 20
    before = {worker: reading(worker) for worker in (pair.prefill, pair.decode)}
    for _ in range(num_requests):
        answer = pair.decode.client.complete(
            prompts(prompt_tokens), place, max_tokens=output_tokens
        )
        assert answer.prefill == place

    # the prefill worker makes the first one
    generated = num_requests * (output_tokens - (place == "remote"))
    pair.decode.wait_for(
        lambda: (
            reading(pair.decode).generation_tokens_total
            - before[pair.decode].generation_tokens_total
            == generated
        ),
        "all tokens to be counted",
    )
    decode, prefill = (
        worker_sample(worker.name, reading(worker), before[worker])
        for worker in (pair.decode, pair.prefill)
    )
    after = {worker: reading(worker) for worker in before}
    latencies = latencies_since(after[pair.decode], before[pair.decode])
    assert {name: each.count for name, each in latencies.items()} == {
        "ttft": num_requests,
        "itl": num_requests * (output_tokens - 1),
        "queue": num_requests,
    }
    # Requests and prompts count at the ingress, wherever they are prefilled; computed tokens count
    # where they were computed.
    ratio = (
        decode.prompt_token_rate / decode.request_rate
        if decode.request_rate and decode.prompt_token_rate
        else None
    )
    assert ratio == pytest.approx(prompt_tokens)
    assert (prefill.request_rate, prefill.prompt_token_rate) == (0, 0)
    of_prefill = latencies_since(after[pair.prefill], before[pair.prefill])
    assert not any(each.count for each in of_prefill.values())
    computing, resting = (decode, prefill) if place == "local" else (prefill, decode)
    page, old = (
        (after[pair.decode], before[pair.decode])
        if place == "local"
        else (after[pair.prefill], before[pair.prefill])
    )
    assert page.prefill_tokens_total - old.prefill_tokens_total == num_requests * prompt_tokens
    assert resting.prefill_token_rate == 0
    assert computing.prefill_busy_rate is not None
    assert 0 < computing.prefill_busy_rate < 1  # seconds of the engine per second
    # seconds, of one request
    ttft, itl, queue = (latencies[name].mean or 0.0 for name in ("ttft", "itl", "queue"))
    assert 0 < itl < ttft < 10
    assert 0 <= queue < ttft
    assert 0 < after[pair.decode].engine_busy_ratio <= 1


def test_requests_that_wait_for_prefill_are_the_prefill_queue_alone(slow, prompts):
    """Not a reason for another decode worker."""
    with ThreadPoolExecutor(NUM_WAITING) as pool:
        with slow.prefill.engine_stopped():
            answers = [
                pool.submit(slow.decode.client.complete, prompts(300), "remote", max_tokens=2)
                for _ in range(NUM_WAITING)
            ]
            # One has the only credit; what it makes wait is reported when the engine goes on.
            wait_shown(
                slow.decode,
                lambda shown: (
                    (shown.prefill_queue_requests, shown.prefill_queue_tokens)
                    == (NUM_WAITING - 1, 300 * (NUM_WAITING - 1))
                ),
            )
            assert gauges(slow.decode).num_requests_waiting == 0
        assert all(answer.result().prefill == "remote" for answer in answers)
    wait_shown(slow.decode, lambda shown: shown.prefill_queue_requests == 0)


def test_requests_that_wait_for_the_decode_engine_are_its_queue_alone(slow, prompts):
    """Not a reason for another prefill worker; four run at once."""
    with ThreadPoolExecutor(4 + NUM_WAITING) as pool:
        answers = [
            pool.submit(slow.decode.client.complete, prompts(40), "local", max_tokens=400)
            for _ in range(4 + NUM_WAITING)
        ]
        shown = wait_shown(
            slow.decode,
            lambda shown: shown.num_requests_running == 4 and shown.num_requests_waiting >= 2,
        )
        assert (shown.prefill_queue_requests, shown.prefill_queue_tokens) == (0, 0)
        # of 512 blocks, four requests of forty at most
        assert 0 < shown.kv_cache_usage_ratio < 0.35
        assert [answer.result().prefill for answer in answers] == ["local"] * (4 + NUM_WAITING)
    wait_shown(
        slow.decode,
        lambda shown: (
            (shown.num_requests_running, shown.num_requests_waiting, shown.kv_cache_usage_ratio)
            == (0, 0, 0)
        ),
    )


def test_worker_that_restarts_is_another_life(pair, prompts):
    pair.decode.client.complete(prompts(20))
    before = reading(pair.decode)
    pair.decode.terminate()
    assert pair.decode.wait_end() == 0
    pair.decode.restart()
    # further than ever in the life before
    while reading(pair.decode).prompt_tokens_total <= before.prompt_tokens_total:
        pair.decode.client.complete(prompts(300), max_tokens=1)

    assert worker_sample("w", reading(pair.decode), before).request_rate is None


def test_draining_worker_goes_on_telling(slow, prompts):
    before = reading(slow.decode)
    with slow.decode.client.stream(prompts(20), "local", max_tokens=1500) as stream:
        stream.read_tokens(1)
        with slow.cluster.drained_by_command(slow.decode.name):
            slow.cluster.wait_state(slow.decode.name, "draining")
            reply = slow.decode.client.http.get("/metrics")
            assert reply.status_code == httpx.codes.OK
            assert (
                parse_page(reply.content).time_to_first_token_seconds_count
                > before.time_to_first_token_seconds_count
            )
    slow.decode.wait_ready()
