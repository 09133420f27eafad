"""Answers about given etcds: asked about each cluster's own keys, remembered, and told on when they change."""

import asyncio
from collections import Counter

import pytest

from pdcluster_api.apiserver.body import Key
from pdcluster_api.schema.sections import EtcdSpec
from pdcluster_operator.reconcile import discovery as room
from pdcluster_operator.reconcile.discovery import EtcdCheck, Question, first_answer_slots

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


async def until(predicate) -> None:
    async with asyncio.timeout(10):
        while not predicate():
            await asyncio.sleep(0.001)


def test_each_cluster_asks_about_its_own_keys():
    etcd = EtcdSpec.model_validate({"endpoints": ["etcd:2379"], "tlsSecret": "etcd"})
    assert Question.about(etcd, A) == Question(("etcd:2379",), "x", "etcd", "/pdcluster/x/a/workers/")
    assert Question.about(etcd, B).prefix == "/pdcluster/y/b/workers/"


def check_of(etcd: Etcd, due: list[str] | None = None, name: str = "chat") -> EtcdCheck:
    return EtcdCheck(etcd.ask, lambda: (due if due is not None else []).append(name))


async def test_the_first_answer_is_waited_for_and_then_remembered():
    etcd = Etcd()
    etcd.error = "refused"
    check = check_of(etcd)
    assert [await check.error(QUESTION) for _ in range(2)] == ["refused"] * 2
    assert etcd.num_asked == {QUESTION: 1}


async def test_a_dead_endpoint_keeps_no_reconcile_for_long(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(room, "FIRST_ANSWER_TIMEOUT_SECONDS", 0.01)
    etcd = Etcd()
    etcd.answers.clear()
    check = check_of(etcd)
    assert await check.error(QUESTION) == "etcd at etcd:2379 has not answered yet"
    check.stop()


async def test_slow_etcds_do_not_add_up_and_each_answers_when_it_can(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(room, "FIRST_ANSWER_TIMEOUT_SECONDS", 1000.0)
    etcd, due, quick = Etcd(), list[str](), Question(("quick:2379",))
    etcd.answers.clear()
    slots = first_answer_slots()
    slow = [EtcdCheck(etcd.ask, lambda: due.append("slow"), slots) for _ in range(room.MAX_WAITING)]
    waiting = [asyncio.create_task(check.error(Question((f"slow-{n}:2379",)))) for n, check in enumerate(slow)]
    await until(lambda: etcd.num_asked.total() == room.MAX_WAITING)
    check = EtcdCheck(etcd.ask, lambda: due.append("quick"), slots)
    async with asyncio.timeout(10):  # of which nothing is used: as many as may wait do so
        assert await check.error(quick) == "etcd at quick:2379 has not answered yet"
    await until(lambda: etcd.num_asked[quick] == 1)  # it is asked all the same
    assert due == []
    etcd.answers.set()
    await until(lambda: "quick" in due)
    assert [await task for task in waiting] == [None] * room.MAX_WAITING
    assert await check.error(quick) is None


async def test_a_question_that_gets_no_answer_is_given_up_and_one_that_goes_wrong_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(room, "CHECK_TIMEOUT_SECONDS", 0.01)
    etcd = Etcd()
    etcd.answers.clear()
    assert await check_of(etcd).error(QUESTION) == "etcd at etcd:2379 has not answered within 0 s"

    async def broken(question: Question) -> str | None:
        raise KeyError("unforeseen")

    check = EtcdCheck(broken, lambda: None)
    assert await check.error(QUESTION) == "etcd at etcd:2379 cannot be asked (KeyError); the operator's log says more"
    check.repeat()
    await until(lambda: caplog.text.count("etcd not asked endpoints=etcd:2379") == 2)  # it goes on


async def test_a_cluster_is_enqueued_when_the_answer_changes():
    etcd, due = Etcd(), list[str]()
    check = check_of(etcd, due)
    assert await check.error(QUESTION) is None
    due.clear()
    for number in (2, 3):
        check.repeat()
        await until(lambda number=number: etcd.num_asked[QUESTION] == number)
    assert due == []
    etcd.error = "gone"
    await until(lambda: check.repeat() or due)
    assert set(due) == {"chat"}
    assert await check.error(QUESTION) == "gone"


async def test_a_question_that_is_still_being_asked_is_not_asked_twice():
    etcd = Etcd()
    check = check_of(etcd)
    await check.error(QUESTION)
    etcd.answers.clear()
    for _ in range(3):
        check.repeat()
        await asyncio.sleep(0)
    assert etcd.num_asked[QUESTION] == 2
    check.stop()


async def test_an_old_question_is_not_asked_again():
    etcd, other = Etcd(), Question(("other:2379",))
    check = check_of(etcd)
    await check.error(QUESTION)
    await check.error(other)  # the cluster asks something else now
    check.repeat()
    await until(lambda: etcd.num_asked[other] == 2)
    check.stop()
    check.repeat()
    await asyncio.sleep(0)
    assert etcd.num_asked == {QUESTION: 1, other: 2}
