"""Adapters that come and go: what an engine refuses, and when it answers."""

from pdcluster_schema.ports import MAX_ADAPTERS
from pdcluster_worker.engine.adapters import Adapters
from pdcluster_worker.engine.ports import LoadedAdapter
from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.adapters import (
    AdapterReply,
    LoadAdapter,
    ResidentAdapters,
    UnloadAdapter,
)
from pdcluster_worker.messages.engine import RequestFailed
from pdcluster_worker.messages.requests import SamplingParams

LOADED = LoadedAdapter("w1", 100)


class Loader:
    """Has read what a test says that it has."""

    free_bytes = 900

    def __init__(self) -> None:
        self.begun: list[tuple[str, str]] = []
        self.read: list[tuple[str, LoadedAdapter | RequestError]] = []
        self.removed: list[str] = []

    def begin(self, name: str, path: str) -> None:
        self.begun.append((name, path))

    def take(self) -> list[tuple[str, LoadedAdapter | RequestError]]:
        read, self.read = self.read, []
        return read

    def remove(self, name: str) -> None:
        self.removed.append(name)


def request(adapter: str, weights: str = "", salt: bytes = b"s") -> EngineRequest:
    made = EngineRequest("r", [1], 1, SamplingParams(max_tokens=1, seed=0), cache_salt=salt)
    made.adapter, made.adapter_weights = adapter, weights
    return made


def with_one(name: str = "sql") -> tuple[Adapters, Loader]:
    loader = Loader()
    adapters = Adapters(frozenset({"law"}), loader)
    assert adapters.handle(LoadAdapter(1, name, "p")) == []
    loader.read.append((name, LOADED))
    assert adapters.settle([]) == [
        ResidentAdapters({name: "w1"}),
        AdapterReply(1, "w1", num_bytes=100, free_bytes=900),
    ]
    return adapters, loader


def refused(adapters: Adapters, message: LoadAdapter | UnloadAdapter) -> tuple[str, int]:
    (reply,) = adapters.handle(message)
    assert isinstance(reply, AdapterReply)
    return reply.refused, reply.status


def test_requests_name_the_weights_that_are_loaded():
    adapters, _ = with_one()
    assert adapters.refusal(request("sql", "w1")) is None
    assert adapters.refusal(request("law")) is None
    gone = (
        "adapter 'sql' was unloaded, or loaded with other weights, while the request was on its "
        "way: send it again, or load the adapter again"
    )
    for weights in ("w2", ""):
        failed = adapters.refusal(request("sql", weights))
        assert failed == RequestFailed("r", gone, lacks_adapter=True)
    for name in ("law", "fr"):
        failed = adapters.refusal(request(name, "w1"))
        assert failed == RequestFailed("r", gone.replace("sql", name), lacks_adapter=True)
    assert "has no cache_salt" in str(adapters.refusal(request("sql", "w1", b"")))
    unknown = "adapter 'fr' is not loaded here, which has law, sql: give it in model.adapters"
    assert adapters.refusal(request("fr")) == RequestFailed("r", unknown, is_refusal=True)


def test_one_that_cannot_be_read_is_refused_as_its_reader_says():
    loader = Loader()
    adapters = Adapters(frozenset(), loader)
    adapters.handle(LoadAdapter(4, "sql", "p"))
    loader.read.append(("sql", RequestError("no folder", code="c", param="lora_path")))
    assert adapters.settle([]) == [
        AdapterReply(4, refused="no folder", status=400, code="c", param="lora_path")
    ]
    assert adapters.refusal(request("sql", "w1")) is not None
    assert adapters.handle(LoadAdapter(5, "sql", "p")) == []


def test_a_name_is_taken_once():
    adapters, loader = with_one()
    taken = " is loaded already: unload it before, or give this one another name"
    for name in ("sql", "law"):
        assert refused(adapters, LoadAdapter(2, name, "p")) == (f"adapter '{name}'{taken}", 400)
    adapters.handle(LoadAdapter(3, "fr", "p"))
    assert refused(adapters, LoadAdapter(4, "fr", "p"))[0] == f"adapter 'fr'{taken}"
    adapters.handle(UnloadAdapter(5, "sql"))
    assert refused(adapters, LoadAdapter(6, "sql", "p"))[0] == (
        "adapter 'sql' is being unloaded: load it again after that"
    )
    assert loader.begun == [("sql", "p"), ("fr", "p")]


def test_an_unloaded_one_takes_no_requests_and_goes_with_its_last():
    adapters, loader = with_one()
    running = request("sql", "w1")
    assert adapters.handle(UnloadAdapter(2, "sql")) == [ResidentAdapters({})]
    assert adapters.refusal(running) is not None
    assert adapters.settle([running, request("")]) == []
    assert loader.removed == []
    assert adapters.settle([request("")]) == [AdapterReply(2, free_bytes=900)]
    assert loader.removed == ["sql"]
    assert adapters.handle(LoadAdapter(3, "sql", "p")) == []


def test_only_one_that_was_loaded_can_be_unloaded():
    adapters, _ = with_one()
    assert refused(adapters, UnloadAdapter(2, "law")) == (
        "adapter 'law' is one of model.adapters, which stay: take it out of the PDCluster",
        400,
    )
    name_one = ": name one that was loaded while this engine runs, "
    assert refused(adapters, UnloadAdapter(2, "no")) == (
        f"adapter 'no' is not loaded here{name_one}sql",
        404,
    )
    adapters.handle(LoadAdapter(3, "fr", "p"))
    assert refused(adapters, UnloadAdapter(4, "fr")) == (
        f"adapter 'fr' is still being loaded{name_one}sql",
        404,
    )
    adapters.handle(UnloadAdapter(5, "sql"))
    assert refused(adapters, UnloadAdapter(6, "sql")) == (
        f"adapter 'sql' is being unloaded{name_one}none",
        404,
    )


def test_their_number_is_limited():
    adapters = Adapters(frozenset({"law"}), Loader())
    for number in range(MAX_ADAPTERS - 1):
        assert adapters.handle(LoadAdapter(number, f"a{number}", "p")) == []
    assert refused(adapters, LoadAdapter(99, "more", "p")) == (
        "64 adapters are loaded, of at most 64: unload one",
        400,
    )
