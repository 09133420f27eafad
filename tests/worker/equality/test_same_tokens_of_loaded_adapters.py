"""Adapters that come and go while an engine runs answer as those that it was started with; steps go
on while one is read, and no request meets KV or weights of another.
"""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdcluster_worker.config.worker import RuntimeAdaptersConfig
from pdcluster_worker.messages.adapters import (
    AdapterReply,
    LoadAdapter,
    ResidentAdapters,
    UnloadAdapter,
)
from pdcluster_worker.messages.engine import EngineOutput, RequestFailed, Submit, Tokens
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, Token
from pdcluster_worker.server.generation.respond import cache_salt
from tests.adapters import PROJECTIONS, make_adapter
from tests.make_tiny_model import make_tiny_model
from tests.system.prompts import Prompts
from tests.worker.equality.answers import check
from tests.worker.equality.engines import Engine as RealEngine
from tests.worker.equality.engines import LocalWiring, Model, Pair

MEMORY = 1 << 20
NUM_TOKENS = 10
WAIT_SECONDS = 60.0


class Engine(RealEngine):
    """One that loads and unloads adapters, and waits for the answer."""

    calls = 0

    def load(self, name: str, path: str) -> AdapterReply:
        self.calls += 1
        self.core.handle(LoadAdapter(self.calls, name, path))
        return self.reply()

    def unload(self, name: str) -> AdapterReply:
        self.calls += 1
        self.core.handle(UnloadAdapter(self.calls, name))
        return self.reply()

    def reply(self) -> AdapterReply:
        for output in self.outputs():
            if isinstance(output, AdapterReply):
                assert output.call == self.calls
                return output
        raise AssertionError("no reply")

    def outputs(self) -> Iterator[EngineOutput]:
        until = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < until:
            yield from self.step()
            time.sleep(0.001)  # for the thread that reads


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters, and the model."""
    home = tmp_path_factory.mktemp("adapters")
    model = make_tiny_model("llama", tmp_path_factory.mktemp("llama"))
    make_adapter(model, home / "sql", seed=1, targets=PROJECTIONS)
    make_adapter(model, home / "fr", seed=2, rank=20, targets=("o_proj", "k_proj"))
    make_adapter(model, home / "law", seed=3, rank=3)
    (home / "model").symlink_to(model)
    return home


@pytest.fixture(scope="module")
def declared(folders: Path) -> Iterator[Model]:
    adapters = {name: str(folders / name) for name in ("sql", "fr", "law")}
    model = Model(folders / "model", adapters=adapters)
    yield model
    model.runner.close()


@pytest.fixture
def model(folders: Path) -> Iterator[Model]:
    """With one adapter from the start."""
    made = Model(
        folders / "model",
        adapters={"law": str(folders / "law")},
        runtime_adapters=RuntimeAdaptersConfig(str(folders), MEMORY),
    )
    yield made
    made.runner.close()


@pytest.fixture
def engine(model: Model) -> Engine:
    return Engine(model, LocalWiring(), "decode", max_batched_tokens=64)


def spec(request_id: str, adapter: str = "", weights: str = "", length: int = 40) -> RequestSpec:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, seed=0, temperature=0.0, ignore_eos=True)
    salt = cache_salt(b"", None, shared=True, adapter=adapter, weights=weights)
    prompt = Prompts("loaded adapters")(length)
    return RequestSpec(
        request_id, prompt, sampling, adapter=adapter, adapter_weights=weights, cache_salt=salt
    )


def answers(engine: RealEngine, *specs: RequestSpec) -> list[list[Token]]:
    return Pair(engine, engine).run([*specs], remote=False)


@pytest.fixture(scope="module")
def right(declared: Model) -> dict[str, list[Token]]:
    """Each alone, of an engine that was started with them."""
    engine = RealEngine(declared, LocalWiring(), "declared")
    return {name: answers(engine, spec(name, name))[0] for name in ("", "sql", "fr", "law")}


def test_loaded_adapters_answer_as_declared_ones(engine, folders, right):
    weights = {name: engine.load(name, str(folders / name)).weights for name in ("sql", "fr")}
    assert len(set(weights.values())) == 2
    names = ("", "sql", "law", "fr")
    specs = [spec(f"r-{name}", name, weights.get(name, "")) for name in names]
    check(answers(engine, *specs), [right[name] for name in names])
    assert len({tuple(t.token_id for t in right[name]) for name in names}) == 4


def test_an_adapter_comes_into_the_place_of_one_that_left(engine, folders, right):
    first = engine.load("sql", "sql")
    other = engine.load("fr", "fr")
    assert engine.unload("sql") == AdapterReply(3, free_bytes=engine.runner.adapters.free_bytes)
    again = engine.load("new", str(folders / "sql"))
    assert again.weights == first.weights
    specs = [spec("a", "new", again.weights), spec("b", "fr", other.weights)]
    check(answers(engine, *specs), [right["sql"], right["fr"]])


def failures(outputs, request_id):
    failed = [each for each in outputs if isinstance(each, RequestFailed)]
    return [each for each in failed if each.request_id == request_id]


def test_a_name_that_is_loaded_again_with_other_weights_finds_no_kv(engine, folders, right):
    old = engine.load("x", "sql").weights
    for run, cached in (("first", 0), ("second", 32)):
        (answer,) = answers(engine, spec(run, "x", old))
        assert answer[0].cached_tokens == cached
    engine.unload("x")
    new = engine.load("x", "fr").weights
    (answer,) = answers(engine, spec("third", "x", new))
    assert answer[0].cached_tokens == 0
    check([answer], [right["fr"]])
    engine.core.handle(Submit(spec("late", "x", old)))
    assert [each.lacks_adapter for each in failures(engine.step(), "late")] == [True]
    engine.unload("x")
    engine.load("x", "sql")
    (answer,) = answers(engine, spec("fourth", "x", old))
    assert answer[0].cached_tokens == 32
    check([answer], [right["sql"]])


def test_streams_go_on_while_an_adapter_is_read(engine, folders, right, tmp_path):
    """From a disk that gives nothing for a while: a pipe."""
    slow = folders / f"slow-{tmp_path.name}"
    slow.mkdir()
    (slow / "adapter_config.json").write_bytes((folders / "sql/adapter_config.json").read_bytes())
    os.mkfifo(slow / "adapter_model.safetensors")
    engine.core.handle(LoadAdapter(1, "slow", slow.name))
    check(answers(engine, spec("r")), [right[""]])

    def write() -> None:
        content = (folders / "sql/adapter_model.safetensors").read_bytes()
        (slow / "adapter_model.safetensors").write_bytes(content)

    writer = threading.Thread(target=write)
    writer.start()
    engine.calls = 1
    loaded = engine.reply()
    writer.join()
    check(answers(engine, spec("s", "slow", loaded.weights)), [right["sql"]])


def test_one_that_is_unloaded_goes_with_its_last_request(engine, right):
    loaded = engine.load("sql", "sql")
    engine.core.handle(Submit(spec("running", "sql", loaded.weights)))
    seen = engine.step()
    engine.core.handle(UnloadAdapter(9, "sql"))
    engine.core.handle(Submit(spec("new", "sql", loaded.weights)))
    engine.core.handle(LoadAdapter(10, "sql", "sql"))
    for output in engine.outputs():
        seen.append(output)
        if isinstance(output, AdapterReply) and output.call == 9:
            break
    tokens = [token for each in seen if isinstance(each, Tokens) for token in each.tokens]
    assert [each.lacks_adapter for each in failures(seen, "new")] == [True]
    assert ResidentAdapters({}) in seen
    refused = [each for each in seen if isinstance(each, AdapterReply) and each.call == 10]
    assert refused[0].refused == "adapter 'sql' is being unloaded: load it again after that"
    assert tokens[-1].finish_reason == "length"  # it has ended before the adapter went
    check([tokens], [right["sql"]])
    assert seen[-1] == AdapterReply(9, free_bytes=MEMORY)


def test_one_that_does_not_fit_is_refused_with_the_bytes(folders, right):
    room = 64_000
    model = Model(folders / "model", runtime_adapters=RuntimeAdaptersConfig(str(folders), room))
    try:
        engine = Engine(model, LocalWiring(), "decode")
        small = engine.load("small", "law")
        free = room - small.num_bytes
        assert (small.free_bytes, small.num_bytes > 0) == (free, True)
        refused = engine.load("sql", "sql")
        needed = 4 * 2 * (4 * 16 * 64 + 2 * 16 * 64 + 16 * 128 + 8 * (64 + 2 * 32 + 64 + 256 + 64))
        assert refused.refused == (
            f"adapter sql needs {needed} bytes, and {free} of the {room} bytes of "
            "model.runtimeAdapters.memory are free: unload another one, or raise it"
        )
        assert (refused.status, refused.code) == (400, "adapter_memory")
        assert engine.unload("small").free_bytes == room
        assert not engine.load("small", "law").refused
    finally:
        model.runner.close()
