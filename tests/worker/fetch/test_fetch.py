"""The download as a process of its own against a hub on loopback: whole or not at all, whatever
breaks.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdcluster_worker.processes.router_process import model_limits
from pdcluster_worker.server.text.tokenizer import Tokenizer
from tests.hub_server import COMMIT, HubServer
from tests.make_tiny_model import make_tiny_model

WEIGHTS = "model.safetensors"
NO_WEIGHTS = {"PDCLUSTER_FETCH_WEIGHTS": "false"}
DEADLINE_SECONDS = 30.0


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as its author would upload it: with the same weights once more in another format, and
    a readme.
    """
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("repository") / "tiny")
    shutil.copy(folder / WEIGHTS, folder / "pytorch_model.bin")
    (folder / "README.md").write_text("about")
    return folder


@pytest.fixture
def hub(repository: Path) -> Iterator[HubServer]:
    with HubServer(repository) as server:
        yield server


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "models" / "tiny"


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(hub: HubServer, target: Path, tmp_path: Path) -> Iterator[Start]:
    """Start the download; what still runs is ended with the test."""
    running: list[subprocess.Popen[str]] = []

    def begin(
        *options: str, repo: str = "acme/tiny", token: str = "", **environment: str
    ) -> "subprocess.Popen[str]":
        command = [
            # a run in the background ignores it, and what it starts inherits that
            *("env", "--default-signal=INT", sys.executable),
            "-m",
            "pdcluster_worker.fetch",
            "--repo",
            repo,
            "--target",
            str(target),
            *options,
        ]
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HF_", "HUGGING_FACE_"))
        }
        own = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "NO_PROXY": "127.0.0.1",
            **environment,
        }
        env = {**clean, **own, **({"HF_TOKEN": token} if token else {})}
        running.append(
            subprocess.Popen(
                command,
                stderr=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=env,
            )
        )
        return running[-1]

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def finish(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """(exit status, stderr); nothing is ever written to stdout."""
    out, error = process.communicate(timeout=DEADLINE_SECONDS)
    assert out == ""
    return process.returncode, error


def last_line(error: str) -> str:
    return error.strip().splitlines()[-1]


def check_whole(target: Path, repository: Path) -> None:
    expected = {path.name for path in repository.iterdir()} - {"pytorch_model.bin", "README.md"}
    assert {path.name for path in target.iterdir()} == expected | {".pdcluster-model.json"}
    for name in expected:
        assert (target / name).read_bytes() == (repository / name).read_bytes()
    assert [path.name for path in target.parent.iterdir() if path.name.endswith(".partial")] == []


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.02)


def test_what_serving_needs_is_fetched_and_the_next_start_fetches_nothing(
    start: Start, hub: HubServer, target: Path, repository: Path
) -> None:
    status, error = finish(start())
    assert (status, "fetched repo=acme/tiny" in error) == (0, True)
    check_whole(target, repository)
    assert json.loads((target / ".pdcluster-model.json").read_text()) == {
        "repo": "acme/tiny",
        "revision": "main",
        "commit": COMMIT,
    }

    hub.requested.clear()
    assert finish(start())[0] == 0
    assert hub.requested == {}


@pytest.mark.parametrize("options", [(), ("--bar",)])
def test_of_an_adapter_its_own_files_are_fetched(
    options: tuple[str, ...], start: Start, hub: HubServer, target: Path, tmp_path: Path
) -> None:
    hub.folder = tmp_path / "lora"
    hub.folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "tokenizer.json"):
        (hub.folder / name).write_text(name)

    assert finish(start("--adapter", *options))[0] == 0
    assert sorted(path.name for path in target.iterdir()) == [
        *(".pdcluster-model.json", "adapter_config.json", "adapter_model.safetensors")
    ]


def test_a_token_is_presented(start: Start, hub: HubServer, target: Path, repository: Path) -> None:
    hub.token = "hf_secret"
    assert finish(start(token="hf_secret"))[0] == 0
    check_whole(target, repository)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"repo": "acme/nothing"}, "answered 404 for acme/nothing: there is no such repository"),
        (
            {"repo": "acme/gated"},
            "access to it is not granted: ask for it on the repository's page",
        ),
        ({"repo": "no/such/name"}, "is not the name of a repository"),
        (
            {"token": "wrong"},
            "answered 401 for acme/tiny: there is no such repository, or the token (HF_TOKEN) may "
            "not read it",
        ),
        ({"token": ""}, "it is private and no token (HF_TOKEN) is given"),
    ],
)
def test_what_a_user_must_look_at_ends_with_2(
    options: dict[str, str], reason: str, start: Start, hub: HubServer, target: Path
) -> None:
    hub.token = "hf_secret" if "token" in options else None
    status, error = finish(start(**options))
    assert (status, last_line(error)[:7]) == (2, "error: ")
    assert reason in last_line(error)
    assert not target.exists()


