"""Answers as a stock engine reads them: token ids go to its derender endpoint, parts come back.

An engine keeps no state between two calls: of a stream each one carries what the last one gave,
and the engine parses all tokens so far once more.  So a choice has one call under way, with what
came during the last one; a pause of some times its length follows; and an ingress has few at once.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.generation.choice import AnswerRules, StopStrings
from pdcluster_worker.server.text.events import (
    ArgumentsDelta,
    Delta,
    Part,
    ReasoningDelta,
    TextDelta,
    ToolCallBegin,
    ToolCallEnd,
)

PAUSE = 3.0
"""Pause between two calls of a choice, in lengths of the last one: a stream takes at most a quarter
of a core of the engine's server.
"""

MAX_CALLS = 4
"""Calls of one ingress under way: vLLM reads answers in one thread."""

Ask = Callable[[str, bytes], Awaitable[bytes]]
"""POST to an engine's front end: path and body to the body of a 200.  Raises RequestError, as the
engine refused it or 503.
"""

_encode = msgspec.json.Encoder().encode


class _Function(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    id: str | None = None
    index: int | None = None  # of a stream
    function: _Function = _Function()


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _ReadChoice(msgspec.Struct):
    delta: _Message | None = None
    message: _Message | None = None
    text: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_ReadChoice] = []


class _Reply(_Chunk):
    chunk: _Chunk | None = None  # of a stream
    stream_state: msgspec.Raw = msgspec.Raw(b"null")


_reply = msgspec.json.Decoder(_Reply).decode


class Unread:
    """The parser of a choice that an engine reads."""

    markers: frozenset[str] = frozenset()
    is_reasoning = False

    def feed(self, text: str) -> Sequence[Part]:
        return ()

    def end(self) -> Sequence[Part]:
        return ()


@dataclass(frozen=True, slots=True)
class Derender:
    """The endpoint of one request.  fields: of each call.  parses: of chat, with its parsers."""

    ask: Ask
    path: str
    fields: dict[str, Any]
    calls: asyncio.Semaphore
    parses: bool = True
    shows_reasoning: bool = True


class EngineChoice:
    """One choice: deltas without parts in, the same with parts out.

    streams: parts come while the answer is made; else the engine reads it whole, at its end.
    """

    def __init__(
        self, derender: Derender, prompt: Sequence[int], rules: AnswerRules, *, streams: bool
    ) -> None:
        self._derender = derender
        self._prompt = msgspec.Raw(_encode(prompt))
        self._rules = rules
        self._streams = streams
        self._state = msgspec.Raw(b"null")
        self._stops = StopStrings(rules.stop, include=rules.include_stop)
        self._pending: list[Delta] = []
        self._token_ids: list[int] = []
        self._has_more = asyncio.Event()
        self._has_ended = asyncio.Event()
        self._open_call: int | None = None
        self._has_calls = False

    def feed(self, delta: Delta) -> None:
        """Its token is in `made`; one that only ended the answer is not read."""
        (token,) = delta.made
        self._pending.append(delta if self._rules.shows_tokens else replace(delta, made=()))
        if token.finish_reason != "stop" or self._rules.include_stop:
            self._token_ids.append(token.token_id)
        if delta.finish_reason is not None:
            self._has_ended.set()
        if self._streams or delta.finish_reason is not None:
            self._has_more.set()

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Up to the one with a finish reason.  Raises RequestError."""
        while True:
            await self._has_more.wait()
            self._has_more.clear()
            (*others, last), self._pending = self._pending, []
            token_ids, self._token_ids = self._token_ids, []
            start = time.monotonic()
            message = await self._read(token_ids, last)
            seconds = time.monotonic() - start
            parts = tuple(self._parts(message, is_last=last.finish_reason is not None))
            for delta in others:
                yield delta
            end = replace(last, parts=parts, finish_reason=self._reason(last))
            yield replace(end, stop_string=self._stops.found)
            if end.finish_reason is not None:
                return
            try:
                async with asyncio.timeout(PAUSE * seconds):
                    await self._has_ended.wait()
            except TimeoutError:
                pass

    async def _read(self, token_ids: list[int], last: Delta) -> _Message:
        derender = self._derender
        is_whole = derender.parses and not self._streams
        if is_whole and not token_ids:
            return _Message()  # vLLM refuses an answer without tokens
        made = {"index": 0, "token_ids": token_ids, "finish_reason": last.finish_reason}
        body = {**derender.fields, "prompt_token_ids": self._prompt}
        if is_whole:
            # the parser looks for the prompt here, and the detokenizer there
            body["generate_response"] = {"choices": [made], "prompt_token_ids": self._prompt}
        else:
            body |= {
                "stream": True,
                "generate_chunk": {"choices": [made]},
                "stream_state": self._state,
            }
        async with derender.calls:
            answer = await self._ask(_encode(body))
        try:
            reply = _reply(answer)
            self._state = reply.stream_state
            (choice,) = reply.choices if is_whole else (reply.chunk or reply).choices
        except ValueError as e:
            raise _unread(f"what it says cannot be read: {e}") from e
        message = choice.message if is_whole else choice.delta
        return message or _Message(choice.text)

    async def _ask(self, body: bytes) -> bytes:
        try:
            return await self._derender.ask(self._derender.path, body)
        except RequestError as e:
            # the fault of a request showed when its prompt was rendered
            raise e if e.status == 503 else _unread(e.message) from e

    def _parts(self, message: _Message, *, is_last: bool) -> Iterator[Part]:
        if message.reasoning and self._derender.shows_reasoning:
            yield ReasoningDelta(message.reasoning)
        text, is_stopped = self._stops.feed(message.content or "")
        if is_last and not is_stopped:
            text += self._stops.flush()
        if text:
            yield from self._end_call()
            yield TextDelta(text)
        if not is_stopped:
            for place, call in enumerate(message.tool_calls or ()):
                yield from self._call_parts(place if call.index is None else call.index, call)
        if is_last or is_stopped:
            yield from self._end_call()

    def _call_parts(self, number: int, call: _Call) -> Iterator[Part]:
        if number != self._open_call and call.function.name:
            yield from self._end_call()
            self._open_call, self._has_calls = number, True
            yield ToolCallBegin(number, call.id or f"call_{number}", call.function.name)
        if number == self._open_call and call.function.arguments:
            yield ArgumentsDelta(number, call.function.arguments)

    def _end_call(self) -> Iterator[Part]:
        if self._open_call is not None:
            yield ToolCallEnd(self._open_call)
            self._open_call = None

    def _reason(self, last: Delta) -> Any:
        if self._stops.found is not None:
            return "stop"
        calls = self._has_calls and self._rules.ends_by_calls
        return "tool_calls" if calls and last.finish_reason == "stop" else last.finish_reason


def _unread(why: str) -> RequestError:
    return RequestError(
        f"the engine's front end could not read the answer: {why}",
        status=500,
        code="answer_not_read",
    )
