import asyncio

from pdcluster_worker.journeys.journey import begun, note


def test_a_note_outside_of_a_journey_is_lost():
    note("decode", worker="a")


async def test_tasks_note_in_the_journey_that_they_were_started_in():
    async def run(name: str) -> list[tuple[str, dict[str, object]]]:
        with begun(name) as journey:
            note("issued")
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_decide(name))
        note("too late")
        return [(event.name, dict(event.facts)) for event in journey.events]

    first, second = await asyncio.gather(run("a"), run("b"))
    assert first == [("issued", {}), ("decide", {"worker": "a"})]
    assert second == [("issued", {}), ("decide", {"worker": "b"})]


async def _decide(worker: str) -> None:
    await asyncio.sleep(0)
    note("decide", worker=worker)
