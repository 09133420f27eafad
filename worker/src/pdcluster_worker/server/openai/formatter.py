"""Answers of OpenAI's chat and completions APIs: one JSON, or events up to [DONE]."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response

from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.requests import PromptLogprob
from pdcluster_worker.server.errors import error_response, openai_error
from pdcluster_worker.server.generation.formatter import DONE, Json, Usage, event, to_json
from pdcluster_worker.server.openai.protocol import Row, TokenNames, echoed_rows, prompt_logprobs
from pdcluster_worker.server.schemas.requests import Generate
from pdcluster_worker.server.text.events import Delta, TextDelta
from pdcluster_worker.server.text.tokenizer import Detokenizer, Tokenizer

_MARK = "0"


@dataclass(slots=True)
class ResponseExtras:
    """Fields of an answer about prompts and single tokens; prompts: their tokens, n choices each.

    prompt_logprobs: most likely tokens shown at each position; None = the field is not there.
    echo:            texts of the prompts, which begin their choices' texts; none where they do not.
    echo_logprobs:   most likely tokens of the echo's positions.
    hides_output:    nothing that was generated is shown, as for max_tokens 0.
    """

    names: TokenNames
    prompts: Sequence[Sequence[int]] = ()
    n: int = 1
    has_token_ids: bool = False
    prompt_logprobs: int | None = None
    echo: Sequence[str] = ()
    echo_logprobs: int = 0
    hides_output: bool = False
    _figures: dict[int, list[PromptLogprob]] = field(default_factory=dict)

    def note(self, delta: Delta) -> None:
        if delta.made and delta.made[0].prompt_logprobs:
            self._figures[delta.index // self.n] = delta.made[0].prompt_logprobs

    def token_ids(self, deltas: Sequence[Delta]) -> list[int] | None:
        if not self.has_token_ids:
            return None
        shown = [] if self.hides_output else deltas
        return [token.token_id for delta in shown for token in delta.made]

    def prompt_token_ids(self, index: int) -> list[int] | None:
        return list(self.prompts[index // self.n]) if self.has_token_ids else None

    def of_prompt(self, index: int) -> list[Json | None] | None:
        if self.prompt_logprobs is None:
            return None
        prompt = index // self.n
        figures = self._figures.get(prompt, [])
        return prompt_logprobs(self.prompts[prompt], figures, self.prompt_logprobs, self.names)

    def text_before(self, index: int) -> str:
        return self.echo[index // self.n] if self.echo else ""

    def logprobs_before(self, index: int) -> list[Row]:
        if not self.echo:
            return []
        prompt = index // self.n
        ids, figures = self.prompts[prompt], self._figures.get(prompt, [])
        offsets = _text_offsets(ids, self.echo[prompt], self.names.tokenizer)
        return echoed_rows(ids, offsets, figures, self.echo_logprobs, self.names)


def extras_of(
    request: Generate, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], **echo: Any
) -> ResponseExtras:
    return ResponseExtras(
        TokenNames(tokenizer, as_ids=bool(request.return_tokens_as_token_ids)),
        prompts,
        request.n or 1,
        has_token_ids=bool(request.return_token_ids),
        prompt_logprobs=request.prompt_logprobs,
        **echo,
    )


def _text_offsets(token_ids: Sequence[int], text: str, tokenizer: Tokenizer) -> list[int]:
    """Place of each token in the prompt's text; control tokens beside the text take no room."""
    offsets: list[int] = []
    detokenizer = Detokenizer()
    place = 0
    for token_id in token_ids:
        offsets.append(min(place, len(text)))
        piece = detokenizer.feed(tokenizer.piece(token_id))
        if place == 0 and piece.startswith(" ") and not text.startswith(" "):
            piece = piece[1:]  # SentencePiece puts a space before a text
        if not tokenizer.is_special(token_id) or text.startswith(piece, place):
            place += len(piece)
    return offsets


def present(**fields: Any) -> Json:
    """The fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}


class OpenAIFormatter(ABC):
    """A `Formatter`.  Most tokens add text alone: the bytes around it are those of the choice's
    first such event, so no body is built again.
    """

    reply_kind: type[BaseModel]
    reply_object: str
    chunk_object: str

    def __init__(self, response_id: str, request: Generate, extras: ResponseExtras) -> None:
        options = request.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._counts = bool(self._include_usage and options and options.continuous_usage_stats)
        self._so_far: Usage | None = None  # where every chunk shows it
        self._around: dict[int, tuple[bytes, bytes]] = {}  # by the choice's index
        self.extras = extras
        self._head = {
            "id": response_id,
            "object": self.chunk_object,
            "created": int(time.time()),
            "model": request.model,
        }

    @abstractmethod
    def choice(self, deltas: Sequence[Delta], *, is_whole: bool) -> Json | None:
        """One choice of a whole answer or of an event; None where an event shows nothing."""

    def of_prompts(self, *, is_first: bool, is_whole: bool) -> Json:
        """Fields of an event, the first one of a choice, or of the answer, that are no choices."""
        return {}

    def shown_usage(self, usage: Usage) -> Usage:
        return usage

    def begin(self, usage: Usage) -> bytes:
        if self._counts:
            self._so_far = usage.with_completion(0)
        return b""

    def of(self, delta: Delta) -> bytes | None:
        if self._so_far is not None:
            self._so_far = self._so_far.with_completion(self._so_far.completion_tokens + 1)
        elif text := delta.plain_text:
            around = self._around.get(delta.index)
            if around is None:
                around = self._around[delta.index] = self._split(delta.index)
            return around[0] + to_json(text) + around[1]
        return self.event_of(delta)

    def event_of(self, delta: Delta) -> bytes | None:
        self.extras.note(delta)
        choice = self.choice([delta], is_whole=False)
        if choice is None:
            return None
        of_prompts = self.of_prompts(is_first=delta.is_first, is_whole=False)
        return self._event([choice], self._so_far, {**_lost([delta]), **of_prompts})

    def end(self, usage: Usage) -> bytes:
        last = self._event([], usage, {}) if self._include_usage else b""
        return last + DONE

    def failed(self, error: RequestError) -> bytes:
        return event(openai_error(error).model_dump())

    def whole(self, choices: list[list[Delta]], usage: Usage) -> bytes:
        for deltas in choices:
            self.extras.note(deltas[0])
        body = {
            **self._head,
            "object": self.reply_object,
            "choices": [self.choice(deltas, is_whole=True) for deltas in choices],
            "usage": self.shown_usage(usage),
            **_lost([delta for deltas in choices for delta in deltas]),
            **self.of_prompts(is_first=True, is_whole=True),
        }
        return self.reply_kind.model_validate(body).model_dump_json().encode()

    def refused(self, error: RequestError) -> Response:
        return error_response(error, openai_error(error))

    def _event(self, choices: Sequence[Json], usage: Usage | None, more: Json) -> bytes:
        body = {**self._head, "choices": choices, **more}
        if self._include_usage:
            body["usage"] = None if usage is None else self.shown_usage(usage).model_dump()
        return event(body)

    def _split(self, index: int) -> tuple[bytes, bytes]:
        body = self.event_of(Delta(index, (TextDelta(_MARK),)))
        assert body is not None, "text shows"
        # What follows the text is written by us alone, so the last mark is the text's.
        before, _, after = body.rpartition(to_json(_MARK))
        return before, after


def _lost(deltas: Sequence[Delta]) -> Json:
    """Our own part of an answer with these deltas: what each choice lost, once."""
    lost = list(dict.fromkeys(what for delta in deltas for what in delta.degraded))
    return {"pdcluster": {"degraded": lost}} if lost else {}
