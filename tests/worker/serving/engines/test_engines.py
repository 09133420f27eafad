"""Several engines of one worker: the choice among them, their sums, and what one that is gone
leaves.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from msgspec.structs import replace

from pdcluster_schema.policy import PolicyConfig
from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.engine import BlockEvents, EngineStats, Submit, Tokens
from pdcluster_worker.messages.peers import Hello
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, Token, TransferTarget
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.routing.credits import CreditLedger
from pdcluster_worker.serving.backend import WorkerBackend
from pdcluster_worker.serving.engines import engines
from pdcluster_worker.serving.engines.client import (
    EngineClient,
    EngineDiedError,
    EngineStalledError,
)
from pdcluster_worker.serving.engines.engines import (
    SENT_SECONDS,
    Engine,
    Engines,
    SentPrompts,
    choose,
)
from pdcluster_worker.serving.ingress.ingress import Ingress
from pdcluster_worker.serving.peer_handler import PeerRequestHandler
from pdcluster_worker.serving.worker_context import WorkerContext
from tests.worker.fake_clock import FakeClock
from tests.worker.serving.doubles import FACTS, ScriptedEngine, dispatcher_of, stats

BLOCKS = [b"1", b"2", b"3"]
SPEC = RequestSpec("r", list(range(9)), SamplingParams(max_tokens=2, seed=1))


class Scene:
    """A worker of scripted engines."""

    def __init__(self, size: int) -> None:
        self.scripts = [ScriptedEngine() for _ in range(size)]
        self.clients = [EngineClient(script) for script in self.scripts]
        self.engines = Engines(*(self.engine(rank) for rank in range(size)))
        self.worker = WorkerContext("decode", self.engines, Metrics(), PolicyConfig())
        self.worker.state = "ready"

    def engine(self, rank: int) -> Engine:
        facts = replace(FACTS, engine_id=f"engine-{rank}", num_blocks=32 + rank)
        return Engine(self.clients[rank], facts, f"127.0.0.1:{9100 + rank}", rank)

    async def say(self, rank: int, output: EngineStats | BlockEvents) -> None:
        self.scripts[rank].say(output)
        for _ in range(5):
            await asyncio.sleep(0)

    def open(self, request_id: str, hashes: list[bytes] | None = None) -> Engine:
        return self.engines.open(request_id, lambda: hashes or []).engine


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    scene = Scene(2)
    tasks = [asyncio.create_task(client.run()) for client in scene.clients]
    yield scene
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(("free", "expected"), [(2, 1), (3, 0)])
async def test_a_prompt_goes_to_an_engine_with_room_for_it(scene, free, expected):
    await scene.say(0, stats(free_blocks=free))
    await scene.say(1, replace(stats(free_blocks=20), num_running=2))

    assert scene.engines.open("r", list, 9).engine.rank == expected


async def test_a_prompt_that_fits_nowhere_goes_to_the_least_loaded(scene):
    await scene.say(0, stats(free_blocks=1))
    await scene.say(1, replace(stats(free_blocks=2), num_running=2))

    assert scene.engines.open("r", list, 99).engine.rank == 0


async def test_a_prompt_needs_no_room_for_what_is_cached(scene):
    await scene.say(0, BlockEvents(BLOCKS[:1], [], 1))
    await scene.say(0, stats(free_blocks=2))
    await scene.say(1, stats(free_blocks=20))

    assert scene.engines.open("r", lambda: BLOCKS, 9).engine.rank == 0


@pytest.mark.parametrize(
    ("scores", "matches", "expected"),
    [
        ([8, 4, 5], [0, 0, 0], 1),
        ([5, 4], [3, 0], 0),  # one running request more costs less than the prompt
        ([8, 4], [3, 0], 0),  # and so does one that waits
        ([9, 4], [3, 0], 1),
        ([4, 4], [1, 1], 0),
    ],
)
def test_choice_is_the_least_loaded_engine_unless_another_has_the_prompt_v27(
    scores, matches, expected
):
    assert choose(scores, matches) == expected


async def test_engine_score_counts_waiting_four_times_and_what_no_report_knows_v27(scene):
    engine = scene.engines.first
    await scene.say(0, replace(stats(8), num_waiting=2, num_running=3, num_receiving=1))
    assert engine.score == 2 * 4 + 3 + 1

    place = next(
        place
        for place in (scene.engines.open(f"r{n}", list) for n in range(9))
        if place.engine is engine
    )
    assert engine.score == 3 * 4 + 3 + 1  # not sent yet
    place.send(Submit(SPEC))
    await scene.say(0, replace(stats(8, num_inputs=0), num_running=3))
    assert engine.score == 4 + 3  # the report is of before the message


async def test_engine_score_leaves_a_request_to_the_report_that_knows_it_v27(scene):
    place = scene.engines.open("r", list)
    place.send(Submit(SPEC))
    assert place.engine.score == 4
    await scene.say(place.engine.rank, replace(stats(8, num_inputs=1), num_running=1))
    assert place.engine.score == 1


async def test_engines_share_a_burst_between_two_reports_v27(scene):
    ranks = [scene.open(f"r{n}").rank for n in range(6)]

    assert sorted(ranks) == [0, 0, 0, 1, 1, 1]


async def test_engine_with_the_prompt_in_its_cache_is_chosen(scene):
    await scene.say(1, BlockEvents([b"a", b"b"], [], 1))

    assert [scene.open(f"r{n}", [b"a", b"b"]).rank for n in range(2)] == [1, 1]
    assert scene.open("r2", [b"a", b"b"]).rank == 0  # it has two that wait by now


async def test_idle_engines_take_turns_while_each_request_is_followed_by_one_with_its_prefix(scene):
    ranks = []
    for number in range(4):
        first = scene.engines.open(f"r{number}", list)
        first.close()
        prefix = [b"%d" % number]
        await scene.say(first.engine.rank, BlockEvents(prefix, [], number // 2 + 1))
        again = scene.engines.open(f"r{number}-again", lambda hashes=prefix: hashes)
        again.close()
        ranks.append((first.engine.rank, again.engine.rank))

    assert ranks == [(1, 1), (0, 0), (1, 1), (0, 0)]


async def test_engines_do_not_share_a_request_id_t8(scene):
    for _ in range(2):  # whichever engine has its turn
        scene.engines.open("r", list).close()
    scene.open("r")

    with pytest.raises(RequestError, match="already being served") as caught:
        scene.open("r")
    assert caught.value.status == 409


async def test_death_of_an_engine_fails_its_requests_and_no_others(scene):
    places = [scene.engines.open(f"r{n}", list) for n in range(2)]
    first = next(place for place in places if place.engine.rank == 0)
    other = next(place for place in places if place.engine.rank == 1)
    scene.clients[0].fail("its process ended with status -9")
    scene.engines.remove(first.engine, "its process ended with status -9")

    with pytest.raises(EngineDiedError, match="status -9") as caught:
        await first.outputs.token()
    assert (caught.value.status, caught.value.code) == (503, "engine_dead")
    scene.scripts[1].say(Tokens([Token(other.outputs.request_id, 7)]))
    assert (await other.outputs.token()).token_id == 7
    assert {scene.open(f"n{n}").rank for n in range(3)} == {1}


async def test_engine_whose_process_has_ended_is_out_of_the_choice_before_its_last_words_are_read(
    scene,
):
    scene.clients[0].has_ended = True

    assert {scene.open(f"r{n}").rank for n in range(3)} == {1}
    assert scene.engines.shortfall == "1 of 2 engines do not serve: engine 0 its process has ended"


async def test_health_of_a_worker_says_which_engine_does_not_serve(scene):
    backend = WorkerBackend("m", scene.engines)
    assert (backend.alive(), backend.shortfall()) == (None, None)

    scene.clients[0].fail("it ended")
    scene.engines.remove(scene.engines.first, "it ended")
    assert backend.alive() is None
    assert backend.shortfall() == "1 of 2 engines do not serve: engine 0 is lost: it ended"
    assert [(record.rank, record.state) for record in scene.engines.records()] == [
        (0, "lost"),
        (1, "ready"),
    ]

    scene.clients[1].fail("it ended too")
    assert backend.alive() == "the engine stopped: it ended too"
    assert backend.shortfall() is None
    with pytest.raises(EngineDiedError):
        scene.open("r")


async def test_worker_says_which_engines_serve_in_metrics_and_to_its_record(scene):
    output: list[str] = []
    scene.worker.on_engines = lambda: output.append("changed")
    scene.clients[1].stall("it has stalled")
    scene.worker.engines_changed()

    def up(rank: int) -> float:
        return scene.worker.metrics.engine_up.labels(str(rank)).collect()[0].samples[0].value

    assert ([up(0), up(1)], output) == ([1, 0], ["changed"])
    assert [(r.rank, r.engine_id, r.kv_address, r.state) for r in scene.engines.records()] == [
        (0, "engine-0", "127.0.0.1:9100", "ready"),
        (1, "engine-1", "127.0.0.1:9101", "stalled"),
    ]


async def test_kv_of_an_engine_goes_to_the_ports_of_its_ranks():
    facts = replace(FACTS, kv_ports=[9100, 9101])

    assert Engine(EngineClient(ScriptedEngine()), facts, "[fd00::1]:9100").kv_addresses == [
        "[fd00::1]:9100",
        "[fd00::1]:9101",
    ]


async def test_record_of_a_worker_with_one_engine_names_no_engines():
    assert Scene(1).engines.records() == []


async def test_worker_whose_engines_are_all_stalled_is_stalled(scene):
    scene.clients[0].stall("it has stalled")
    assert (scene.worker.load().state, scene.worker.takes_new) == ("ready", True)

    scene.clients[1].stall("it has stalled")
    assert (scene.worker.load().state, scene.worker.takes_new) == ("stalled", False)
    with pytest.raises(EngineStalledError):
        scene.open("r")


async def test_request_of_a_stalled_engine_runs_on_another_one_before_its_first_token(scene):
    """And is not handed on a second time."""
    worker = scene.worker
    async with aclosing(
        Ingress(worker, dispatcher_of(worker), list).generate([SPEC], "local")
    ) as tokens:
        first = asyncio.ensure_future(anext(tokens))
        while not any(script.inputs for script in scene.scripts):
            await asyncio.sleep(0)
        chosen = 0 if scene.scripts[0].inputs else 1
        scene.clients[chosen].stall("it has stalled")
        while not scene.scripts[1 - chosen].inputs:
            await asyncio.sleep(0)
        scene.scripts[1 - chosen].say(Tokens([Token("r~1", 5, finish_reason="length")]))
        assert (await first).token.token_id == 5


async def test_worker_load_is_that_of_all_engines(scene):
    await scene.say(
        0, replace(stats(8), num_running=1, num_waiting=2, waiting_tokens=20, num_steps=3)
    )
    await scene.say(
        1,
        replace(
            stats(4), num_running=3, num_waiting=1, waiting_tokens=10, num_steps=4, bytes_sent=100
        ),
    )

    load = scene.worker.load()
    assert (load.num_running, load.num_waiting, load.waiting_tokens) == (4, 3, 30)
    assert (load.free_blocks, load.total_blocks, load.progress) == (12, 65, 107)


async def test_drain_waits_for_what_every_engine_holds(scene):
    assert scene.worker.num_holding == 2  # neither has reported
    await scene.say(0, stats(8, num_transfers=1))
    await scene.say(1, stats(8, num_transfers=2))
    assert scene.worker.num_holding == 3

    scene.clients[1].fail("it ended")  # what a dead engine held is gone with it
    assert scene.worker.num_holding == 1


async def test_room_is_that_of_the_request_s_own_engine(scene):
    waiting = asyncio.create_task(scene.worker.wait_for_blocks(scene.engines.first, "r", 8))
    await asyncio.sleep(0)
    await scene.say(1, stats(free_blocks=9))
    assert not waiting.done()
    await scene.say(0, stats(free_blocks=9))
    await asyncio.wait_for(waiting, 5)


async def test_block_in_two_caches_is_gone_with_the_last(scene):
    output: list[tuple[list[bytes], list[bytes]]] = []
    scene.engines.on_blocks.append(lambda _, events: output.append((events.stored, events.removed)))
    await scene.say(0, BlockEvents([b"a", b"b"], [], 1))
    await scene.say(1, BlockEvents([b"a"], [], 1))
    await scene.say(0, BlockEvents([], [b"a"], 2))
    assert (output[-1], scene.engines.hashes()) == (([], []), {b"a", b"b"})

    scene.clients[0].fail("it ended")
    scene.engines.remove(scene.engines.first, "it ended")
    assert (output[-1], scene.engines.hashes()) == (([], [b"b"]), {b"a"})
    await scene.say(1, BlockEvents([], [b"a"], 2))
    assert (output[-1], scene.engines.hashes()) == (([], [b"a"]), set())


async def test_prefill_worker_hands_a_prefill_to_its_least_loaded_engine(scene):
    await scene.say(0, replace(stats(8), num_waiting=5))
    target = TransferTarget(b"e" * 16, "decode-engine", ["127.0.0.1:1"], 0, [1])
    hello = Hello("e", "prefill", FACTS.geometry, "w", "r1")
    handler = PeerRequestHandler(scene.worker, hello, CreditLedger(1), None)

    async def collect() -> int:
        return len([reply async for reply in handler.prefill("d", SPEC, target)])

    replies = asyncio.create_task(collect())
    while not scene.scripts[1].inputs:
        await asyncio.sleep(0)
    scene.scripts[1].say(Tokens([Token("r", 5, finish_reason="length")]))
    assert await replies == 1

    assert not scene.scripts[0].inputs


async def test_a_prompt_follows_one_whose_cache_events_have_yet_to_come(scene):
    first = scene.open("a", BLOCKS)

    assert scene.open("b", [*BLOCKS, b"4"]) is first
    assert scene.open("c", [b"x"]) is not first


def test_blocks_that_were_sent_count_for_their_engine_while_they_are_new() -> None:
    clock = FakeClock()
    sent = SentPrompts(clock)
    sent.add(0, BLOCKS)
    sent.add(1, BLOCKS[:1])
    clock.advance(SENT_SECONDS / 2)
    sent.add(0, BLOCKS[:1])

    assert [sent.match(rank, [*BLOCKS, b"4"]) for rank in (0, 1, 2)] == [3, 1, 0]
    assert sent.match(0, [b"x", *BLOCKS]) == 0
    clock.advance(SENT_SECONDS / 2)
    assert [sent.match(rank, BLOCKS) for rank in (0, 1)] == [1, 0]


def test_blocks_that_were_sent_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "MAX_SENT_BLOCKS", 2)
    sent = SentPrompts(FakeClock())
    sent.add(0, BLOCKS[:1])
    sent.add(0, [b"x", b"y"])

    assert (sent.match(0, BLOCKS), sent.match(0, [b"x", b"y"])) == (0, 2)


@pytest.mark.timeout(30)  # each prompt stops a worker's only thread: a minute where it is quadratic
def test_many_blocks_that_were_sent_are_forgotten_one_by_one() -> None:
    sent, size = SentPrompts(FakeClock()), 4000
    prompts = [[b"%d" % (number * size + block) for block in range(size)] for number in range(100)]
    for prompt in prompts:
        sent.add(0, prompt)

    num_kept = engines.MAX_SENT_BLOCKS // size
    matches = [sent.match(0, prompt) for prompt in prompts]
    assert matches == [0] * (len(prompts) - num_kept) + [size] * num_kept