def test_an_unknown_revision_ends_with_2(start: Start) -> None:
    status, error = finish(start("--revision", "v9"))
    assert (status, "it has no revision 'v9'" in last_line(error)) == (2, True)


def test_a_revision_that_looks_like_an_option_is_fetched(start: Start) -> None:
    status, error = finish(start("--revision=-v9"))
    assert (status, "it has no revision '-v9'" in last_line(error)) == (2, True)


def test_a_hub_that_is_away_ends_with_1_after_its_attempts(start: Start, hub: HubServer) -> None:
    status, error = finish(start("--attempts", "2", HF_ENDPOINT="http://127.0.0.1:9"))
    assert (status, error.count("trying again")) == (1, 1)
    assert "http://127.0.0.1:9 cannot be reached" in last_line(error)


@pytest.mark.parametrize("file", ["", "config.json", WEIGHTS])
@pytest.mark.parametrize("code", [429, 503])
def test_a_busy_hub_is_tried_again(
    file: str, code: int, start: Start, hub: HubServer, target: Path, repository: Path
) -> None:
    hub.status = {file: code}
    assert finish(start())[0] == 0
    check_whole(target, repository)


def test_a_cut_connection_is_gone_on_with(
    start: Start, hub: HubServer, target: Path, repository: Path
) -> None:
    hub.cut_after, hub.num_cuts = {WEIGHTS: 64 << 10}, 2
    assert finish(start())[0] == 0
    check_whole(target, repository)
    first, second, third = hub.starts[WEIGHTS]
    assert 0 == first < second < third


def test_progress_counts_against_the_attempts(
    start: Start, hub: HubServer, target: Path, repository: Path
) -> None:
    hub.cut_after, hub.num_cuts = {WEIGHTS: 128 << 10}, 3
    assert finish(start("--attempts", "2"))[0] == 0
    check_whole(target, repository)


def test_a_hub_without_ranges_sends_the_whole_again(
    start: Start, hub: HubServer, target: Path, repository: Path
) -> None:
    hub.cut_after, hub.ranges = {WEIGHTS: 64 << 10}, False
    assert finish(start())[0] == 0
    check_whole(target, repository)


def test_false_bytes_are_thrown_away(
    start: Start, hub: HubServer, target: Path, repository: Path
) -> None:
    hub.lies = {WEIGHTS}
    status, error = finish(start())
    assert (status, "did not come as the hub announced it" in error) == (0, True)
    check_whole(target, repository)


def test_a_killed_download_is_gone_on_with(
    start: Start, hub: HubServer, target: Path, repository: Path
) -> None:
    hub.pause = 0.05
    first = start()
    wait_until(lambda: hub.sent[WEIGHTS] > 128 << 10)
    first.kill()
    first.communicate()
    assert not target.exists()

    hub.pause = 0.0
    assert finish(start())[0] == 0
    check_whole(target, repository)
    assert hub.starts[WEIGHTS][1] > 0


def test_two_pods_on_one_folder_download_once(
    start: Start, hub: HubServer, target: Path, repository: Path
) -> None:
    hub.pause = 0.02
    first = start()
    wait_until(lambda: hub.sent[WEIGHTS] > 0)
    second = start()
    hub.pause = 0.0
    ends = [finish(first), finish(second)]
    assert [status for status, _ in ends] == [0, 0]
    check_whole(target, repository)
    assert (hub.requested[WEIGHTS], hub.requested["config.json"]) == (1, 1)


def test_a_folder_of_another_revision_is_left_alone(start: Start, target: Path) -> None:
    assert finish(start())[0] == 0
    status, error = finish(start("--revision", COMMIT))
    assert (status, "choose a folder of its own for each revision" in last_line(error)) == (2, True)
    assert (target / WEIGHTS).exists()


@pytest.mark.parametrize("name", ["thesis.txt", ".pdcluster-model.json"])
def test_a_foreign_folder_is_left_alone(name: str, start: Start, target: Path) -> None:
    target.mkdir(parents=True)
    (target / name).write_text("years")
    status, error = finish(start())
    assert (status, str(target) in last_line(error)) == (2, True)
    assert (target / name).read_text() == "years"


