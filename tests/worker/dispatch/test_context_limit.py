"""The longest request of a worker: the model's limit, or what its KV blocks hold of one request."""

from msgspec.structs import replace

from pdcluster_worker.dispatch.backend import WorkerBackend
from pdcluster_worker.dispatch.engine_client import EngineClient
from tests.worker.dispatch.doubles import FACTS, ScriptedEngine


async def backend_of(kv_tokens: int | None) -> WorkerBackend:
    backend = WorkerBackend("m", EngineClient(ScriptedEngine()))
    backend.engine_is_ready(replace(FACTS, kv_tokens=kv_tokens))
    return backend


async def test_context_is_the_models_where_the_kv_cache_holds_it() -> None:
    for kv_tokens in (256, 1000, None):
        backend = await backend_of(kv_tokens)
        assert (backend.max_model_len, backend.context_note) == (256, "")


async def test_context_is_what_the_kv_cache_holds_and_says_so() -> None:
    """A request larger than the pool is a 400 with the numbers and the setting."""
    backend = await backend_of(252)

    assert backend.max_model_len == 252
    assert "KV cache of 64 blocks of 4 tokens" in backend.context_note
    assert "engine.maxModelLen is 256, engine.kvCacheMemory" in backend.context_note
