"""Requests of one other worker on one stream of `Generate`, run by the handler.

Each has a task; the tokens of all of them go out together.  Guarantees: a request that is called
off, or whose stream ends, closes the handler's iterator at once; an error of one request is said
under its number and touches no other.  A worker that reads nothing makes all of them wait.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Protocol, get_args

import msgspec

from pdcluster_worker.errors import RequestError
from pdcluster_worker.journeys import trace_context
from pdcluster_worker.messages.generate import Ask, CallOff, Made, Over, decode_asked, decode_spec
from pdcluster_worker.messages.peers import Generated, PrefillMode
from pdcluster_worker.messages.requests import RequestSpec
from pdcluster_worker.peers.checks import checked_request
from pdcluster_worker.peers.frames import FramesOut
from pdcluster_worker.peers.parts import run_until_first_ends
from pdcluster_worker.peers.status import Context, RefusalError, failure_of, send_head
from pdcluster_worker.proto import worker_pb2 as pb

_MODES: dict[str, PrefillMode] = {mode: mode for mode in get_args(PrefillMode)}


class Generates(Protocol):
    """Runs requests.  Its iterators may raise RequestError, and are closed when their call
    ends.
    """

    @property
    def engine_id(self) -> str:
        """Identity of this start of the engine."""
        ...

    def generate(self, spec: RequestSpec, prefill: PrefillMode) -> AsyncGenerator[Generated, None]:
        """Run a whole request here."""
        ...


class GenerateService:
    """One per stream."""

    def __init__(self, handler: Generates, context: Context) -> None:
        self._handler = handler
        self._context = context
        self._out = FramesOut(context.write, self._not_sent)
        self._running: dict[int, asyncio.Task[None]] = {}

    async def serve(self, frames: AsyncIterator[pb.Frame]) -> None:
        """Run what is asked until the stream ends.  Raises RequestError for what is no request."""
        await send_head(self._context)
        try:
            await run_until_first_ends(self._read(frames), self._out.run())
        finally:
            running = list(self._running.values())
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _read(self, frames: AsyncIterator[pb.Frame]) -> None:
        async for frame in frames:
            for item in frame.items:
                self._take(item)

    def _take(self, item: bytes) -> None:
        try:
            asked = decode_asked(item)
        except msgspec.DecodeError as e:
            raise RequestError(f"an item of a frame cannot be read: {e}") from e
        if isinstance(asked, CallOff):
            if (task := self._running.get(asked.call)) is not None:
                task.cancel()
        elif asked.call in self._running:
            raise RequestError(
                f"call {asked.call} is under way: give each call a number of its own"
            )
        else:
            task = self._running[asked.call] = asyncio.create_task(self._run(asked))
            # not within it: one that is called off before it begins runs no line of it
            task.add_done_callback(lambda _: self._running.pop(asked.call))

    def _not_sent(self, item: Made | Over, error: RequestError) -> Over:
        """The call's end, in place of an item that is too long; what follows finds no reader."""
        if (task := self._running.get(item.call)) is not None:
            task.cancel()
        return Over(item.call, failure_of(error))

    async def _run(self, ask: Ask) -> None:
        failure = None
        try:
            if await self._answer(ask):
                return
        except Exception as e:
            failure = failure_of(e)
        self._out.put(Over(ask.call, failure))

    async def _answer(self, ask: Ask) -> bool:
        """Send the tokens; True when the last one said that it is the last."""
        engine_id = self._handler.engine_id
        if ask.engine_id != engine_id:
            raise RefusalError(refusal_of_engine(ask.engine_id, engine_id))
        trace_context.receive(ask.context.items())
        spec, is_whole = _spec_of(ask.spec), False
        mode = _MODES.get(ask.prefill)
        if mode is None:
            raise RequestError(f"prefill is {ask.prefill!r}: must be one of {', '.join(_MODES)}")
        async with aclosing(self._handler.generate(spec, mode)) as tokens:
            async for generated in tokens:
                is_whole = generated.token.finish_reason is not None
                self._out.put(Made(ask.call, generated))
                if is_whole:  # a worker that has drained ends: not before its last word is out
                    await self._out.written()
                elif self._out.is_full:
                    await self._out.room()
        return is_whole


def refusal_of_engine(asked: str, here: str) -> str:
    """Words for a call that is meant for another engine."""
    return (
        f"the call is meant for engine {asked}, but this is engine {here}: look the worker up again"
    )


def _spec_of(encoded: msgspec.Raw) -> RequestSpec:
    """Read a request.  Raises RequestError 400 for values that no worker of ours would send."""
    try:
        return checked_request(decode_spec(encoded))
    except (msgspec.DecodeError, ValueError) as e:
        raise RequestError(str(e)) from e
