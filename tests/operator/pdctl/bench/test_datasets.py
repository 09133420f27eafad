"""The requests of a load: what a seed gives, and which files are refused."""

import json
from pathlib import Path

import pytest

from pdcluster_api.errors import InvalidTraceError
from pdctl.bench.datasets import DatasetSampling, Lengths, Name, file_requests, random_requests


def test_random_requests_follow_from_the_seed() -> None:
    lengths = Lengths(8, 4, prefix_len=3)
    asks = random_requests(3, lengths, 600, "a", DatasetSampling(0.5, ignore_eos=True))

    assert (
        asks
        == random_requests(3, lengths, 600, "a", DatasetSampling(0.5))
        != random_requests(3, lengths, 600, "b", DatasetSampling(0.5))
    )
    assert {len(ask.prompt) for ask in asks} == {11}
    assert len({tuple(ask.prompt[:3]) for ask in asks}) == 1
    assert all(
        isinstance(token, int) and 256 <= token < 600 for ask in asks for token in ask.prompt
    )


def test_random_lengths_vary_within_their_ratio() -> None:
    asks = random_requests(60, Lengths(100, 10, range_ratio=0.2), 600, "a", DatasetSampling())

    assert {80 <= len(ask.prompt) <= 120 for ask in asks} == {True}
    assert {ask.num_output_tokens for ask in asks} == {8, 9, 10, 11, 12}
    assert Lengths(100, 10, prefix_len=5, range_ratio=0.2).longest == 5 + 120 + 12


def test_custom_prompts_are_taken_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n\n{"prompt": "two", "output_tokens": 3}\n')

    asks = file_requests(path, "custom", 3, 9, DatasetSampling(ignore_eos=False))
    assert [(ask.prompt, ask.num_output_tokens, ask.ignore_eos) for ask in asks] == [
        ("one", 9, False),
        ("two", 3, False),
        ("one", 9, False),
    ]


def test_first_text_of_each_conversation_is_sent(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    turns = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]
    path.write_text(json.dumps([{"conversations": turns}, {"conversations": []}]))

    assert [ask.prompt for ask in file_requests(path, "sharegpt", 2, 9, DatasetSampling())] == [
        "hello",
        "hello",
    ]


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("custom", '{"prompt": "a"}\n{"prompt": ""}', "line 2: has no text `prompt`; write a line"),
        ("custom", "{", "line 1: has no text"),
        ("custom", "[1]", "line 1: has no text"),
        (
            "custom",
            '{"prompt": "a", "output_tokens": 0}',
            "line 1: output_tokens is 0; give a whole number from 1",
        ),
        ("custom", "\n", "has no prompt; write a line"),
        ("sharegpt", "{}", "is no JSON list; write a list of"),
        ("sharegpt", "[]", "has no prompt; write a list of"),
    ],
)
def test_wrong_file_is_refused(tmp_path: Path, name: Name, text: str, fault: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(InvalidTraceError) as e:
        file_requests(tmp_path / "file", name, 1, 9, DatasetSampling())
    assert fault in str(e.value)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidTraceError, match=r"cannot be read: No such file.*--dataset-path"):
        file_requests(tmp_path / "none", "custom", 1, 9, DatasetSampling())
