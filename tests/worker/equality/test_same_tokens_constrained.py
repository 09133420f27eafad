"""Answers under a constraint: the same tokens whatever path a request takes, and every answer has
the form asked for.

A request alone on one engine says what is expected; then the same requests go together,
remote, preempted, over two ranks, ahead, with drafts, and moved in the middle.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.messages.requests import Constraint, RequestSpec, SamplingParams, Token
from pdcluster_worker.structured_output.grammar_cache import GrammarCache
from tests.make_tiny_model import EOS, make_tiny_model
from tests.system.prompts import Prompts
from tests.worker.equality.answers import check
from tests.worker.equality.engines import Guesses, Model, Pair, engines_over

NUM_TOKENS = 60
LENGTHS = (1, 17, 40, 64, 33, 5, 90, 16)
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["fox", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["kind", "age", "tags"],
}


def is_pair(text: str) -> bool:
    value = json.loads(text)
    return (
        set(value) == {"kind", "age", "tags"}
        and value["kind"] in ("fox", "dog")
        and 0 <= value["age"] <= 99
        and len(value["tags"]) <= 2
    )


FORMS: list[tuple[Constraint | None, Callable[[str], object]]] = [
    (Constraint("json_schema", json.dumps(SCHEMA)), is_pair),
    (Constraint("regex", "[a-f]{3,9}-[0-9]{2}"), re.compile("[a-f]{3,9}-[0-9]{2}").fullmatch),
    (
        Constraint("choice", '["the fox","the dog jumps","over\\n"]'),
        ["the fox", "the dog jumps", "over\n"].__contains__,
    ),
    (Constraint("grammar", 'root ::= "(" root ")" | "fox"'), re.compile(r"\(*fox\)*").fullmatch),
    (None, lambda text: True),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


class Models(dict[str, Model]):
    """Each is loaded when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, name: str) -> Model:
        if name == "ahead":
            self[name] = self["one"].ahead()
        else:
            self[name] = Model(self.folder, tensor_parallel_size=2 if name == "tp 2" else 1)
        grammars = self[name].runner.grammars
        if name == "one":
            compile_all(grammars)
        else:  # compiled once: what another process of the compiler would give is the same
            grammars._entries = self["one"].runner.grammars._entries
        return self[name]


def compile_all(grammars: GrammarCache) -> None:
    """Wait until every form is compiled, so that a run never waits for one."""
    requests = [
        EngineRequest.from_spec(spec, 0.0)
        for spec in specs("compiled")
        if spec.sampling.constraint is not None
    ]
    deadline = time.monotonic() + 60
    for request in requests:
        grammars.begin(request)
    while not all(grammars.open(request) is True for request in requests):
        assert time.monotonic() < deadline, [grammars.open(request) for request in requests]
        time.sleep(0.01)


@pytest.fixture(scope="module")
def models(folder: Path) -> Iterator[Models]:
    made = Models(folder)
    yield made
    for model in made.values():
        model.runner.close()


def specs(case: str) -> list[RequestSpec]:
    """Each form greedy, and drawn with penalties and cuts; some must not end early, some go on as
    long as they can.
    """
    source = Prompts("constrained")
    found = []
    for index, length in enumerate(LENGTHS):
        drawn = {
            "temperature": 0.9,
            "top_p": 0.95,
            "top_k": 50,
            "presence_penalty": 0.4,
            "repetition_penalty": 1.1,
            "logit_bias": {7: 1.5},
        }
        sampling = SamplingParams(
            max_tokens=NUM_TOKENS,
            seed=index,
            logprobs=2,
            constraint=FORMS[index % len(FORMS)][0],
            eos_token_ids=[EOS],
            min_tokens=8 if index % 3 == 0 else 0,
            ignore_eos=index % 4 == 3,
            **(drawn if index % 2 else {"temperature": 0.0}),
        )
        found.append(RequestSpec(f"{case}-{index}", source(length), sampling))
    return found


@pytest.fixture(scope="module")
def expected(models: Models) -> list[list[Token]]:
    pair = Pair(*engines_over([models["one"], models["one"]]))
    return [pair.run([spec], remote=False)[0] for spec in specs("expected")]


def text_of(folder: Path, answer: list[Token]) -> str:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return str(tokenizer.decode([token.token_id for token in answer]))


def test_every_answer_has_its_form(folder: Path, expected: list[list[Token]]) -> None:
    num_ended = 0
    for index, answer in enumerate(expected):
        constraint, fits = FORMS[index % len(FORMS)]
        if constraint is None or answer[-1].finish_reason != "stop":
            continue
        num_ended += 1
        assert answer[-1].token_id == EOS
        assert fits(text_of(folder, answer)), text_of(folder, answer)
    assert num_ended >= 4


@pytest.mark.parametrize(
    ("path", "names", "sizes"),
    [
        ("together", ["one", "one"], {}),
        ("preempted", ["one", "one"], {"num_blocks": 14}),
        ("remote", ["peer", "one"], {}),
        ("ahead", ["peer", "ahead"], {}),
        ("remote to ahead", ["peer", "ahead"], {}),
        ("tp 2", ["peer", "tp 2"], {}),
        ("remote from tp 2", ["tp 2", "one"], {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_tokens_are_those_of_a_request_alone(
    path: str, names: list[str], sizes: dict[str, int], models: Models, expected: list[list[Token]]
) -> None:
    pair = Pair(*engines_over([models[name] for name in names], **sizes))
    check(pair.run(specs(path), remote=path.startswith("remote")), expected)

    for engine in pair.engines:
        engine.core.check()
        assert engine.core.pool.counts()["in_use"] == 0
    assert pair.decode.stats is not None
    assert (pair.decode.stats.preemptions > 0) == (path == "preempted")
    assert (pair.decode.stats.bytes_received > 0) == path.startswith("remote")


@pytest.mark.parametrize("name", ["one", "ahead"])
def test_drafts_are_verified_under_their_masks(
    name: str, models: Models, expected: list[list[Token]]
) -> None:
    pair = Pair(*engines_over([models["peer"], models[name]], drafter=Guesses(expected)))
    check(pair.run(specs(f"drafts {name}"), remote=False), expected)
    assert pair.decode.stats is not None
    assert sum(pair.decode.stats.drafted) > sum(pair.decode.stats.accepted) > 0


def test_a_moved_request_goes_on_where_it_stood(
    models: Models, expected: list[list[Token]]
) -> None:
    """Prompt and output travel apart; the new engine's follower is fed the output."""
    pair = Pair(*engines_over([models["peer"], models["one"]]))
    moved = [
        replace(spec, output=[token.token_id for token in answer[: len(answer) // 2]])
        for spec, answer in zip(specs("moved"), expected, strict=True)
        if len(answer) > 1
    ]
    rest = [answer[len(answer) // 2 :] for answer in expected if len(answer) > 1]
    check(pair.run(moved, remote=False), rest)
