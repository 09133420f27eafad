"""The bandwidth cap, with a clock that the test moves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_worker.kv_transfer.tcp import frame_blocks
from pdcluster_worker.kv_transfer.tcp_link import BURST_SECONDS, TokenBucket
from pdcluster_worker.kv_transfer.wire import FRAME_BYTES


@given(
    st.integers(1, 10**9),
    st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 5)), min_size=1, max_size=50),
)
def test_bytes_sent_by_any_time_stay_under_the_cap(rate, frames):
    bucket, now, sent = TokenBucket(rate), 0.0, 0
    largest = max(size for size, _ in frames)
    for size, idle in frames:
        now += idle
        now += bucket.delay(now)
        bucket.spend(size, now)
        sent += size
        assert sent <= (rate * (now + BURST_SECONDS) + largest) * (1 + 1e-6)


def test_sender_with_enough_work_gets_the_whole_rate():
    bucket, now = TokenBucket(1000), 0.0
    for _ in range(100):
        now += bucket.delay(now)
        bucket.spend(500, now)
    assert now == pytest.approx(99 * 0.5)


def test_rate_zero_is_no_cap():
    bucket = TokenBucket(0)
    bucket.spend(10**12, 0.0)
    assert bucket.delay(0.0) == 0.0


@pytest.mark.parametrize(
    ("block_bytes", "bandwidth", "blocks"),
    [(737280, 0, 2), (FRAME_BYTES * 3, 0, 1), (16, 0, 256), (4096, 819200, 10), (4096, 1, 1)],
)
def test_frame_is_bounded_in_bytes_blocks_and_time(block_bytes, bandwidth, blocks):
    assert frame_blocks(block_bytes, bandwidth) == blocks
