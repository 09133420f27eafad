"""LoRA adapters that clients load while workers run: answers are those of the adapter whatever path
a request takes, and requests go to the workers that have it.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.adapters import PROJECTIONS, make_adapter
from tests.reference import Reference
from tests.system.client import answer_of, body
from tests.system.cluster import Cluster, NewCluster
from tests.system.worker_process import WorkerProcess

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
MEMORY = 16 << 20


@dataclass
class Fleet:
    cluster: Cluster
    prefill: WorkerProcess
    decodes: list[WorkerProcess]
    router: WorkerProcess
    folders: Path

    def post(self, worker: WorkerProcess, path: str, **body: str) -> httpx.Response:
        return worker.client.http.post(path, json=body)

    def load(self, worker: WorkerProcess, name: str, folder: str) -> dict[str, object]:
        response = self.post(worker, LOAD, lora_name=name, lora_path=folder)
        assert response.status_code == 200, response.text
        found: dict[str, object] = response.json()
        return found

    def unload(self, worker: WorkerProcess, name: str) -> None:
        response = self.post(worker, UNLOAD, lora_name=name)
        assert response.status_code == 200, response.text

    def wait_listed(self, worker: WorkerProcess, *names: str) -> None:
        def listed() -> list[str]:
            return [each["id"] for each in worker.client.http.get("/v1/models").json()["data"][1:]]

        worker.wait_for(lambda: sorted(listed()) == sorted(names), f"{names} in /v1/models")


@pytest.fixture(scope="module")
def fleet(
    open_cluster: NewCluster, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    folders = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("sql", "fr")):
        merged = folders / f"{name}-merged"
        make_adapter(tiny_model, folders / name, seed=seed, targets=PROJECTIONS, merged=merged)
    allowed = {"path": str(folders), "memory": MEMORY}
    with open_cluster("runtime-adapters") as cluster:
        workers = []
        for role, number in (("prefill", 0), ("decode", 0), ("decode", 1), ("router", 0)):
            worker = cluster.add_worker(role, f"adapted-{role}-{number}", start=False)
            if role != "router":
                worker.settings["model"]["runtimeAdapters"] = allowed
            worker.start()
            workers.append(worker)
        cluster.wait_ready()
        prefill, *decodes, router = workers
        yield Fleet(cluster, prefill, decodes, router, folders)


@pytest.fixture(autouse=True)
def none_is_left(fleet: Fleet) -> Iterator[None]:
    yield
    for worker in (fleet.prefill, *fleet.decodes):
        for name in ("sql", "x"):
            fleet.post(worker, UNLOAD, lora_name=name)


def test_a_request_takes_the_remote_path_where_both_have_the_very_adapter(fleet, prompts):
    decode, prefill = fleet.decodes[0], fleet.prefill
    right = Reference(fleet.folders / "sql-merged")

    def place(mode: str) -> str | None:
        """None where it is refused."""
        prompt = prompts(100)
        response = decode.client.post(body(prompt, mode, model="x"))
        if response.status_code == 503:
            assert response.json()["error"]["code"] == "no_prefill_worker"
            return None
        answer = answer_of(response)
        right.check(prompt, answer.tokens)
        return answer.prefill

    loaded = fleet.load(decode, "x", "sql")
    assert (place("auto"), place("remote")) == ("local", None)
    same = fleet.load(prefill, "x", str(fleet.folders / "sql"))
    assert loaded == same
    decode.wait_for(lambda: place("remote") == "remote", "a prefill worker with the adapter")
    fleet.unload(prefill, "x")
    other = fleet.load(prefill, "x", "fr")
    assert other["fingerprint"] != same["fingerprint"]
    decode.wait_for(lambda: place("remote") is None, "no worker with the same weights")
    assert place("auto") == "local"


def test_routers_and_decode_workers_send_it_where_it_is(fleet, prompts):
    has_it, other = fleet.decodes
    fleet.load(has_it, "sql", "sql")
    right = Reference(fleet.folders / "sql-merged")
    for worker in (fleet.router, other, has_it):
        fleet.wait_listed(worker, "sql")
        for length in (20, 60):
            prompt = prompts(length)
            right.check(prompt, worker.client.complete(prompt, "local", model="sql").tokens)
    fleet.unload(has_it, "sql")
    for worker in (fleet.router, other, has_it):
        fleet.wait_listed(worker)
        refused = worker.client.post({"model": "sql", "prompt": prompts(3), "max_tokens": 1})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


def test_an_unloaded_one_ends_its_requests_first(fleet, prompts):
    decode = fleet.decodes[0]
    fleet.load(decode, "sql", "sql")
    right = Reference(fleet.folders / "sql-merged")
    prompt = prompts(30)
    with decode.client.stream(prompt, "local", model="sql", max_tokens=200, ignore_eos=True) as one:
        one.read_tokens(2)
        unloading = threading.Thread(target=fleet.unload, args=(decode, "sql"))
        unloading.start()
        fleet.wait_listed(decode)
        taken = fleet.post(decode, LOAD, lora_name="sql", lora_path="fr")
        assert (taken.status_code, unloading.is_alive()) == (400, True), taken.text
        tokens = one.read_tokens(200)
    unloading.join(30)
    assert not unloading.is_alive()
    right.check(prompt, tokens)


def test_what_is_refused_names_the_field_and_the_fix(fleet):
    decode = fleet.decodes[0]
    cases = [
        ({"lora_name": "x", "lora_path": "../.."}, 400, "is not below"),
        ({"lora_name": "x", "lora_path": "none"}, 400, "is no folder of a LoRA adapter"),
        ({"lora_name": "tiny", "lora_path": "sql"}, 400, "is the name of a model here"),
    ]
    for wrong, status, text in cases:
        response = fleet.post(decode, LOAD, **wrong)
        assert (response.status_code, text in response.text) == (status, True), response.text
    assert fleet.post(decode, UNLOAD, lora_name="x").status_code == 404
    assert fleet.post(fleet.router, LOAD, lora_name="x", lora_path="sql").status_code == 404
