"""Parses answers of vLLM's token API; anything unexpected fails the request."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from pdcluster_worker.messages.requests import (
    FinishReason,
    PromptLogprob,
    RequestSpec,
    Token,
)

_DATA = b"data: "
_DONE = b"[DONE]"
_REFUSALS = (400, 413, 422)
_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


class StockEngineError(Exception):
    """is_refusal: because of the request's size, shape or settings."""

    def __init__(self, message: str, *, is_refusal: bool = False, param: str | None = None) -> None:
        super().__init__(message)
        self.is_refusal = is_refusal
        self.param = param


class Ranked(msgspec.Struct):
    logprob: float
    rank: int | None = None


class TopToken(Ranked, kw_only=True):
    token_id: int = -1
    token: str = ""  # "token_id:7" of vLLM before 0.32, which has no field token_id

    def __post_init__(self) -> None:
        if self.token_id < 0:
            self.token_id = int(self.token.removeprefix("token_id:"))


class Scored(TopToken):
    top_logprobs: list[TopToken] = []


class Logprobs(msgspec.Struct):
    content: list[Scored] | None = None


class ChoiceBody(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: Logprobs | None = None


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class UsageBody(msgspec.Struct):
    prompt_tokens_details: PromptDetails | None = None


class ErrorBody(msgspec.Struct):
    message: str = ""
    param: str | None = None
    code: int | str | None = None


class Place(msgspec.Struct):
    offset: int
    length: int


class ChunkBody(msgspec.Struct):
    choices: list[ChoiceBody] = []
    usage: UsageBody | None = None
    error: ErrorBody | None = None
    prompt_token_ids: list[int] | None = None  # of a stream in its first chunk, if asked for
    mm_placeholders: dict[str, list[Place]] | None = None


class WholeBody(ChunkBody):
    kv_transfer_params: dict[str, Any] | None = None
    prompt_logprobs: list[dict[int, Ranked] | None] | None = None


ChunkT = TypeVar("ChunkT", bound=ChunkBody)


class KvTransferParams(msgspec.Struct, frozen=True):
    """KV to fetch, as sent with `PrefillDone`, and the prefill engine's facts of the prompt."""

    transfer: dict[str, Any]
    cached_tokens: int = 0
    prefill_seconds: float | None = None
    prompt_logprobs: list[PromptLogprob] = []


decode_chunk = msgspec.json.Decoder(ChunkBody).decode
decode_whole = msgspec.json.Decoder(WholeBody).decode
_handle = msgspec.msgpack.Decoder(KvTransferParams).decode
encode_handle = msgspec.msgpack.Encoder().encode


def decode_handle(data: bytes) -> KvTransferParams:
    """Raises StockEngineError for a malformed handle."""
    try:
        return _handle(data)
    except (msgspec.DecodeError, RecursionError) as e:
        raise StockEngineError(f"the prefill worker's handle cannot be read: {e}") from e


class TokenStream:
    """The last token is held back until the usage.

    cached_tokens: expected; handle: of fetched KV; prompt_logprobs: for the first token.
    """

    def __init__(
        self,
        spec: RequestSpec,
        *,
        cached_tokens: int = 0,
        handle: KvTransferParams | None = None,
        prompt_logprobs: Sequence[PromptLogprob] = (),
        decode: Callable[[bytes], ChunkBody] = decode_chunk,
    ) -> None:
        self.has_ended = False
        self.num_tokens = 0
        self.cached_tokens = cached_tokens if handle is None else handle.cached_tokens
        self._is_fetched = handle is not None
        self._prefill_seconds = None if handle is None else handle.prefill_seconds
        self._prompt_logprobs = list(prompt_logprobs if handle is None else handle.prompt_logprobs)
        self._spec = spec
        self._has_images = bool(spec.images)  # whose places are to be checked
        self._decode = decode
        self._rest = b""
        self._last: Token | None = None

    def feed(self, data: bytes) -> list[Token]:
        """Raises StockEngineError."""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        tokens: list[Token] = []
        for event in events:
            if event == _DATA + _DONE:
                tokens.append(self._end())
            elif event.startswith(_DATA):
                chunk = _read(self._decode, event[len(_DATA) :])
                if chunk.choices and self._has_images:
                    _check_images(chunk, self._spec)
                    self._has_images = False
                for choice in chunk.choices:
                    tokens += self._made(choice)
                if chunk.usage is not None and not self._is_fetched:
                    self.cached_tokens = _cached_tokens(chunk)
        return tokens

    def _made(self, choice: ChoiceBody) -> list[Token]:
        token_ids = choice.token_ids or []
        scores: Sequence[Scored | None] = [None] * len(token_ids)
        if choice.logprobs is not None and choice.logprobs.content is not None:
            scores = choice.logprobs.content
        made = [self._token(*each) for each in zip(token_ids, scores, strict=True)]
        if choice.finish_reason is not None:
            reason = _REASONS.get(choice.finish_reason)
            if reason is None or not made:
                raise StockEngineError(f"the engine ended the request: {choice.finish_reason}")
            by = choice.stop_reason
            is_requested = isinstance(by, int) and by in self._spec.sampling.stop_token_ids
            self._last = msgspec.structs.replace(
                made.pop(), finish_reason=reason, stop_reason=by if is_requested else None
            )
        return made

    def _token(self, token_id: int, score: Scored | None) -> Token:
        first = self.num_tokens == 0
        self.num_tokens += 1
        num_top = self._spec.sampling.logprobs
        return Token(
            request_id=self._spec.request_id,
            token_id=token_id,
            logprob=None if score is None or num_top is None else score.logprob,
            top_logprobs=[] if score is None else _top(score, num_top or 0),
            cached_tokens=self.cached_tokens if first else 0,
            prefill_seconds=self._prefill_seconds if first else None,
            prompt_logprobs=self._prompt_logprobs if first else [],
        )

    def _end(self) -> Token:
        self.has_ended = True
        if self._last is None:
            raise StockEngineError("the engine's answer ended before its last token")
        return msgspec.structs.replace(self._last, cached_tokens=self.cached_tokens)


def read_prefill(body: bytes, spec: RequestSpec) -> KvTransferParams:
    """Raises StockEngineError."""
    whole = _read(decode_whole, body)
    if not whole.kv_transfer_params or not whole.kv_transfer_params.get("remote_block_ids"):
        message = "the engine keeps no KV for its peer: is its kv-transfer-config the one of P/D?"
        raise StockEngineError(message)
    _check_images(whole, spec)
    scores = _prompt_logprobs(whole, spec)
    return KvTransferParams(whole.kv_transfer_params, _cached_tokens(whole), prompt_logprobs=scores)


def read_prompt_logprobs(
    body: bytes, spec: RequestSpec, decode: Callable[[bytes], WholeBody] = decode_whole
) -> list[PromptLogprob]:
    """Scores of the prompt's tokens from the second on.  Raises StockEngineError."""
    whole = _read(decode, body)
    _check_images(whole, spec)
    return _prompt_logprobs(whole, spec)


def read_error(status: int, body: bytes) -> StockEngineError:
    try:
        error = decode_whole(body).error or ErrorBody()
    except msgspec.DecodeError:
        error = ErrorBody(body.decode(errors="replace")[:200])
    return _failure(error, status)


def _read(decode: Callable[[bytes], ChunkT], data: bytes) -> ChunkT:
    """Raises StockEngineError for an error or a malformed answer."""
    try:
        read = decode(data)
    except msgspec.DecodeError as e:
        raise StockEngineError(f"the engine's answer cannot be read: {e}") from e
    if read.error is not None:
        raise _failure(read.error, read.error.code)
    return read


def _failure(error: ErrorBody, code: int | str | None) -> StockEngineError:
    message = error.message or f"the engine answered {code}"
    return StockEngineError(message, is_refusal=code in _REFUSALS, param=error.param)


def _check_images(body: ChunkBody, spec: RequestSpec) -> None:
    """Refuse an answer to another prompt than the one that was rendered."""
    if not spec.images:
        return
    places = (body.mm_placeholders or {}).get("image", [])
    is_same = [(place.offset, place.length) for place in places] == [
        (image.offset, image.length) for image in spec.images
    ]
    if not is_same or body.prompt_token_ids != [*spec.prompt, *spec.output]:
        raise StockEngineError(
            "the engine puts the images of this prompt elsewhere than its chat endpoint does, so "
            "they cannot be sent apart from their text: send the request without them",
            is_refusal=True,
            param="messages",
        )


def _cached_tokens(body: ChunkBody) -> int:
    details = None if body.usage is None else body.usage.prompt_tokens_details
    return 0 if details is None else details.cached_tokens or 0


def _top(score: Scored, num_top: int) -> list[tuple[int, float]]:
    """The most likely ones; vLLM puts the sampled one first."""
    by_rank = sorted(score.top_logprobs, key=lambda one: (-one.logprob, one.rank or 0))
    return [(one.token_id, one.logprob) for one in by_rank[:num_top]]


def _prompt_logprobs(whole: WholeBody, spec: RequestSpec) -> list[PromptLogprob]:
    """Each entry has the prompt's token first, then the most likely ones."""
    num_top = spec.sampling.prompt_logprobs
    if num_top is None:
        return []
    return [_prompt_logprob(entry, num_top) for entry in whole.prompt_logprobs or [] if entry]


def _prompt_logprob(entry: dict[int, Ranked], num_top: int) -> PromptLogprob:
    own = next(iter(entry.values()))
    ranked = sorted(entry.items(), key=lambda item: -item[1].logprob)
    top = [(token_id, one.logprob) for token_id, one in ranked[:num_top]]
    return PromptLogprob(own.logprob, own.rank or 0, top)
