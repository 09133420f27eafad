"""`pdctl up FOLDER` as it is typed: a prefill and a decode worker of the sample model, for clients
with a key.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from pdctl.local.run_directory import runs
from tests.chat_model import chat_model
from tests.system.pdctl import START_SECONDS, pdctl, up


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Address of the API, and the folder of the run's state."""
    state = tmp_path / "state"
    with up(
        *(str(chat_model()), "--host", "0.0.0.0", "--state-dir", str(state)),
        output=tmp_path / "output",
        environment={**os.environ, "PDCLUSTER_API_KEY": "sesame"},
    ) as address:
        yield address, state


def test_a_folder_is_served_to_clients_with_the_key(served: tuple[str, Path]) -> None:
    address, state = served
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
