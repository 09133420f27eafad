"""Numbers of an engine's page."""

import pytest

from pdcluster_worker.stock_engine.metrics_page import read_numbers, read_ranks

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


@pytest.mark.parametrize(
    ("capacity", "blocks"),
    [
        # (blocks of a rank) / (blocks of a request of 99 tokens), and as many tokens, rounded down
        pytest.param((4096 / 7, int(4096 / 7 * 99)), 4096, id="one group"),
        pytest.param((4096 / 21, int(4096 / 21 * 99)), 1365, id="three groups"),
        pytest.param((None, None), 4096, id="not known"),
    ],
)
def test_blocks_are_those_of_a_rank_as_tokens_take_them(
    capacity: tuple[float | None, int | None], blocks: int
) -> None:
    concurrency, tokens = capacity
    given = f',kv_cache_max_concurrency="{concurrency}",kv_cache_size_tokens="{tokens}"'
    line = 'vllm:cache_config_info{engine="%d",block_size="16",num_gpu_blocks="8192"%s} 1.0'
    page = "\n".join(line % (rank, given) for rank in range(2))

    assert [each.num_blocks for each in read_ranks(page.encode(), 2)] == [blocks] * 2
