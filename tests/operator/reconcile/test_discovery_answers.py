"""Answers about given etcds: asked about each cluster's own keys, remembered, and told on when they change."""

import asyncio
import contextlib
from collections import Counter

import pytest

from pdcluster_operator.api.sections import EtcdSpec
from pdcluster_operator.cluster.cache import Key
from pdcluster_operator.reconcile import discovery as room
from pdcluster_operator.reconcile.discovery import Discovery, Question

A, B = Key("x", "a"), Key("y", "b")
QUESTION = Question(("etcd:2379",))


class Etcd:
    """Answers as it is told, and counts."""

    def __init__(self) -> None:
        self.error: str | None = None
        self.num_asked = Counter[Question]()
        self.answers = asyncio.Event()
        self.answers.set()

    async def ask(self, question: Question) -> str | None:
        self.num_asked[question] += 1
        await self.answers.wait()
        return self.error


@contextlib.asynccontextmanager
async def asking(discovery: Discovery):
    task = asyncio.create_task(discovery.run())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def until(predicate) -> None:
    async with asyncio.timeout(10):
        while not predicate():
            await asyncio.sleep(0.001)


def test_each_cluster_asks_about_its_own_keys():
    etcd = EtcdSpec.model_validate({"endpoints": ["etcd:2379"], "tlsSecret": "etcd"})
    assert Question.about(etcd, A) == Question(("etcd:2379",), "x", "etcd", "/pdcluster/x/a/workers/")
    assert Question.about(etcd, B).prefix == "/pdcluster/y/b/workers/"


async def test_the_first_answer_is_waited_for_and_then_remembered():
    etcd = Etcd()
    etcd.error = "refused"
    discovery = Discovery(etcd.ask, lambda key: None)
    assert [await discovery.error(key, QUESTION) for key in (A, A, B)] == ["refused"] * 3
    assert etcd.num_asked == {QUESTION: 1}


async def test_a_dead_endpoint_keeps_no_reconcile_for_long(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(room, "FIRST_ANSWER_TIMEOUT_SECONDS", 0.01)
    etcd = Etcd()
    etcd.answers.clear()
    error = await Discovery(etcd.ask, lambda key: None).error(A, QUESTION)
    assert error == "etcd at etcd:2379 has not answered yet"


async def test_slow_etcds_do_not_add_up_and_each_answers_when_it_can(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(room, "FIRST_ANSWER_TIMEOUT_SECONDS", 1000.0)
    etcd, due, other = Etcd(), set[Key](), Question(("quick:2379",))
    etcd.answers.clear()
    discovery = Discovery(etcd.ask, due.add)
    waiting = [asyncio.create_task(discovery.error(Key("x", str(n)), Question((f"slow-{n}:2379",)))) for n in range(room.MAX_WAITING)]
    await until(lambda: etcd.num_asked.total() == room.MAX_WAITING)
    async with asyncio.timeout(10):  # of which nothing is used: as many as may wait do so
        assert await discovery.error(A, other) == "etcd at quick:2379 has not answered yet"
    await until(lambda: etcd.num_asked[other] == 1)  # it is asked all the same
    assert due == set()
    etcd.answers.set()
    await until(lambda: A in due)
    assert [await task for task in waiting] == [None] * room.MAX_WAITING
    assert await discovery.error(A, other) is None


async def test_a_question_that_gets_no_answer_is_given_up_and_one_that_goes_wrong_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(room, "CHECK_TIMEOUT_SECONDS", 0.01)
    etcd = Etcd()
    etcd.answers.clear()
    assert await Discovery(etcd.ask, lambda key: None).error(A, QUESTION) == "etcd at etcd:2379 has not answered within 0 s"

    async def broken(question: Question) -> str | None:
        raise KeyError("unforeseen")

    discovery = Discovery(broken, lambda key: None)
    monkeypatch.setattr(room, "CHECK_PERIOD_SECONDS", 0.001)
    async with asking(discovery):
        assert await discovery.error(A, QUESTION) == "etcd at etcd:2379 cannot be asked (KeyError); the operator's log says more"
        await until(lambda: caplog.text.count("etcd not asked endpoints=etcd:2379") >= 2)  # it goes on


async def test_every_cluster_that_asked_is_due_when_the_answer_changes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(room, "CHECK_PERIOD_SECONDS", 0.001)
    etcd, due = Etcd(), set[Key]()
    discovery = Discovery(etcd.ask, due.add)
    for key in (A, B):
        assert await discovery.error(key, QUESTION) is None
    due.clear()
    async with asking(discovery):
        await until(lambda: etcd.num_asked[QUESTION] >= 3)
        assert due == set()
        etcd.error = "gone"
        await until(lambda: due == {A, B})
        assert await discovery.error(A, QUESTION) == "gone"


async def test_nobodys_question_is_not_asked_any_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(room, "CHECK_PERIOD_SECONDS", 0.001)
    etcd, other = Etcd(), Question(("other:2379",))
    discovery = Discovery(etcd.ask, lambda key: None)
    await discovery.error(A, QUESTION)
    await discovery.error(A, other)  # the cluster asks something else now
    async with asking(discovery):
        await until(lambda: etcd.num_asked[other] >= 3)
        discovery.forget(A)
        await asyncio.sleep(0)
    assert etcd.num_asked[QUESTION] == 1
