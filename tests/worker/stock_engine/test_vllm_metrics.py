"""Numbers of an engine's page."""

import pytest

from pdcluster_worker.stock_engine.metrics_page import read_numbers

NAME = b"vllm:num_requests_kv_fetch_by_stage"


@pytest.mark.parametrize("labels", [b"", b"{}", b'{engine="0"}', b'{stage="another"}'])
def test_fetches_of_no_known_stage_are_ignored(labels: bytes) -> None:
    known = NAME + b'{engine="0",stage="waiting_to_start"} 2.0\n'

    assert read_numbers(NAME + labels + b" 7.0\n" + known).fetches_to_start == 2


def test_an_empty_page_is_all_zeros() -> None:
    assert read_numbers(b"").num_blocks == 0


@pytest.mark.parametrize(("said", "keeps"), [(b"True", True), (b"False", False), (b"None", False)])
def test_engine_keeps_prefixes_where_it_says_so(said: bytes, keeps: bool) -> None:
    page = b'vllm:cache_config_info{enable_prefix_caching="' + said + b'",block_size="4"} 1.0\n'

    assert read_numbers(page).prefix_caching is keeps
