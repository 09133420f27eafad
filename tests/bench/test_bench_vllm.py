"""vLLM beside ours: how it is started, what its client is asked and what is read back of it."""

import doctest
import hashlib
import subprocess
from pathlib import Path

import pytest
import vllm_client
import vllm_server
from system import Address
from vllm_client import client_command, run_client, run_of
from vllm_server import Served, running_vllm
from workload import Workload

from pdcluster_api.errors import StartError

INSTALL = Path(__file__).parents[2] / "bench" / "peers" / "install_vllm.sh"
MODEL = Path("/models/small")
ADDRESS = Address("http://127.0.0.1:1", "small")
CLOSED = Workload("client", 256, 64, 32, concurrency=16, by="vllm")
RESULT = {
    "duration": 2.0,
    "start_times": [10.0, 10.5, 11.0],
    "ttfts": [0.2, 0.0, 0.1],
    "itls": [[0.1, 0.3], [], [0.5]],
    "output_lens": [3, 0, 2],
    "input_lens": [8, 8, 8],
    "errors": ["", "Traceback\n  at line 3\nConnectionError: refused\n", ""],
}


@pytest.fixture(autouse=True)
def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment whose `vllm` ends at once, with a word on stderr."""
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho no such model >&2\nexit 3\n")
    program.chmod(0o755)
    (tmp_path / ".ready").write_text("0.32.0\n")
    for module in (vllm_server, vllm_client):
        monkeypatch.setattr(module, "FOLDER", tmp_path)
    return tmp_path


def test_examples_hold() -> None:
    assert doctest.testmod(vllm_client).failed == 0


def test_server_is_bound_to_as_many_cores_as_threads_and_to_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    served = Served(MODEL, num_threads=2)

    command = served.command(8123)
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert {"--enforce-eager", "bfloat16", "small"} <= set(command)
    environment = served.environment()
    assert "OMP_WAIT_POLICY" not in environment
    assert (environment["OMP_NUM_THREADS"], environment["VLLM_CPU_OMP_THREADS_BIND"]) == (
        "2",
        "0-1",
    )
    assert Served(MODEL, num_threads=1).environment()["VLLM_CPU_OMP_THREADS_BIND"] == "0"


async def test_server_that_ends_is_an_error_with_its_last_words() -> None:
    with pytest.raises(StartError, match=r"(?s)ended with 3:.*no such model"):
        async with running_vllm("vllm", Served(MODEL, 1)):
            pass


async def test_missing_installation_is_an_error_that_says_how_to_get_it(installation: Path) -> None:
    (installation / ".ready").unlink()
    with pytest.raises(StartError, match=r"install_vllm\.sh .*--only"):
        async with running_vllm("vllm", Served(MODEL, 1)):
            pass


async def test_client_that_ends_is_an_error_with_its_last_words() -> None:
    with pytest.raises(StartError, match=r"(?s)ended with 3:.*no such model"):
        await run_client(ADDRESS, CLOSED, Served(MODEL, 1), "seed")


def test_installation_that_is_there_is_left_alone(installation: Path) -> None:
    lines = INSTALL.read_bytes().splitlines(keepends=True)
    digest = hashlib.sha256(
        b"".join(line for line in lines if not line.startswith(b"#"))
    ).hexdigest()
    (installation / ".ready").write_text(f"0.32.0\n{digest}  -\n")
    done = subprocess.run([INSTALL, installation], capture_output=True, text=True, check=True)

    assert vllm_server.version() == "0.32.0"
    assert (done.stdout, done.stderr) == ("", "")
    assert (installation / "bin" / "vllm").exists()


def test_installation_by_another_script_is_made_again(installation: Path) -> None:
    """This folder is no virtual environment, so setting it up again ends before it removes
    anything.
    """
    done = subprocess.run([INSTALL, installation], capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert done.stderr == f"install_vllm: {installation} is there and is no virtual environment\n"
    assert (installation / "bin" / "vllm").exists()


def test_installation_without_a_folder_is_refused() -> None:
    done = subprocess.run([INSTALL], capture_output=True, text=True, check=False)

    assert done.returncode != 0
    assert "give the folder of the virtual environment" in done.stderr


def test_client_sends_the_workload() -> None:
    text = " ".join(client_command(ADDRESS, CLOSED, MODEL, "seed"))

    for part in (
        "--random-input-len 256",
        "--random-output-len 64",
        "--num-prompts 32",
        "--max-concurrency 16",
        "--temperature 0",
    ):
        assert part in text
    poisson = Workload("client", 8, 4, 2, rate=1.5, by="vllm")
    assert "--request-rate 1.5" in " ".join(client_command(ADDRESS, poisson, MODEL, "seed"))


def test_client_has_another_seed_in_another_round() -> None:
    assert client_command(ADDRESS, CLOSED, MODEL, "a 0") != client_command(
        ADDRESS, CLOSED, MODEL, "a 1"
    )


def test_what_the_client_recorded_goes_through_our_formulas() -> None:
    run = run_of(RESULT)

    first, failed, last = run.results
    assert (first.ttft_seconds, first.tpot_seconds) == (pytest.approx(0.2), pytest.approx(0.2))
    assert (failed.failure, last.failure) == ("ConnectionError: refused", None)
    assert sum(answer.num_tokens for answer in run.complete) == 5
