"""A page of Prometheus' text format to numbers; whatever is wrong in a wanted one
refuses the page.
"""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster_api.plan.autoscale.histogram import LatencyHistogram
from pdcluster_operator.scrape.page import MetricsPage, PageError, parse_page
from pdcluster_schema.latency import LATENCY_BUCKETS
from tests.worker_pages import WorkerPages, changed

REQUIRED = (
    "pdcluster_num_requests_running",
    "pdcluster_num_requests_waiting",
    "pdcluster_prefill_queue_requests",
    "pdcluster_prefill_queue_tokens",
    "pdcluster_kv_cache_usage_ratio",
    "pdcluster_engine_busy_ratio",
    "pdcluster_prompt_tokens_total",
    "pdcluster_prefill_tokens_total",
    "pdcluster_prefill_seconds_total",
    "pdcluster_generation_tokens_total",
    "pdcluster_time_to_first_token_seconds_count",
)


def busy_page() -> bytes:
    worker = WorkerPages()
    worker.set(
        num_requests_running=3,
        num_requests_waiting=5,
        prefill_queue_requests=4,
        prefill_queue_tokens=512,
    )
    worker.set(kv_cache_usage_ratio=0.25, engine_busy_ratio=0.75, held_requests=6)
    worker.serve(requests=4)
    return worker.text()


PAGE = busy_page()


def test_page_of_a_worker_is_read():
    page = parse_page(PAGE)

    assert page.prompt_tokens_created is not None
    assert page.prompt_tokens_created > 0
    assert dataclasses.replace(page, prompt_tokens_created=None) == MetricsPage(
        num_requests_running=3,
        num_requests_waiting=5,
        prefill_queue_requests=4,
        prefill_queue_tokens=512,
        kv_cache_usage_ratio=0.25,
        engine_busy_ratio=0.75,
        prompt_tokens_total=400,
        prefill_tokens_total=400,
        prefill_seconds_total=1.0,
        generation_tokens_total=40,
        time_to_first_token_seconds_count=4,
        held_requests=6,
        histograms={
            "ttft": LatencyHistogram.of(LATENCY_BUCKETS, [(4, 0.5)]),
            "itl": LatencyHistogram.of(LATENCY_BUCKETS, [(36, 0.25)]),
            "queue": LatencyHistogram.of(LATENCY_BUCKETS, [(1, 0.1)]),
        },
    )


@pytest.mark.parametrize(
    ("line", "instead", "reason"),
    [
        ('{le="+Inf"} 4.0', "", "pdcluster_time_to_first_token_seconds lacks its bucket [+]Inf"),
        ("_sum 2.0", "", "pdcluster_time_to_first_token_seconds lacks its sum"),
        ('{le="1.0"} 4.0', '{le="1.0"} 3.0', "counts fewer observations in a bucket than in the"),
        ('{le="1.0"} 4.0', '{le="1.0"} NaN', "is no number: b'NaN'"),
        ('{le="1.0"} 4.0', '{le="one"} 4.0', "le of .* is no number: b'one'"),
        ('{le="1.0"} 4.0', '{le="0.75"} 4.0', "stands there twice"),
        ('{le="1.0"} 4.0', '{le="-1"} 4.0', "le of .* is negative"),
    ],
)
def test_page_with_a_wrong_histogram_is_refused(line: str, instead: str, reason: str):
    name = "pdcluster_time_to_first_token_seconds"
    full = f"{name}{'' if line.startswith('_') else '_bucket'}"
    assert f"{full}{line}\n".encode() in PAGE

    with pytest.raises(PageError, match=reason):
        parse_page(
            PAGE.replace(
                f"{full}{line}\n".encode(), f"{full}{instead}\n".encode() if instead else b""
            )
        )


def test_a_label_that_ends_in_le_is_no_bound():
    line = b'pdcluster_time_to_first_token_seconds_bucket{le="1.0"'

    assert parse_page(PAGE.replace(line, line + b',role="decode"')) == parse_page(PAGE)


def test_page_with_too_many_buckets_is_refused():
    name = "pdcluster_time_to_first_token_seconds_bucket"
    lines = "".join(f'{name}{{le="{1000 + number}"}} 4\n' for number in range(100))

    with pytest.raises(PageError, match="has more than 100 buckets"):
        parse_page(PAGE + lines.encode())


def test_page_may_tell_of_a_gpu():
    assert parse_page(PAGE + b"pdcluster_gpu_utilization_ratio 0.5\n").gpu_utilization_ratio == 0.5


