"""Events that are put together from bytes made once are those of the models, byte for byte."""

import sys

import pytest

from pdcluster_worker.server.openai.completions import ChatFormatter, CompletionFormatter
from pdcluster_worker.server.openai.formatter import OpenAIFormatter, ResponseExtras
from pdcluster_worker.server.openai.protocol import TokenNames
from pdcluster_worker.server.schemas.requests import ChatRequest, CompletionRequest
from pdcluster_worker.server.text.events import Delta, TextDelta
from pdcluster_worker.server.text.tokenizer import Tokenizer

EVERY_CHARACTER = "".join(chr(i) for i in range(sys.maxunicode + 1) if not 0xD800 <= i < 0xE000)
SHAPES = [
    (shape, has_logprobs, has_usage)
    for shape in (ChatFormatter, CompletionFormatter)
    for has_logprobs in (False, True)
    for has_usage in (False, True)
]


def made(kind: type[OpenAIFormatter], has_logprobs: bool, has_usage: bool) -> OpenAIFormatter:
    # A model may be named as it likes, also after the mark that the bytes are split at.
    fields = {
        "model": 'the "0" model',
        "stream": True,
        "stream_options": {"include_usage": has_usage},
    }
    extras = ResponseExtras(TokenNames(Tokenizer.__new__(Tokenizer)))
    if kind is ChatFormatter:
        messages = [{"role": "user", "content": "x"}]
        chat = ChatRequest.model_validate(fields | {"messages": messages, "logprobs": has_logprobs})
        return ChatFormatter("chatcmpl-0", chat, extras)
    logprobs = 0 if has_logprobs else None
    plain = CompletionRequest.model_validate(fields | {"prompt": "x", "logprobs": logprobs})
    return CompletionFormatter("chatcmpl-0", plain, extras)


@pytest.mark.parametrize(("kind", "has_logprobs", "has_usage"), SHAPES)
def test_an_event_is_the_models_for_every_character(kind, has_logprobs, has_usage) -> None:
    shape = made(kind, has_logprobs, has_usage)
    for index, text in ((0, "x"), (3, EVERY_CHARACTER), (0, '"0"'), (3, "\x7f\\")):
        delta = Delta(index, (TextDelta(text),))
        assert delta.plain_text == text
        assert shape.of(delta) == shape.event_of(delta)


def test_no_model_is_made_for_a_token_that_is_text_alone(monkeypatch) -> None:
    shape, requested = made(ChatFormatter, False, False), []
    make = shape.event_of
    monkeypatch.setattr(shape, "event_of", lambda delta: (requested.append(delta), make(delta))[1])
    for number in range(100):
        shape.of(Delta(number % 2, (TextDelta("word"),)))

    assert len(requested) == 2
