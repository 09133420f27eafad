"""`pdctl up` of a model of the hub: pdctl, the worker's download, and a hub on loopback."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from pdcluster_api.errors import StartError
from pdcluster_schema.faults import InvalidObjectError
from pdcluster_schema.load import parse
from pdctl.local.model import FoundModel, find_model, with_adapters
from pdctl.local.model_file import ModelOptions, document_of
from tests.hub_server import COMMIT, HubServer
from tests.make_gguf import make_gguf
from tests.make_tiny_model import make_tiny_model
from tests.schema.object_cases import vllm

pytestmark = pytest.mark.processes
FILES = {
    "config.json": "{}",
    "tokenizer.json": "{}",
    "model.safetensors": "weights",
    "model.gguf": "the same once more",
    "adapter_config.json": "{}",
    "adapter_model.safetensors": "weights of an adapter",
}
FIX = "; start it again to go on with what has come, or give the model's folder"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """One with FILES, for a home folder of this test."""
    for name in [each for each in os.environ if each.startswith(("HF_", "HUGGING_FACE_"))]:
        monkeypatch.delenv(name)
    repository = tmp_path / "repository"
    repository.mkdir()
    for name, text in FILES.items():
        (repository / name).write_text(text)
    with HubServer(repository) as server:
        for name, value in {"HF_ENDPOINT": server.url, "HOME": str(tmp_path)}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield server


def found(repository: str = "acme/tiny") -> FoundModel:
    cluster = parse(document_of(repository, ModelOptions(mixed=1)))
    return find_model(cluster, Path("cluster.yaml"), None)


def error(repository: str = "acme/tiny") -> tuple[str, int]:
    with pytest.raises(StartError) as raised:
        found(repository)
    return str(raised.value), raised.value.exit_code


def test_a_model_is_downloaded_once_and_no_other_file(hub: HubServer, tmp_path: Path) -> None:
    folder = tmp_path / ".cache/pdcluster/models/acme--tiny--main"
    assert found() == FoundModel(folder, "the hub, downloaded")
    assert sorted(path.name for path in folder.iterdir()) == [
        *(".pdcluster-model.json", "config.json", "model.safetensors", "tokenizer.json")
    ]

    hub.requested.clear()
    assert found().path == folder
    assert hub.requested == {}


def test_a_revision_is_downloaded_into_a_folder_of_its_own(hub: HubServer, tmp_path: Path) -> None:
    folder = tmp_path / f".cache/pdcluster/models/acme--tiny--{COMMIT}"
    assert found(f"acme/tiny@{COMMIT}") == FoundModel(folder, "the hub, downloaded")
    text, code = error("acme/tiny@v9")
    assert text == (
        f"acme/tiny at v9: {hub.url} answered 404 for acme/tiny: it has no revision 'v9': check "
        "the model's revision"
    )
    assert code == 2


@pytest.mark.parametrize(
    "missing",
    ["", "config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"],
)
def test_the_cache_of_the_hub_is_taken_where_it_is_whole(
    missing: str, hub: HubServer, tmp_path: Path
) -> None:
    (hub.folder / "tokenizer_config.json").write_text("{}")
    cache = tmp_path / ".cache/huggingface/hub/models--acme--tiny"
    snapshot = cache / "snapshots" / COMMIT
    shutil.copytree(hub.folder, snapshot)
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text(COMMIT)
    if missing:
        (snapshot / missing).unlink()

    assert (found() == FoundModel(snapshot, "the hub's own cache")) is not bool(missing)
    assert (hub.requested == {}) is not bool(missing)


def test_a_gguf_file_of_a_repository_is_downloaded_and_made_into_a_folder(
    hub: HubServer, tmp_path: Path
) -> None:
    for path in hub.folder.iterdir():
        path.unlink()
    original = make_tiny_model("llama", tmp_path / "tiny")
    make_gguf(original, hub.folder / "tiny-F32.gguf")
    model = found()
    assert model.path.parent == tmp_path / ".cache/pdcluster/gguf"
    assert model.origin == "the hub, downloaded"
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {
        path.name for path in model.path.iterdir()
    }

    make_gguf(original, hub.folder / "tiny-Q8_0.gguf", GGMLQuantizationType.Q8_0)
    hub.requested.clear()
    names = "tiny-F32.gguf, tiny-Q8_0.gguf"
    assert error(f"acme/tiny@{COMMIT}") == (
        f"acme/tiny at {COMMIT}: it has several GGUF files in one part ({names}): give "
        "OWNER/NAME:QUANTIZATION, as in OWNER/NAME:Q4_K_M",
        2,
    )
    file = tmp_path / ".cache/pdcluster/models/acme--tiny--main--q8_0/tiny-Q8_0.gguf"
    assert document_of("acme/tiny:Q8_0", ModelOptions(mixed=1))["spec"]["model"] == {
        "name": "acme/tiny",
        "path": str(file),
    }
    assert file.read_bytes() == (hub.folder / file.name).read_bytes()
    assert document_of("acme/tiny:tiny-Q8_0.gguf", ModelOptions(mixed=1))["spec"]["model"][
        "path"
    ].endswith("--tiny-q8_0.gguf/tiny-Q8_0.gguf")
    assert hub.requested == {"": 3, "tiny-Q8_0.gguf": 2}
    with pytest.raises(InvalidObjectError, match=r"^revision: '-x' is not a branch, tag or commit"):
        document_of("acme/tiny:Q8_0@-x", ModelOptions(mixed=1))


def test_an_adapter_is_downloaded(hub: HubServer, tmp_path: Path) -> None:
    document = document_of("acme/tiny", ModelOptions(mixed=1))
    vllm(args=[])(document)
    adapter = {"name": "sql", "huggingFace": {"repo": "acme/tiny"}}
    document["spec"]["model"]["adapters"] = [adapter]

    (served,) = with_adapters(parse(document), tmp_path / "cluster.yaml").spec.model.adapters

    assert served.path == str(tmp_path / ".cache/pdcluster/adapters/acme--tiny--main")
    assert hub.requested.keys() == {"", "adapter_config.json", "adapter_model.safetensors"}


def test_busy_hub_gets_three_tries(hub: HubServer) -> None:
    hub.status, hub.num_errors = {"": 503}, 99
    text, code = error()

    assert text == f"acme/tiny at main: {hub.url} answered 503 for acme/tiny{FIX}"
    assert (code, hub.requested) == (1, {"": 3})


def test_a_stopped_download_ends_pdctl_and_the_next_goes_on_with_it(
    hub: HubServer, tmp_path: Path
) -> None:
    weights = hub.folder / "model.safetensors"
    weights.write_bytes(os.urandom(1 << 18))
    hub.pause = 0.1
    command = (sys.executable, "-m", "pdctl", "up", "acme/tiny", "--port", "0", "--no-progress")
    with subprocess.Popen(
        ["env", "--default-signal=INT", *command],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        deadline = time.monotonic() + 60
        models = tmp_path / ".cache/pdcluster/models"
        while time.monotonic() < deadline and not any(
            path.stat().st_size for path in models.glob(f"*/{weights.name}*")
        ):
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, shown = process.communicate(timeout=60)

    assert process.returncode == 130
    assert "stopped; start it again to go on with what has come\n" in shown
    assert "Traceback" not in shown
    hub.pause = 0.0
    assert (found().path / weights.name).read_bytes() == weights.read_bytes()
    first, second = hub.starts[weights.name]
    assert 0 == first < second


def test_a_download_that_cannot_be_says_why(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = (
        f"acme/nothing at main: {hub.url} answered 404 for acme/nothing: there is no such "
        "repository, or it is private and no token (HF_TOKEN) is given: check the model's repo "
        "and its token"
    )
    assert error("acme/nothing") == (nowhere, 2)
    gated = (
        f"acme/gated at main: {hub.url} answered 403 for acme/gated: access to it is not granted: "
        "ask for it on the repository's page, with the account of the token"
    )
    assert error("acme/gated") == (gated, 2)

    hub.extra = {"vocab.txt": 1 << 60}
    free, missing = f"{tmp_path}/.cache/pdcluster/models has ", "1152921504.6 GB are still missing"
    text, code = error()
    assert text.startswith(f"acme/tiny at main: {free}")
    assert text.endswith(f" GB free and {missing}: give the volume more space")
    assert code == 2

    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    text, code = error()
    assert text.startswith("acme/tiny at main: http://127.0.0.1:9 cannot be reached (")
    assert "): check the network, and HTTPS_PROXY or HF_ENDPOINT where" in text
    assert text.endswith(FIX)
    assert code == 1
