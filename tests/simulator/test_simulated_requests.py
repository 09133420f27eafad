"""Simulated requests of a trace: the hashes of their blocks."""

from pdcluster_api.traces.requests import LoadTrace, TraceRequest
from pdcluster_simulator.requests import simulated_requests


def test_prompts_share_the_blocks_of_an_engine_that_lie_in_a_block_of_the_trace():
    rows = [TraceRequest(0.0, 40, 5, 0, ids) for ids in ((7, 1, 2), (7, 8, 9))]
    hashes = [each.hashes for each in simulated_requests(LoadTrace(rows, 16), 8)]
    assert [len(each) for each in hashes] == [5, 5]
    # Two blocks of 8 are in the first one of 16, which both share.
    assert [a == b for a, b in zip(*hashes, strict=True)] == [True, True, False, False, False]