def test_page_needs_no_time_of_creation():
    lines = [line for line in PAGE.splitlines(keepends=True) if b"_created" not in line]

    assert parse_page(b"".join(lines)).prompt_tokens_created is None


@pytest.mark.parametrize("name", REQUIRED)
def test_page_that_lacks_a_metric_is_refused(name: str):
    page = b"".join(
        line for line in PAGE.splitlines(keepends=True) if not line.startswith(f"{name} ".encode())
    )

    with pytest.raises(PageError, match=f"^it lacks {name}$"):
        parse_page(page)


@pytest.mark.parametrize("name", [*REQUIRED, "pdcluster_prompt_tokens_created"])
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("NaN", "is no number: b'NaN'"),
        ("+Inf", "is no number"),
        ("-1.0", "is negative: -1"),
        ("1e300", "more than can be meant"),
        ("", "is no number"),
        ("1_000", "is no number"),
        ("0x10", "is no number"),
        ("1 1700000000", "is no number"),
        (" 1", "is no number"),
        ("\u0661", "is no number"),
        ("\x1b[2J", r"is no number: b'\\x1b"),
        ("1\r", "is no number"),
    ],
)
def test_page_with_a_wrong_number_is_refused(name: str, value: str, reason: str):
    lines = PAGE.decode().split("\n")
    page = "\n".join(
        f"{name} {value}" if line.startswith(f"{name} ") else line for line in lines
    ).encode()

    with pytest.raises(PageError, match=f"^{name} is.*{reason}|^{name} {reason}"):
        parse_page(page)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("kv_cache_usage_ratio", "1.0"),
        ("engine_busy_ratio", "1"),
        ("num_requests_waiting", "1e9"),
        ("prompt_tokens_total", "9007199254740992"),
    ],
)
def test_page_is_believed_up_to_a_limit(name: str, most: str):
    parse_page(changed(PAGE, {f"pdcluster_{name}": most}))
    with pytest.raises(PageError, match="more than can be meant"):
        parse_page(changed(PAGE, {f"pdcluster_{name}": repr(float(most) * 1.001)}))


@pytest.mark.parametrize("name", REQUIRED)
def test_page_that_repeats_a_metric_is_refused(name: str):
    with pytest.raises(PageError, match=f"^{name} stands there twice$"):
        parse_page(PAGE + f"{name} 1.0\n".encode())


def test_page_with_labels_on_a_known_metric_is_refused():
    page = PAGE.replace(
        b"\npdcluster_engine_busy_ratio ", b'\npdcluster_engine_busy_ratio{engine="0"} '
    )

    with pytest.raises(PageError, match="it lacks pdcluster_engine_busy_ratio"):
        parse_page(page)


@pytest.mark.parametrize("page", [b"", b"\n", b"<html>sign in</html>\n", b"\x00\xff" * 500 + b"\n"])
def test_page_of_something_else_is_refused(page: bytes):
    with pytest.raises(
        PageError,
        match=r"it lacks pdcluster_num_requests_running and 12 more|middle of a line, after 0 "
        r"bytes",
    ):
        parse_page(page)


def test_half_a_page_is_refused_or_says_the_same():
    """A cut behind the last wanted line takes nothing away."""
    whole = parse_page(PAGE)
    refused = 0
    for end in range(len(PAGE)):
        try:
            assert parse_page(PAGE[:end]) == whole
        except PageError:
            refused += 1
    assert refused > 0.9 * len(PAGE)


def test_unknown_lines_do_not_matter():
    noise = (
        b'# HELP x y\n# pdcluster_engine_busy_ratio 2\npdcluster_kv_blocks{state="free"} '
        b'NaN\nother{a="b c"} zzz\n\n\xff\n'
    )

    assert parse_page(noise + PAGE + noise) == parse_page(PAGE)


@settings(deadline=None)
@given(st.data())
def test_damaged_page_gives_good_numbers_or_is_refused(data: st.DataObject):
    start = data.draw(st.integers(0, len(PAGE)))
    end = data.draw(st.integers(start, min(len(PAGE), start + 40)))
    page = PAGE[:start] + data.draw(st.binary(max_size=20)) + PAGE[end:]
    try:
        numbers = dataclasses.asdict(parse_page(page))
        del numbers["histograms"]
    except PageError:
        return
    assert all(value is None or (math.isfinite(value) and value >= 0) for value in numbers.values())
    assert numbers["kv_cache_usage_ratio"] <= 1
    assert numbers["engine_busy_ratio"] <= 1
