"""[V7] with windows: what an admitted prompt has yet to take is there when its chunk comes.

Whatever others take, share or give back meanwhile.
"""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdcluster_worker.engine.block_pool import BlockPool
from pdcluster_worker.engine.block_table import BlockTables
from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.messages.engine_settings import EngineSettings
from pdcluster_worker.messages.requests import SamplingParams

CHUNK = 8


def make_tables(num_blocks, window=6):
    sizes = {"max_batched_tokens": CHUNK, "max_sequences": 9, "max_model_len": 400}
    return BlockTables(EngineSettings(4, num_blocks, **sizes, window=window), BlockPool(num_blocks))


def make_request(name, tokens):
    return EngineRequest(name, list(tokens), len(tokens), SamplingParams(max_tokens=3, seed=0))


def admit(tables, request):
    reservation = tables.reservation(request, request.num_tokens)
    if reservation.num_needed > tables.pool.num_available:
        return False
    tables.take(request, reservation)
    return True


def test_decode_cannot_grow_into_what_is_promised():
    tables = make_tables(6)
    long, short = make_request("long", range(40)), make_request("short", range(100, 104))
    assert admit(tables, long)
    assert (len(long.block_table), tables.num_promised) == (2, 2)
    assert admit(tables, short)
    assert tables.grow(short, 8)
    assert not tables.grow(short, 12)
    for _ in range(5):
        assert tables.grow(long, min(40, long.num_computed_tokens + CHUNK))
        tables.advance(long, CHUNK)
    assert tables.num_promised == 0
    assert tables.grow(short, 12)


PROMPTS = [range(40), range(24), [*range(8), *range(50, 82)], range(100, 130)]
STEPS = st.lists(
    st.tuples(st.sampled_from(["admit", "chunk", "chunk", "chunk", "end"]), st.integers(0, 5)),
    max_size=60,
)


SHARED = [("admit", 0), ("chunk", 0), ("admit", 0), ("admit", 0), ("chunk", 0), ("chunk", 1)]
"""One gives back blocks that two others share: nothing is available for that."""

WHOLE = [("admit", 1), ("chunk", 1), ("end", 0), ("admit", 1), ("admit", 0), ("chunk", 1)]
"""One that holds its whole quota gives back blocks that another shares, and has to
take two more.
"""


@example(num_blocks=8, window=2, steps=SHARED)
@example(num_blocks=7, window=6, steps=WHOLE)
@settings(max_examples=150, deadline=None)
@given(num_blocks=st.integers(5, 14), window=st.sampled_from([2, 6, 9]), steps=STEPS)
def test_no_chunk_of_an_admitted_prompt_lacks_a_block(num_blocks, window, steps):
    tables, live, num_asked = make_tables(num_blocks, window), [], 0
    for verb, number in steps:
        if verb == "admit":
            request = make_request(f"r{num_asked}", PROMPTS[number % len(PROMPTS)])
            num_asked += 1
            if admit(tables, request):
                live.append(request)
        elif live and verb == "chunk":
            request = live[number % len(live)]
            end = min(request.num_tokens, request.num_computed_tokens + CHUNK)
            assert tables.grow(request, end)
            tables.advance(request, end - request.num_computed_tokens)
        elif live:
            tables.release(live.pop(number % len(live)))
        tables.pool.check()
        assert tables.num_promised <= tables.pool.num_available
