import asyncio

from pdcluster_worker.messages.requests import TierRead, Token
from pdcluster_worker.tracing.request_trace import add_event, begin_trace, trace_prefill


def test_a_note_outside_of_a_journey_is_lost():
    add_event("decode", worker="a")


async def test_tasks_note_in_the_journey_that_they_were_started_in():
    async def run(name: str) -> list[tuple[str, dict[str, object]]]:
        with begin_trace(name) as trace:
            add_event("issued")
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_decide(name))
        add_event("too late")
        return [(event.name, dict(event.facts)) for event in trace.events]

    first, second = await asyncio.gather(run("a"), run("b"))
    assert first == [("issued", {}), ("decide", {"worker": "a"})]
    assert second == [("issued", {}), ("decide", {"worker": "b"})]


async def _decide(worker: str) -> None:
    await asyncio.sleep(0)
    add_event("decide", worker=worker)


def test_a_read_from_a_tier_is_an_event_with_what_was_expected() -> None:
    read = TierRead("read", "host,disk", 64, 0.25, expected_seconds=0.125, compute_seconds=2.0)
    with begin_trace("a") as trace:
        trace_prefill(Token("a", 7, prefill_seconds=0.5, tier_read=read), "local")
        trace_prefill(Token("a", 7, prefill_seconds=0.5), "local")
    (event,) = [event for event in trace.events if event.name == "kv_tier"]
    assert event.facts == {
        "choice": "read",
        "tiers": "host,disk",
        "num_tokens": 64,
        "seconds": 0.25,
        "expected_seconds": 0.125,
        "compute_seconds": 2.0,
    }
