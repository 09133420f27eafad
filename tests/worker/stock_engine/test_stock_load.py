"""Counts of a stock engine's requests and steps."""

from pdcluster_worker.stock_engine.engine_load import StockLoad


class Clock:
    """Moves only when it is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_prefills_for_peers_count_what_they_compute_and_take() -> None:
    clock = Clock()
    load = StockLoad(clock)
    load.begun("a", 100, is_new=False)
    load.begun("b", 50, is_new=False)
    clock.now = 2.0
    load.prefilled("a", num_cached=40)
    load.ended("a")
    clock.now = 3.0
    load.prefilled("b", num_cached=0)
    load.ended("b")

    assert (load.prefill_tokens, load.prefill_seconds, load.decode_seconds) == (110, 3.0, 0.0)
    assert load.prompt_tokens == 0
    assert load.take_steps() == (
        [("prefill", 2.0), ("prefill", 1.0)],
        [(1, 60, 0, 0), (1, 50, 0, 0)],
    )


def test_a_fetched_prompt_waits_for_a_peer_and_is_not_computed_here() -> None:
    load = StockLoad(Clock())
    load.reserve("r", 4)
    load.begun("r", 100, is_fetching=True)

    assert (load.num_receiving, load.to_prefill()) == (1, [])
    load.made("r", 1, num_cached=0)
    load.ended("r")

    assert (load.prompt_tokens, load.prefill_tokens, load.generation_tokens) == (100, 0, 1)
    assert load.take_steps() == ([("decode", 0.0)], [(1, 0, 1, 0)])


def test_a_prompt_that_the_cache_has_in_part_counts_the_rest() -> None:
    load = StockLoad(Clock())
    load.begun("r", 100)
    load.made("r", 1, num_cached=96)
    load.made("r", 1)

    assert (load.prefill_tokens, load.generation_tokens) == (4, 2)
