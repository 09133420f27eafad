"""The offload decision at its edges: the vectors of [O2], and policies with other numbers."""

import doctest

import pytest

from pdcluster_worker.routing import offload
from pdcluster_worker.routing.offload import should_offload
from pdcluster_worker.routing_config import OffloadPolicy


@pytest.mark.parametrize(
    ("prompt_tokens", "cached_tokens", "prefill_queue", "decode_active", "expected"),
    [
        pytest.param(255, 0, 0, 0, False, id="one short of the threshold"),
        pytest.param(256, 0, 0, 0, True, id="at the threshold"),
        pytest.param(256, 0, 9, 0, True, id="queue has one place left"),
        pytest.param(256, 0, 10, 0, False, id="queue is full"),
        pytest.param(256, 0, 10, 7, False, id="queue is full and decode not busy yet"),
        pytest.param(256, 0, 10, 8, True, id="a busy decode worker ignores the queue"),
        pytest.param(64, 0, 0, 8, True, id="busy, at the shorter threshold"),
        pytest.param(63, 0, 0, 8, False, id="busy, one short of it"),
        pytest.param(64, 0, 0, 7, False, id="short and not busy"),
        pytest.param(1000, 1000, 0, 100, False, id="fully cached"),
        pytest.param(1000, 1008, 0, 100, False, id="cached beyond the prompt"),
        pytest.param(1000, 745, 0, 0, False, id="255 uncached"),
        pytest.param(1000, 744, 0, 0, True, id="256 uncached"),
    ],
)
def test_offload_default_policy_vectors(
    prompt_tokens: int, cached_tokens: int, prefill_queue: int, decode_active: int, expected: bool
) -> None:
    actual = should_offload(
        OffloadPolicy(),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        prefill_queue=prefill_queue,
        decode_active=decode_active,
    )

    assert expected == actual


def test_offload_takes_its_numbers_from_the_policy() -> None:
    policy = OffloadPolicy(prefill_length_threshold=32, prefill_queue_max=2, decode_load_threshold=1, min_offload_length=4)

    def decide(prompt_tokens: int, prefill_queue: int, decode_active: int) -> bool:
        return should_offload(
            policy, prompt_tokens=prompt_tokens, cached_tokens=0, prefill_queue=prefill_queue, decode_active=decode_active
        )

    assert [decide(32, 1, 0), decide(31, 1, 0), decide(32, 2, 0)] == [True, False, False]
    assert [decide(4, 2, 1), decide(3, 2, 1)] == [True, False]


def test_offload_docstring_numbers_are_true() -> None:
    result = doctest.testmod(offload)

    assert result.attempted > 0
    assert result.failed == 0
