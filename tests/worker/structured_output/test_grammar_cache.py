"""Grammars are compiled once each in a thread, in bounded memory, one API key after another."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, decoders, models

from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.messages.requests import Constraint, SamplingParams
from pdcluster_worker.structured_output import compiler, grammar_cache
from pdcluster_worker.structured_output.compiler import BYTES_PER_CHARACTER
from pdcluster_worker.structured_output.grammar_cache import GrammarCache, read_vocabulary
from pdcluster_worker.structured_output.lark import FormError
from pdcluster_worker.structured_output.matcher import Matcher
from tests.worker.structured_output.schemas import goes_on

VOCAB_SIZE = 64
END = 1
WORDS = ["<s>", "</s>", "\u2581the", "fox", "<0x41>", "\u2581", "a", "b", "<tool>", "["]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of SentencePiece's kind; some ids of the model are beyond it."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={word: index for index, word in enumerate(WORDS)}, merges=[], byte_fallback=True
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(
        [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]
    )
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def cache(folder: Path) -> Iterator[GrammarCache]:
    cache = GrammarCache(VOCAB_SIZE)
    cache.folder = folder
    yield cache
    cache.close()


@pytest.fixture
def own(folder: Path) -> Iterator[GrammarCache]:
    """A cache that no other test has used."""
    cache = GrammarCache(VOCAB_SIZE)
    cache.folder = folder
    yield cache
    cache.close()


def request_of(text: str, name: str = "a", kind: str = "regex", tenant: str = "") -> EngineRequest:
    return EngineRequest(
        name,
        [3],
        1,
        SamplingParams(
            max_tokens=9, seed=0, eos_token_ids=[END], constraint=Constraint(kind, text)
        ),
        tenant=tenant,
    )


def settled(cache: GrammarCache, request: EngineRequest) -> object:
    deadline = time.monotonic() + 60
    while (answer := cache.open(request)) is False:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return answer


def test_every_token_has_its_bytes_and_control_tokens_have_none(folder):
    vocabulary = read_vocabulary(folder, VOCAB_SIZE)

    assert vocabulary[:9] == [b"", b"", b" the", b"fox", b"A", b" ", b"a", b"b", b"<tool>"]
    assert vocabulary[9:11] == [b"[", b""]
    assert len(vocabulary) == VOCAB_SIZE


def test_a_constraint_is_compiled_once_and_counted(cache):
    cache.take_counts()
    told = []
    cache.on_change = lambda: told.append(1)
    first, second = request_of("a+b", "first"), request_of("a+b", "second")
    for request in (first, second):
        cache.begin(request)
    assert settled(cache, first) is settled(cache, second) is True
    assert told

    matcher = cache.matcher(first)
    assert matcher is not cache.matcher(second)
    assert goes_on(matcher, [6, 6, 7, END])
    assert not goes_on(cache.matcher(second), [2])
    counts = cache.take_counts()
    assert (dict(counts.requests), counts.hits) == ({"regex": 2}, 1)
    assert [outcome for outcome, _ in counts.compiles] == ["compiled"]
    assert cache.take_counts().compiles == []
    cache.forget("first")
    with pytest.raises(KeyError):
        cache.matcher(first)


def test_a_constraint_that_cannot_be_compiled_is_remembered(cache):
    cache.take_counts()
    wrong = request_of("a(b", "wrong")
    cache.begin(wrong)
    error = settled(cache, wrong)
    again = settled(cache, wrong)

    assert (error.status, error.param) == (400, "constraint")
    assert "position 2: unclosed group" in error.message
    assert again.message == error.message
    assert [outcome for outcome, _ in cache.take_counts().compiles] == ["failed"]


def test_the_least_recently_used_form_is_evicted_and_its_matchers_go_on(own, monkeypatch):
    monkeypatch.setattr(grammar_cache, "MAX_ENTRIES", 2)
    held = request_of("fox", "held")
    assert settled(own, held) is True
    for text in ("a", "b", "ab"):
        assert settled(own, request_of(text, text)) is True
        own.forget(text)

    assert len(own._entries) <= 2
    assert goes_on(own.matcher(held), [3])


def test_a_model_without_an_end_token_refuses_every_constraint(cache):
    endless = EngineRequest(
        "endless", [3], 1, SamplingParams(max_tokens=9, seed=0, constraint=Constraint("regex", "a"))
    )

    assert "no token that ends an answer" in settled(cache, endless).message


def test_end_tokens_that_the_model_has_not_end_nothing(cache):
    both, neither = (
        EngineRequest(
            name,
            [3],
            1,
            SamplingParams(
                max_tokens=9, seed=0, eos_token_ids=ends, constraint=Constraint("regex", "a")
            ),
        )
        for name, ends in (("both", [VOCAB_SIZE, END]), ("neither", [VOCAB_SIZE, -1]))
    )

    assert settled(cache, both) is True
    assert goes_on(cache.matcher(both), [6, END])
    assert "no token that ends an answer" in settled(cache, neither).message


@pytest.fixture
def gate(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[GrammarCache, threading.Event, list[str]]]:
    """A cache whose compiles all wait for an event and then fail, and the texts begun."""
    gate, begun = threading.Event(), []

    def compiled(_: GrammarCache, constraint: Constraint) -> None:
        begun.append(constraint.text)
        assert gate.wait(60)
        raise FormError(constraint.text)

    monkeypatch.setattr(GrammarCache, "_compile", compiled)
    cache = GrammarCache(VOCAB_SIZE)
    yield cache, gate, begun
    gate.set()
    cache.close()


def test_what_no_request_waits_for_any_more_is_not_compiled(gate):
    cache, opened, begun = gate
    names = {"first": "a", "left": "b", "one": "ab", "other": "ab"}
    for name, text in names.items():
        cache.begin(request_of(text, name))
    for name in ("left", "one"):
        cache.forget(name)
    opened.set()
    for name in ("first", "other"):
        settled(cache, request_of(names[name], name))

    assert begun == ["a", "ab"]


def test_each_api_key_has_its_turn(gate):
    cache, opened, begun = gate
    many = [request_of(text, text, tenant="many") for text in ("a", "b", "ab", "ba")]
    for request in many:
        cache.begin(request)
    deadline = time.monotonic() + 60
    while not begun:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    cache.begin(request_of("quick", "quick", tenant="other"))
    cache.begin(request_of("ba", "shared", tenant="other"))
    opened.set()
    for request in many:
        settled(cache, request)

    assert begun == ["a", "b", "quick", "ab", "ba"]


def test_nothing_is_compiled_while_requests_follow_too_many_bytes(own, monkeypatch):
    monkeypatch.setattr(grammar_cache, "MAX_BYTES", 200 * BYTES_PER_CHARACTER)
    followed, waiting = request_of(80 * "fox", "followed"), request_of("a", "waiting")
    own.begin(followed)
    assert settled(own, followed) is True
    own.begin(waiting)
    time.sleep(0.05)

    assert own.open(waiting) is False
    assert len(own._entries) == 2
    own.forget("followed")
    assert settled(own, waiting) is True
    assert len(own._entries) == 1


def test_a_tenant_that_holds_its_share_of_a_full_memory_holds_up_no_other(own, monkeypatch):
    monkeypatch.setattr(grammar_cache, "MAX_BYTES", 800 * BYTES_PER_CHARACTER)
    large, more = (request_of(number * "fox", str(number), tenant="large") for number in (300, 301))
    others = [request_of(number * "fox", str(number), tenant="other") for number in (30, 31)]
    for request in (large, more, *others):
        own.begin(request)
        if request is not more:
            assert settled(own, request) is True
    last = request_of("a", "last", tenant="other")  # now it is over its share too
    own.begin(last)
    time.sleep(0.05)

    assert own.open(more) is own.open(last) is False
    own.forget(large.request_id)
    assert settled(own, more) is True
    own.forget("30")
    assert settled(own, last) is True


def test_an_engine_that_knows_no_text_refuses_every_constraint():
    alone = GrammarCache(VOCAB_SIZE)
    error = settled(alone, request_of("a"))
    alone.close()

    assert "does not know its tokens' text" in error.message


def test_a_model_whose_tokenizer_cannot_be_read_refuses_with_the_reason(tmp_path):
    cache = GrammarCache(VOCAB_SIZE)
    cache.folder = tmp_path
    error = settled(cache, request_of("a"))
    cache.close()

    assert "tokenizer.json: cannot be read" in error.message


def test_a_long_row_of_references_does_not_overflow_the_stack(cache):
    chain = {f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(2000)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**chain, "d2000": {}}}

    assert settled(cache, request_of(json.dumps(schema), kind="json_schema")) is True


def test_a_form_whose_lexer_is_used_up_is_compiled_again_for_the_next_request(
    own: GrammarCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "MAX_LEXER_STATES", 200)
    regex, words = "(a|b)*a(a|b){100}", np.empty(VOCAB_SIZE // 32 + 1, dtype=np.uint32)
    letters = [WORDS.index(each) for each in "aab"]
    for name in ("first", "second"):
        request = request_of(regex, name)
        own.begin(request)
        assert settled(own, request) is True
        matcher = own.matcher(request)
        form = matcher.form
        assert not form.is_spent.is_set()
        _follow(matcher, [letters[number * number % 7 % 3] for number in range(2000)], words)
        assert form.is_spent.is_set()
        own.forget(name)


def _follow(matcher: Matcher, token_ids: list[int], words: NDArray[np.uint32]) -> None:
    for token_id in token_ids:
        matcher.feed([token_id])
        matcher.fill(words)
