"""Verification of the KV transfers of one run, with the run's folder as its status."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

from pdcluster_api.discovery.verifier import (
    ClientCertificate,
    NoOutcome,
    Verifier,
    verification_requests,
)
from pdcluster_api.plan.observed.pools import PREFILL
from pdcluster_api.plan.observed.state import PairVerification, Previous
from pdcluster_api.plan.result import DueVerification
from pdcluster_api.plan.status.transfers import (
    MAX_PAIRS,
    Pairs,
    Transfers,
    VerificationSettings,
    transfers,
)
from pdcluster_schema.workload import PoolPair
from pdctl.local.run_directory import RunDirectory

POLL_SECONDS = 60.0
"""Between two looks of `pdctl up` at what is due; a pair that is busy waits for the next one."""

State = Mapping[str, Any]


@dataclass(frozen=True)
class RunTransfers:
    """now: wall-clock time in UTC."""

    run: RunDirectory
    verifier: Verifier
    now: Callable[[], datetime] = lambda: datetime.now(UTC)

    async def verify_due(self, request: str = "") -> Transfers:
        """Verify what is due, one pair after the other; write and return the results.

        request: a new value makes every pair due, busy or not
        """
        state = self.run.read_state()
        if state is None or not has_prefill(state):
            return Transfers()
        pairs, floor = pairs_of(state), state.get("minTransferGBps")
        ended, waits = {}, {}
        for due in self._found(pairs, {}, {}, self._settings(floor, request)).due:
            outcome = await self._verify(due, state)
            if isinstance(outcome, PairVerification):
                ended[due.pair] = outcome
            else:
                waits[due.pair] = outcome.reason
        # read again: another pdctl may have written what it has verified since
        found = self._found(pairs, ended, waits, self._settings(floor, request))
        self.run.write_transfers(content_of(found))
        return found

    async def watch(self, echo: Callable[[str], None]) -> None:
        """Verify periodically until cancelled.  echo: called when transfers fail, or work again, or
        their results cannot be written.
        """
        last = "True"
        while True:
            now, text = await self._outcome()
            if now not in ("Unknown", last):
                last = now
                echo(text)
            await asyncio.sleep(POLL_SECONDS)

    async def _outcome(self) -> tuple[str, str]:
        """Status of the condition, or why it could not be written; and that in words."""
        try:
            condition = (await self.verify_due()).condition
        except OSError as e:
            return str(e), f"cannot write verified transfers: {e}; free some space"
        if condition is None:
            return "Unknown", ""
        reason = f"({condition.reason}): {condition.message}"
        return condition.status, f"{condition.type} is {condition.status} {reason}"

    def _found(
        self,
        pairs: Pairs,
        ended: Mapping[PoolPair, PairVerification],
        waits: Mapping[PoolPair, str],
        settings: VerificationSettings,
    ) -> Transfers:
        return transfers(pairs, Previous(self.run.read_transfers()), ended, waits, settings)

    def _settings(self, floor: float | None, request: str) -> VerificationSettings:
        return VerificationSettings(floor, request, self.now().strftime("%Y-%m-%dT%H:%M:%SZ"))

    async def _verify(self, due: DueVerification, state: State) -> PairVerification | NoOutcome:
        addresses = {worker["name"]: str(worker["grpc"]) for worker in state["workers"]}
        files = state["certificates"]
        try:
            certificate = ClientCertificate(
                *(Path(files[name]).read_bytes() for name in ("ca", "certificate", "key"))
            )
        except OSError as e:
            return NoOutcome(f"the certificate of the run cannot be read: {e.strerror}")
        return await self.verifier.verify_any(verification_requests(due, addresses, certificate))


async def watch_transfers(
    run: RunDirectory, ready: asyncio.Event, echo: Callable[[str], None]
) -> None:
    await ready.wait()
    await RunTransfers(run, Verifier()).watch(echo)


def has_prefill(state: State) -> bool:
    return any(worker["role"] == PREFILL for worker in state["workers"])


def pairs_of(state: State) -> Pairs:
    """Pairs of pools, with the ready decode workers of each."""
    ready: dict[tuple[str, str], list[str]] = {}
    for worker in state["workers"]:
        names = ready.setdefault((worker["role"], worker["pool"]), [])
        if worker["state"] == "ready" and worker["grpc"]:
            names.append(worker["name"])
    sources = {pool: names for (role, pool), names in sorted(ready.items()) if role == PREFILL}
    sinks = {pool: names for (role, pool), names in sorted(ready.items()) if role == "decode"}
    found = {
        PoolPair(source, sink): tuple(sinks[sink]) if sources[source] else ()
        for source in sources
        for sink in sinks
    }
    return Pairs(str(state["revision"]), dict(list(found.items())[:MAX_PAIRS]))


def content_of(found: Transfers) -> dict[str, Any]:
    """As in a PDCluster's status."""
    condition = found.condition
    if condition is None:
        return {}
    shown = {
        "type": condition.type,
        "status": condition.status,
        "reason": condition.reason,
        "message": condition.message,
    }
    return {**found.fields, "conditions": [shown]}


_SECONDS = 10.0


async def watch_remarks(
    run: RunDirectory, ready: asyncio.Event, echo: Callable[[str], None]
) -> None:
    await ready.wait()
    state = run.read_state() or {"workers": ()}
    addresses = {worker["name"]: worker["http"] for worker in state["workers"] if worker["http"]}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_SECONDS)) as session:
        found = await asyncio.gather(*(_version(session, each) for each in addresses.values()))
    remarks = remarks_of(dict(zip(addresses, found, strict=True)))
    run.write_remarks(remarks)
    for remark in remarks:
        echo(remark)


async def _version(session: aiohttp.ClientSession, address: str) -> Mapping[str, Any]:
    """Empty where the worker gives none."""
    try:
        async with session.get(f"http://{address}/version") as response:
            body = json.loads(await response.read())
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}


def remarks_of(versions: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each remark, with its workers.

    >>> slow = {"device": {"model_code": "transformers"}}
    >>> remarks_of({"a": slow, "b": slow, "c": {"max_model_len": 9, "note": "no room"}})[0]
    "a, b: the model runs by transformers' code, which is slower than the engine's own"
    """
    makers: dict[str, list[str]] = {}
    for name, version in versions.items():
        for remark in _remarks(version):
            makers.setdefault(remark, []).append(name)
    return [f"{', '.join(names)}: {remark}" for remark, names in makers.items()]


def _remarks(version: Mapping[str, Any]) -> Iterator[str]:
    device = version.get("device") or {}
    if device.get("model_code") == "transformers":
        yield "the model runs by transformers' code, which is slower than the engine's own"
    if device.get("note"):
        yield str(device["note"])
    if version.get("note"):
        yield f"at most {version.get('max_model_len')} tokens a request: {version['note']}"
