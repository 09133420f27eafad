"""A follower goes by a request's output, looks along guessed tokens, and comes back."""

import json

import numpy as np
import pytest

from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.messages.requests import Constraint, SamplingParams
from pdcluster_worker.structured_output import compiler
from pdcluster_worker.structured_output import matcher as matcher_module
from pdcluster_worker.structured_output.compiler import ConstraintCompiler
from pdcluster_worker.structured_output.matcher import Matcher, OutsideError, SlowError
from tests.worker.structured_output.conftest import END, TOKENS, VOCAB_SIZE
from tests.worker.structured_output.schemas import goes_on

FORM = Constraint("regex", "a(b|c)d*")


def request_of(output, constraint=FORM):
    return EngineRequest(
        "a", [9, 9, *output], 2, SamplingParams(max_tokens=99, seed=0, constraint=constraint)
    )


def feed(follower, output, constraint=FORM):
    follower.feed(follower.new_tokens(request_of(output, constraint)))


def allowed(follower, guessed=()):
    words = np.empty(-(-VOCAB_SIZE // 32), dtype=np.int32)
    if not follower.fill(words, guessed):
        return None
    bits = np.unpackbits(words.view(np.uint8), count=VOCAB_SIZE, bitorder="little")
    return (
        sorted(chr(token) if token < END else token for token in np.flatnonzero(bits).tolist())
        if END not in np.flatnonzero(bits)
        else "d end"
    )


def test_the_tokens_that_may_come_next_follow_the_output(follow):
    follower = follow(FORM)
    assert allowed(follower) == ["a"]
    feed(follower, b"a")
    assert allowed(follower) == ["b", "c"]
    feed(follower, b"ab")
    assert allowed(follower) == "d end"
    feed(follower, b"abdd")  # several at once, as after a move
    assert allowed(follower) == "d end"
    feed(follower, [*b"abdd", END])
    assert allowed(follower) is None  # what comes after the end counts for nothing


def test_guessed_tokens_are_looked_along_and_taken_back(follow):
    follower = follow(FORM)
    feed(follower, b"a")

    assert allowed(follower, b"b") == "d end"
    assert allowed(follower, b"bd") == "d end"
    assert allowed(follower, b"x") is None
    assert allowed(follower, [ord("b"), END]) is None
    assert allowed(follower, [ord("b"), END, ord("b")]) is None
    assert allowed(follower) == ["b", "c"]


def test_another_output_is_followed_from_its_beginning(follow):
    follower = follow(FORM)
    feed(follower, b"abd")
    feed(follower, b"ac")  # shorter: of another run of the request
    assert allowed(follower) == "d end"
    feed(follower, [])
    assert allowed(follower) == ["a"]


def test_output_that_the_grammar_does_not_have_is_an_error(follow):
    with pytest.raises(OutsideError, match="token 120 at place 1 of the output"):
        feed(follow(FORM), b"ax")


def test_any_tokens_do_not_end_an_answer_before_its_form_does(follow):
    elements = [
        {"type": "any_tokens", "max_tokens": 2, "exclude_tokens": [257, 258, 259]},
        {"type": "const_string", "value": "z"},
    ]
    form = {"format": {"type": "sequence", "elements": elements}}
    follower = follow(Constraint("structural_tag", json.dumps(form)))

    assert allowed(follower) != "d end"
    follower.feed(b"abz")
    assert allowed(follower) == "d end"


def test_many_optional_properties_may_come_next(follow):
    schema = {"type": "object", "properties": {f"p{n}": {} for n in range(1500)}}
    follower = follow(Constraint("json_schema", json.dumps(schema)))

    follower.feed(b'{"p1499')
    assert allowed(follower) == ['"']


def test_a_choice_may_have_any_character(follow):
    text = 'a\x00\x7f\x85\u2028\U0001f600"/\\'
    follower = follow(Constraint("choice", json.dumps([text])))

    assert goes_on(follower, text.encode())


def test_a_string_may_be_as_long_as_a_bound_that_is_enforced(follow):
    schema = {"type": "string", "maxLength": 10_000}
    follower = follow(Constraint("json_schema", json.dumps(schema)))
    words = np.empty(-(-VOCAB_SIZE // 32), dtype=np.int32)

    for byte in b'"' + 10_000 * b"a":
        assert follower.fill(words)
        follower.feed([byte])
    assert allowed(follower) == ['"']


@pytest.fixture
def spent(monkeypatch):
    """Two matchers of one form, of which the first has used its lexer up."""
    monkeypatch.setattr(compiler, "MAX_LEXER_STATES", 2000)
    schema = Constraint("json_schema", json.dumps({"type": "string", "maxLength": 9000}))
    form = ConstraintCompiler(TOKENS).compile(schema)
    first, second = Matcher(form, [END]), Matcher(form, [END])
    for matcher in (first, second):
        assert allowed(matcher) == ['"']
        matcher.feed(b'"')
    while not form.is_spent.is_set():
        go_on(first, b"a")
    return first, second


def go_on(matcher, text):
    for byte in text:
        matcher.feed([byte])
        assert allowed(matcher) is not None


@pytest.mark.parametrize("drafts", [b"", b"a", b'a"'])
@pytest.mark.parametrize("num_fed", [1, 300])
def test_a_request_goes_on_with_a_lexer_of_its_own_once_another_has_used_that_of_its_form_up(
    spent, drafts, num_fed
):
    first, second = spent
    shared = second.form
    second.feed(num_fed * b"a")

    assert allowed(second, drafts) == ("d end" if b'"' in drafts else allowed(first))
    assert allowed(second) == allowed(first)
    assert second.form not in (shared, first.form)
    second.spend(0.3, 0.3)  # of which most was to catch up
    with pytest.raises(SlowError, match="takes too long"):
        second.spend(0.3, 0.3)
    feed(second, b'"b')  # of another run
    assert allowed(second) == allowed(first)
    with pytest.raises(OutsideError):
        second.feed(b"\n")


def test_a_request_that_uses_up_a_lexer_of_its_own_fails(spent):
    first, second = spent
    allowed(second)

    with pytest.raises(SlowError, match="too many states"):
        go_on(first, 2000 * b"a")
    go_on(second, b"a")


def test_a_form_that_is_slow_to_compile_is_not_compiled_in_a_step(spent, monkeypatch):
    monkeypatch.setattr(matcher_module, "MAX_RENEWAL_SECONDS", 0)

    with pytest.raises(SlowError, match="too many states"):
        go_on(spent[1], b"ab")
