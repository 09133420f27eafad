"""The desk between the ledger and the streams of the peers: grants to each peer, and a group when
it is due.
"""

import asyncio

from pdcluster_schema.routing import LatencyClassSpec, PrefillQueueSpec
from pdcluster_worker.peers.service import Answers, CreditServer
from pdcluster_worker.routing.batching import Grant
from pdcluster_worker.routing.credits import CreditLedger

WINDOW = PrefillQueueSpec(
    mode="throughputFirst", latency_classes=[LatencyClassSpec(priority=0, window_milliseconds=20)]
)


def told(answers: Answers) -> list[tuple[str, bool]]:
    return [answers.get_nowait() for _ in range(answers.qsize())]


def busy_desk() -> tuple[CreditServer, CreditLedger]:
    """With another peer's work in hand, so that wants wait for company."""
    ledger = CreditLedger(100, asyncio.get_running_loop().time)
    ledger.set_policy(WINDOW, 100)
    credit_server = CreditServer(ledger)
    credit_server.open("other")
    credit_server.claim("other", "runs", 10, 0)
    assert credit_server.start("other", "runs")
    return credit_server, ledger


async def test_desk_tells_each_peer_of_its_part_of_a_group_when_it_is_due() -> None:
    credit_server, _ = busy_desk()
    first, second = credit_server.open("d0"), credit_server.open("d1")
    credit_server.claim("d0", "a", 10, 0)
    credit_server.claim("d1", "b", 10, 0)

    assert (told(first), told(second)) == ([("a", False)], [("b", False)])
    async with asyncio.timeout(10):
        assert await first.get() == ("a", True)
    assert told(second) == [("b", True)]  # in the same moment


async def test_desk_tells_others_of_the_group_that_a_want_completes() -> None:
    credit_server, ledger = busy_desk()
    ledger.set_policy(
        PrefillQueueSpec(mode="throughputFirst", min_prompts=2, max_window_milliseconds=1000), 100
    )
    first, second = credit_server.open("d0"), credit_server.open("d1")
    credit_server.claim("d0", "a", 10, 0)
    credit_server.claim("d1", "b", 10, 0)

    assert (told(first), told(second)) == ([("a", False), ("a", True)], [("b", True)])


async def test_desk_forgets_a_group_whose_peer_is_gone() -> None:
    credit_server, ledger = busy_desk()
    answers = credit_server.open("d0")
    credit_server.claim("d0", "a", 10, 0)
    credit_server.close("d0", answers)

    assert (ledger.due, ledger.queued_requests) == (None, 0)
    credit_server.push([Grant("d0", "a")])  # no stream is open
    assert told(answers) == [("a", False)]
