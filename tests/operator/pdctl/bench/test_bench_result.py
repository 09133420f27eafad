"""Results have vLLM's keys."""

import pytest

from pdctl.bench.load import LatencyLimits, LoadResult, RequestResult
from pdctl.bench.result import (
    Reporting,
    latency_result,
    serve_result,
    serve_text,
    throughput_result,
)

GOOD = RequestResult(0.0, 0.0, (0.5, 0.7, 0.9), 3, None, 8)
FAILED = RequestResult(1.0, 1.0, (), 0, "HTTP 503", 8)
RUN = LoadResult((GOOD, FAILED), 2.0, 0.0)
VLLM_KEYS = {
    *("date", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput"),
    *(
        f"{word}_{name}_ms"
        for word in ("mean", "median", "std", "p99")
        for name in ("ttft", "tpot", "itl")
    ),
}
VLLM_DETAILS = {"input_lens", "output_lens", "start_times", "ttfts", "itls", "errors"}


def test_serve_result_has_vllms_keys() -> None:
    assert set(serve_result(RUN, {}, Reporting())) == VLLM_KEYS
    assert set(serve_result(RUN, {}, Reporting(detailed=True))) == VLLM_KEYS | VLLM_DETAILS


def test_serve_result_counts_failures_and_leaves_them_out_of_latencies() -> None:
    reporting = Reporting(
        ("ttft", "e2el"), (50.0, 99.9), LatencyLimits(ttft_seconds=1.0), detailed=True
    )
    result = serve_result(RUN, {"model_id": "small"}, reporting)

    counts = ("model_id", "completed", "failed", "total_input_tokens", "total_output_tokens")
    assert [result[key] for key in counts] == ["small", 1, 1, 8, 3]
    assert (result["request_goodput"], result["output_throughput"]) == (0.5, 1.5)
    assert (result["mean_ttft_ms"], result["p99.9_e2el_ms"]) == (
        pytest.approx(500),
        pytest.approx(900),
    )
    assert "mean_itl_ms" not in result
    assert (result["ttfts"], result["errors"]) == ([0.5, 0.0], ["", "HTTP 503"])


def test_serve_text_shows_figures_and_reasons_once() -> None:
    text = serve_text(serve_result(RUN, {}, Reporting()), ["HTTP 503", "HTTP 503"])

    assert "Successful requests:                     1" in text
    assert "P99 TPOT (ms):                           200.00" in text
    assert text.count("failed: HTTP 503") == 1
    assert "goodput" not in text


def test_serve_result_without_an_answer_has_no_latencies() -> None:
    result = serve_result(LoadResult((FAILED,), 2.0, 0.0), {}, Reporting(slo=LatencyLimits()))

    assert not [key for key in result if key.endswith("_ms")]
    assert "Request goodput (req/s):                 0.00" in serve_text(result, [])


def test_latency_and_throughput_have_vllms_keys() -> None:
    latency = latency_result([1.0, 3.0])

    assert (latency["avg_latency"], latency["latencies"], latency["percentiles"]["50"]) == (
        2.0,
        [1.0, 3.0],
        2.0,
    )
    assert list(latency["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert throughput_result(RUN) == {
        "elapsed_time": 2.0,
        "num_requests": 1,
        "total_num_tokens": 11,
        "requests_per_second": 0.5,
        "tokens_per_second": 5.5,
        "output_tokens_per_second": 1.5,
    }