def test_leftovers_of_another_commit_are_thrown_away(
    start: Start, target: Path, repository: Path
) -> None:
    work = target.parent / ".tiny.partial"
    work.mkdir(parents=True)
    (work / ".pdcluster-model.json").write_text("{}")
    (work / f"{WEIGHTS}.part").write_bytes(b"old")
    assert finish(start())[0] == 0
    check_whole(target, repository)


def test_too_little_space_is_reported_before_the_download(
    start: Start, hub: HubServer, repository: Path
) -> None:
    hub.extra = {"vocab.txt": 1 << 60}
    status, error = finish(start())
    assert (status, "give the volume more space" in last_line(error)) == (2, True)
    assert hub.requested[WEIGHTS] == 0


def test_a_place_that_cannot_be_written_is_reported(start: Start, target: Path) -> None:
    target.parent.write_text("a file where a folder should be")
    status, error = finish(start())
    assert (status, last_line(error)[:7]) == (2, "error: ")


def test_a_router_gets_all_that_it_reads_and_no_weights(
    start: Start, hub: HubServer, target: Path
) -> None:
    assert finish(start(**NO_WEIGHTS))[0] == 0
    assert hub.requested.get(WEIGHTS) is None
    assert not list(target.glob("*.safetensors"))
    Tokenizer.load(target, None)
    assert model_limits(target, None)[0] > 0

    hub.requested.clear()
    assert finish(start(**NO_WEIGHTS))[0] == 0
    assert hub.requested == {}


def test_a_folder_without_weights_is_not_taken_for_a_whole_one(start: Start, target: Path) -> None:
    assert finish(start(**NO_WEIGHTS))[0] == 0
    status, error = finish(start())
    assert status == 2
    assert "holds acme/tiny at main without weights, not acme/tiny at main" in last_line(error)


@pytest.mark.parametrize("name", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"])
def test_a_token_comes_under_either_name(name: str, start: Start, hub: HubServer) -> None:
    hub.token = "hf_secret"
    assert finish(start(PDCLUSTER_TOKEN_SECRET="hub", **{name: "hf_secret"}))[0] == 0


def test_a_secret_without_the_token_is_named(start: Start, hub: HubServer) -> None:
    status, error = finish(start(PDCLUSTER_TOKEN_SECRET="hub"))
    assert (status, hub.requested) == (2, {})
    assert "no Secret hub, or it has neither of the keys HF_TOKEN and token" in last_line(error)


def test_a_bar_stands_in_place_of_the_log(start: Start, target: Path, repository: Path) -> None:
    status, error = finish(start("--bar"))

    assert status == 0
    assert "INFO" not in error
    assert f"{WEIGHTS}: 100%" in error
    check_whole(target, repository)


def test_ctrl_c_leaves_what_has_come_without_a_traceback(
    start: Start, hub: HubServer, target: Path
) -> None:
    hub.pause = 0.05
    process = start()
    wait_until(lambda: hub.sent[WEIGHTS] > 64 << 10)
    process.send_signal(signal.SIGINT)
    status, error = finish(process)

    assert (status, "Traceback" in error) == (130, False)
    assert error.endswith("stopped; start it again to go on with what has come\n")
    assert (target.parent / ".tiny.partial" / f"{WEIGHTS}.part").stat().st_size > 0


@pytest.mark.parametrize("quantization", ["", "Q8_0"])
def test_a_gguf_file_in_the_hub_s_own_cache_needs_no_network(
    quantization: str, start: Start, hub: HubServer, tmp_path: Path
) -> None:
    cache = tmp_path / "home/hub/models--acme--tiny"
    for name, content in ((f"snapshots/{COMMIT}/x", ""), ("blobs/ab", "GGUF"), ("refs/main", "")):
        (cache / name).parent.mkdir(parents=True)
        (cache / name).write_text(content)
    (cache / "refs/main").write_text(COMMIT)
    file = cache / "snapshots" / COMMIT / "Tiny-Q8_0.gguf"
    file.symlink_to("../../blobs/ab")
    (file.parent / "Tiny-Q4_0.gguf").symlink_to("../../blobs/not-whole")

    out, error = start("--hub-cache", "--gguf", quantization).communicate(timeout=DEADLINE_SECONDS)
    assert (out, hub.requested.total()) == (f"{file}\n", 0), error
