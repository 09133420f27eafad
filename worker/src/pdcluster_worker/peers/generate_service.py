"""Requests of one other worker on one stream of `generate`, a task each.

A request that is cancelled, or whose stream ends, closes the handler's iterator at once; an error
ends its own request alone.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Protocol, get_args

import msgspec

from pdcluster_worker.backoff import run_until_first_ends
from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.peers import (
    CallEnd,
    CallOutput,
    CancelCall,
    Generated,
    PrefillMode,
    SubmitCall,
    decode_requests,
    decode_spec,
)
from pdcluster_worker.messages.requests import RequestSpec
from pdcluster_worker.peers.batched_writer import BatchedWriter
from pdcluster_worker.peers.calls import Context, RefusalError, failure_of, parsed, send_head
from pdcluster_worker.peers.checks import checked_request
from pdcluster_worker.tracing import trace_context

_MODES: dict[str, PrefillMode] = {mode: mode for mode in get_args(PrefillMode)}


class Generates(Protocol):
    """Its iterators may raise RequestError, and are closed when their call ends."""

    @property
    def engine_id(self) -> str:
        """Identity of this start of the engine."""
        ...

    def generate(
        self, spec: RequestSpec, prefill: PrefillMode
    ) -> AsyncGenerator[Generated, None]: ...


class GenerateService:
    def __init__(self, handler: Generates, context: Context) -> None:
        self._handler = handler
        self._context = context
        self._out = BatchedWriter(context.write, self._not_sent)
        self._running: dict[int, asyncio.Task[None]] = {}

    async def serve(self, frames: AsyncIterator[bytes]) -> None:
        """Run requests until the stream ends.  Raises RequestError for what is no request."""
        await send_head(self._context)
        try:
            await run_until_first_ends(self._read(frames), self._out.run())
        finally:
            running = list(self._running.values())
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _read(self, frames: AsyncIterator[bytes]) -> None:
        async for frame in frames:
            for item in parsed(decode_requests, frame):
                self._take(item)

    def _take(self, item: SubmitCall | CancelCall) -> None:
        if isinstance(item, CancelCall):
            if (task := self._running.get(item.call)) is not None:
                task.cancel()
        elif item.call in self._running:
            raise RequestError(f"call {item.call} is under way: give each call a number of its own")
        else:
            task = self._running[item.call] = asyncio.create_task(self._run(item))
            # not within it: one that is cancelled before it begins runs no line of it
            task.add_done_callback(lambda _: self._running.pop(item.call))

    def _not_sent(self, item: CallOutput | CallEnd, error: RequestError) -> CallEnd:
        """The call's end in place of an item that is too long."""
        if (task := self._running.get(item.call)) is not None:
            task.cancel()
        return CallEnd(item.call, failure_of(error))

    async def _run(self, submit: SubmitCall) -> None:
        failure = None
        try:
            if await self._answer(submit):
                return
        except Exception as e:
            failure = failure_of(e)
        self._out.put(CallEnd(submit.call, failure))

    async def _answer(self, submit: SubmitCall) -> bool:
        """True when the last token said that it is the last."""
        engine_id = self._handler.engine_id
        if submit.engine_id != engine_id:
            raise RefusalError(refusal_of_engine(submit.engine_id, engine_id))
        trace_context.receive(submit.context.items())
        spec, is_whole = parsed(_parse_spec, submit.spec), False
        mode = _MODES.get(submit.prefill)
        if mode is None:
            raise RequestError(f"prefill is {submit.prefill!r}: must be one of {', '.join(_MODES)}")
        async with aclosing(self._handler.generate(spec, mode)) as tokens:
            async for generated in tokens:
                is_whole = generated.token.finish_reason is not None
                self._out.put(CallOutput(submit.call, generated))
                if is_whole:  # a worker that has drained ends: not before its last word is out
                    await self._out.written()
                elif self._out.is_full:
                    await self._out.wait_until_writable()
        return is_whole


def refusal_of_engine(requested: str, local: str) -> str:
    return (
        f"the call is meant for engine {requested}, but this is engine {local}: "
        "look the worker up again"
    )


def _parse_spec(encoded: msgspec.Raw) -> RequestSpec:
    return checked_request(decode_spec(encoded))
