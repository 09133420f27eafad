"""Numbers of an engine's page."""

import pytest

from pdcluster_worker.stock.numbers import read_numbers

NAME = b"vllm:num_requests_kv_fetch_by_stage"


@pytest.mark.parametrize("labels", [b"", b"{}", b'{engine="0"}', b'{stage="another"}'])
def test_fetches_of_no_known_stage_are_ignored(labels: bytes) -> None:
    known = NAME + b'{engine="0",stage="waiting_to_start"} 2.0\n'

    assert read_numbers(NAME + labels + b" 7.0\n" + known).fetches_to_start == 2


def test_an_empty_page_is_all_zeros() -> None:
    assert read_numbers(b"").num_blocks == 0
