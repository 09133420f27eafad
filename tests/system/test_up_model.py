"""`pdctl up MODEL` as it is typed: a prefill and a decode worker of the sample model, for clients
with a key, folders of two more families, and a GGUF file.
"""

import os
import re
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pdctl.local.run_directory import runs
from tests.chat_model import chat_model
from tests.make_gguf import make_gguf
from tests.make_tiny_model import make_tiny_model
from tests.system.pdctl import START_SECONDS, pdctl, up

PROMPT = "the quick"
NUM_TOKENS = 8


def test_a_folder_is_served_to_clients_with_the_key(tmp_path: Path) -> None:
    with up(
        *(str(chat_model()), "--host", "0.0.0.0", "--state-dir", str(tmp_path / "state")),
        output=tmp_path / "output",
        environment={**os.environ, "PDCLUSTER_API_KEY": "sesame"},
    ) as address:
        _ask_with_and_without_the_key(address, tmp_path / "state")
        _chat_with_its_own_key_and_end_it(tmp_path / "state")
    (run,) = runs(tmp_path / "state", "smollm2-135m-instruct")
    assert not (run.path / "api-keys").exists()


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_a_folder_of_another_family_is_served(kind: str, tmp_path: Path) -> None:
    """By our decoder, and by transformers' module."""
    folder = make_tiny_model(kind, tmp_path / "Tiny")

    assert _answers(folder, tmp_path) == _greedy(folder, torch.float32)


def test_a_gguf_file_is_converted_once_and_served(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "tiny")
    file = make_gguf(folder, tmp_path / "Tiny.gguf")

    expected = _greedy(folder, torch.bfloat16)
    for _ in range(2):
        assert _answers(file, tmp_path) == expected
        (made,) = (tmp_path / ".cache/pdcluster/gguf").glob("Tiny--*")
        assert f"model {made}, from spec.model.path" in (tmp_path / "output").read_text()


def _answers(model: Path, home: Path) -> str:
    """Ask one mixed worker of a folder or file with the name Tiny."""
    options = ("--mixed", "1", "--dtype", "float32", "--state-dir", str(home / "state"))
    environment = {**os.environ, "HOME": str(home)}
    body = {"model": "Tiny", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
    with up(str(model), *options, output=home / "output", environment=environment) as address:
        answer = httpx.post(f"{address}/v1/completions", json=body, timeout=START_SECONDS)
    text: str = answer.json()["choices"][0]["text"]
    return text


def _greedy(folder: Path, dtype: torch.dtype) -> str:
    """Answer of transformers in float32, with the weights rounded to a dtype before."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).float()
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False)
    text: str = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return text


def _ask_with_and_without_the_key(address: str, state: Path) -> None:
    name = "smollm2-135m-instruct"
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {
        "model": name,
        "messages": [question],
        "temperature": 0,
        "pdcluster": {"prefill": "remote"},
    }
    with httpx.Client(base_url=address, timeout=START_SECONDS) as client:
        answer, refused = (
            client.post(
                "/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
            )
            for key in ("sesame", "guess")
        )

    assert refused.status_code == 401
    assert answer.headers["x-pdcluster-prefill"] == "remote"
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    # the file is that of `pdctl init`, and the key is for this user's eyes alone
    text = (state / name / "cluster.yaml").read_text()
    assert pdctl("init", str(chat_model())).output == text
    (run,) = runs(state, name)
    assert (run.path / "api-keys/key").stat().st_mode & 0o777 == 0o600

    again = pdctl("up", str(chat_model()), "--state-dir", str(state), "--port", "0")
    port = address.rpartition(":")[2]
    assert (again.exit_code, again.output) == (
        2,
        f"error: {name} runs here already: process {run.pid}, port {port}; end that one first, or "
        "give this one another metadata.name, a MODEL by --name\n",
    )


def _chat_with_its_own_key_and_end_it(state: Path) -> None:
    where = ("--state-dir", str(state))
    chat = pdctl("chat", *where, "--temperature", "0", stdin="What is the capital of France?\n")

    assert chat.exit_code == 0, chat.output
    assert "Paris" in chat.stdout
    assert re.search(r"ms to the first token, .* tokens/s, prefill local \(\w+, \d+ ", chat.stderr)
    down = pdctl("down", *where)
    assert down.exit_code == 0, down.output
    assert "smollm2-135m-instruct has ended: process " in down.output
