"""Events that are put together from bytes made once are those of the models, byte for byte."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_worker.server.http import sse
from pdcluster_worker.server.openai.chat import ChatShape
from pdcluster_worker.server.openai.completion import CompletionShape
from pdcluster_worker.server.openai.logprobs import TokenNames
from pdcluster_worker.server.openai.response_extras import ResponseExtras
from pdcluster_worker.server.openai.writer import EventEncoder, Shape
from pdcluster_worker.server.text.events import Delta, TextDelta
from pdcluster_worker.server.text.tokenizer import Tokenizer

EVERY_CHARACTER = "".join(chr(i) for i in range(sys.maxunicode + 1) if not 0xD800 <= i < 0xE000)
SHAPES = [
    (shape, has_logprobs, has_usage)
    for shape in (ChatShape, CompletionShape)
    for has_logprobs in (False, True)
    for has_usage in (False, True)
]


def made(
    kind: type[ChatShape] | type[CompletionShape], has_logprobs: bool, has_usage: bool
) -> Shape:
    # A model may be named as it likes, also after the mark that the bytes are split at.
    return kind(
        "chatcmpl-0",
        123,
        'the "0" model',
        ResponseExtras(TokenNames(Tokenizer.__new__(Tokenizer))),
        has_logprobs,
        has_usage,
    )


@pytest.mark.parametrize(("kind", "has_logprobs", "has_usage"), SHAPES)
def test_an_event_is_the_models_for_every_character(kind, has_logprobs, has_usage) -> None:
    shape = made(kind, has_logprobs, has_usage)
    events = EventEncoder(shape.chunk)
    for index, text in ((0, "x"), (3, EVERY_CHARACTER), (0, '"0"'), (3, "\x7f\\")):
        delta = Delta(index, (TextDelta(text),))
        assert delta.plain_text == text
        assert events.of(delta) == sse.event(shape.chunk(delta))


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.text(max_size=5),
            st.booleans(),
            st.sampled_from([None, "stop", "length"]),
        )
    )
)
def test_events_of_an_answer_are_the_models_one_by_one(deltas) -> None:
    shape = made(ChatShape, False, True)
    events = EventEncoder(shape.chunk)
    for index, text, is_first, reason in deltas:
        delta = Delta(index, (TextDelta(text),) if text else (), (), is_first, reason)
        body = shape.chunk(delta)
        assert events.of(delta) == (None if body is None else sse.event(body))


def test_no_model_is_made_for_a_token_that_is_text_alone() -> None:
    shape, requested = made(ChatShape, False, False), []

    def counted(delta: Delta) -> object:
        requested.append(delta)
        return shape.chunk(delta)

    events = EventEncoder(counted)
    for number in range(100):
        events.of(Delta(number % 2, (TextDelta("word"),)))

    assert len(requested) == 2
