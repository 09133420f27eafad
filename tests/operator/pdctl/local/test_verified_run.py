"""Verifications of a run of `pdctl up`: which worker is asked, what is kept in the run's folder."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pdcluster_api.discovery.verifier import NoOutcome, VerificationRequest, Verifier
from pdcluster_api.plan.observed.state import PairVerification
from pdctl.local.run_directory import RunDirectory
from pdctl.local.verification import RunTransfers, pairs_of
from tests.operator.pdctl.run_state import run_state
from tests.operator.played_worker import PASSED, PlayedWorker

POSTPONED = {"outcome": "postponed", "message": "decode-0 has other requests"}
DAMAGED = {"outcome": "failed", "fault": "damaged", "message": "checksums differ"}


@dataclass
class Rig:
    """A run, its worker, and a clock that only the test moves."""

    run: RunDirectory
    worker: PlayedWorker
    transfers: RunTransfers
    now: list[datetime]

    async def condition(self, request: str = "") -> tuple[str, str]:
        found = (await self.transfers.verify_due(request)).condition
        assert found is not None
        return found.status, found.reason

    def set_state(self, **changes: Any) -> None:
        self.run.write_state((self.run.read_state() or {}) | changes)


@asynccontextmanager
async def rig(folder: Path, *answers: dict[str, Any]) -> AsyncIterator[Rig]:
    worker, now = PlayedWorker(list(answers)), [datetime(2026, 1, 2, tzinfo=UTC)]
    async with worker.serving():
        run, verifier = run_state(folder, worker), Verifier(lambda: now[0])
        yield Rig(run, worker, RunTransfers(run, verifier, lambda: now[0]), now)


async def test_worker_of_a_run_is_verified_once_an_hour(tmp_path: Path) -> None:
    async with rig(tmp_path, PASSED) as played:
        assert await played.condition() == ("True", "KVMoved")
        assert await played.condition() == ("True", "KVMoved")
        assert played.worker.requested == [
            {"pod": "decode-0", "prefill_pool": "cpu", "even_if_busy": False}
        ]

        played.now[0] += timedelta(hours=1)
        await played.condition()
        assert len(played.worker.requested) == 2
        kept = json.loads((played.run.path / "transfers.json").read_text())
        assert [pair["at"] for pair in kept["transfers"]["pairs"]] == ["2026-01-02T01:00:00Z"]


async def test_busy_worker_is_tried_at_the_next_look_and_in_spite_of_it_by_request(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, POSTPONED, POSTPONED, PASSED) as played:
        assert await played.condition() == ("Unknown", "NotVerified")
        condition = (await played.transfers.verify_due()).condition
        assert condition is not None
        assert condition.message.endswith("decode-0 has other requests")
        assert await played.condition("now") == ("True", "KVMoved")
        assert played.worker.requested[-1]["even_if_busy"] is True


async def test_next_worker_of_the_pool_is_tried_where_one_is_busy(tmp_path: Path) -> None:
    async with rig(tmp_path, POSTPONED, PASSED) as played:
        state = played.run.read_state() or {}
        other = next(each for each in state["workers"] if each["role"] == "decode")
        played.set_state(workers=[*state["workers"], {**other, "name": "decode-1"}])

        assert await played.condition() == ("True", "KVMoved")
        assert len(played.worker.requested) == 2


async def test_floor_counts_without_another_verification(tmp_path: Path) -> None:
    async with rig(tmp_path, PASSED) as played:
        await played.condition()
        played.set_state(minTransferGBps=1.0)

        assert await played.condition() == ("False", "TransferSlow")


async def test_outcome_that_another_pdctl_wrote_meanwhile_is_kept(tmp_path: Path) -> None:
    async with rig(tmp_path, PASSED) as played:

        class Overtaken(Verifier):
            async def verify(self, question: VerificationRequest) -> PairVerification | NoOutcome:
                await played.transfers.verify_due("now")
                return NoOutcome("it is verified for another", is_busy=True)

        slow = RunTransfers(played.run, Overtaken(), lambda: played.now[0])
        condition = (await slow.verify_due()).condition

        assert condition is not None
        assert condition.status == "True"
        assert played.run.read_transfers()["transfers"]["pairs"][0]["request"] == "now"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {("cpu", "cpu"): ("decode-0",)}),
        ({"prefill": "starting"}, {("cpu", "cpu"): ()}),
        ({"decode": "draining"}, {("cpu", "cpu"): ()}),
    ],
)
def test_pairs_have_the_ready_decode_workers(
    changes: dict[str, str], expected: dict[tuple[str, str], tuple[str, ...]], tmp_path: Path
) -> None:
    state = run_state(tmp_path).read_state() or {}
    for worker in state["workers"]:
        worker["state"] = changes.get(worker["role"], worker["state"])

    workers = pairs_of(state).workers
    assert {(pair.prefill, pair.decode): names for pair, names in workers.items()} == expected


async def test_mixed_workers_and_a_run_that_has_begun_only_now_have_nothing_to_verify(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, PASSED) as played:
        played.set_state(workers=[])
        assert (await played.transfers.verify_due()).condition is None
        (played.run.path / "state.json").unlink()
        assert (await played.transfers.verify_due()).condition is None
        assert played.run.read_transfers() == {}


async def test_certificate_that_cannot_be_read_is_the_reason(tmp_path: Path) -> None:
    async with rig(tmp_path, PASSED) as played:
        played.set_state(certificates={"ca": str(tmp_path / "gone")})
        condition = (await played.transfers.verify_due()).condition

        assert condition is not None
        assert "the certificate of the run cannot be read" in condition.message


async def test_watch_says_when_kv_does_not_move_and_when_it_does_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdctl.local.verification.POLL_SECONDS", 0.0)
    said: asyncio.Queue[str] = asyncio.Queue()
    async with rig(tmp_path, DAMAGED, PASSED) as played:
        watching = asyncio.create_task(played.transfers.watch(said.put_nowait))
        try:
            async with asyncio.timeout(20):
                first = await said.get()
                played.now[0] += timedelta(hours=1)
                second = await said.get()
        finally:
            watching.cancel()
    assert first.startswith("KVTransferVerified is False (BlocksDamaged): ")
    assert second.startswith("KVTransferVerified is True (KVMoved): ")


async def test_watch_goes_on_where_its_results_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdctl.local.verification.POLL_SECONDS", 0.0)
    said: asyncio.Queue[str] = asyncio.Queue()
    async with rig(tmp_path, PASSED) as played:
        in_the_way = played.run.path / "transfers.json"
        in_the_way.mkdir()
        watching = asyncio.create_task(played.transfers.watch(said.put_nowait))
        try:
            async with asyncio.timeout(20):
                first = await said.get()
                in_the_way.rmdir()
                second = await said.get()
        finally:
            watching.cancel()
    assert first.startswith("cannot write verified transfers: ")
    assert str(in_the_way) in first
    assert second.startswith("KVTransferVerified is True (KVMoved): ")
