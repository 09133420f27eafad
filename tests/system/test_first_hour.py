"""The first hour, docs/start.md: its blocks run as they stand there, in order, against what
`make run` serves.  The port is all that is changed.
"""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chat_model import chat_model
from tests.system.pdctl import up
from tests.system.reader import Reader, blocks
from tests.system.waiting import wait_for

ROOT = Path(__file__).parents[2]
ELSEWHERE = ("make run", "pdctl up FOLDER")  # the fixture here; test_up_model.py
SHOWN = {  # block, by how it begins: words that its output has
    "curl": ("x-pdcluster-prefill: remote", "The capital of France is Paris."),
    "from openai": ("",),
    "echo": ("Paris",),
    "pdctl status": ("chat", "prefill", "decode", "chat-decode-cpu-0  | ", "pdcluster_"),
    "kill": ("prefill 0/1", "False (NoPrefillWorker)"),
    "pdctl bench serve": ("Serving Benchmark Result", "TTFT"),
    "pdctl validate": ("chat is valid",),
    "pdctl autoscale replay": ("replay",),
}
"""Shown to a reader by each block; a block that begins otherwise fails the test."""


PAGE = [
    block
    for block in blocks((ROOT / "docs" / "start.md").read_text())
    if not block.startswith(ELSEWHERE)
]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed, and the page uses it")
    chat_model()
    reader = Reader(tmp_path_factory.mktemp("reader"))
    shutil.copytree(ROOT / "examples", reader.folder / "examples")
    with up(
        "examples/chat.yaml",
        output=reader.folder / "output",
        environment=reader.environment,
        folder=reader.folder,
    ) as reader.address:
        yield reader


@pytest.mark.timeout(600)  # all blocks of the page, one after another
def test_every_block_does_what_the_page_says(reader: Reader) -> None:
    for block in PAGE:
        words = next((SHOWN[start] for start in SHOWN if block.startswith(start)), None)
        assert words is not None, f"say in SHOWN what a reader should see of\n{block}"
        output = reader.type(block)
        assert all(word in output for word in words), f"{block}\n{output}"


def test_a_changed_policy_is_in_use_within_seconds(reader: Reader) -> None:
    """The part "Change it while it runs", which has no block for it."""
    file = reader.folder / "examples" / "chat.yaml"
    text, changes = re.subn(r"(prefillLengthThreshold:) \d+", r"\1 16", file.read_text())
    assert changes == 1
    file.write_text(text)
    question = PAGE[0].replace('"pdcluster": {"prefill": "remote"}', '"max_tokens": 2')

    def remote() -> bool:
        new = f"As of {os.urandom(8).hex()}, which river runs through which city of Europe?"
        return "prefill: remote" in reader.type(
            question.replace("What is the capital of France?", new)
        )

    wait_for(remote, 60.0, "no new question was prefilled remotely", poll_seconds=1.0)
