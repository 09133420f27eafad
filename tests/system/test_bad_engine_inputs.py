"""An engine that gets what it cannot serve, on real workers: what is wrong is refused at start with
the field, the limit and the fix; a request that the model fails on fails alone.
"""

import shutil

import httpx
import pytest
from safetensors.torch import load_file, save_file

from pdcluster_worker.system.native_dtype import read_native_dtype
from tests.make_tiny_model import VOCAB_SIZE
from tests.system.client import body

BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4
"""KV heads, layers, keys and values, tokens, head size, float32."""

POISON = VOCAB_SIZE - 1


def test_size_that_no_engine_can_have_ends_with_2(new_cluster):
    """More are in tests/worker/model/test_kv_size.py, without a process for each."""
    worker = new_cluster("size").add_worker("mixed", "mixed-0", start=False)
    del worker.settings["engine"]["numBlocks"]
    worker.settings["engine"]["kvCacheMemory"] = 2 * BLOCK_BYTES
    worker.start()

    assert worker.wait_end() == 2
    assert worker.log_tail(1).startswith("error: ")
    assert (
        "the KV blocks hold no request of use: one request of 64 tokens takes 5 KV blocks "
        f"({5 * BLOCK_BYTES} bytes), and there are 2 ({2 * BLOCK_BYTES} bytes, room for 16 tokens)"
        f": raise engine.kvCacheMemory to {5 * BLOCK_BYTES}, or set engine.maxModelLen to 16"
    ) in worker.log_tail(1)


def test_worker_without_kernels_says_why(new_cluster, prompts):
    worker = new_cluster("no-kernels").add_worker("mixed", "mixed-0", start=False)
    worker.start(PDCLUSTER_KERNELS="off")
    worker.wait_ready()

    device = worker.client.http.get("/version").json()["device"]
    note = (
        "computes with plain torch operations, which are slower: PDCLUSTER_KERNELS is off: unset "
        "it for the compiled kernels"
    )
    assert (device["operations"], device["note"]) == ("reference", note)
    assert worker.record["device"]["note"] == note
    assert len(worker.client.complete(prompts(20)).tokens) == 8


@pytest.mark.skipif(read_native_dtype() == "bfloat16", reason="this CPU multiplies it natively")
def test_worker_in_a_dtype_that_its_cpu_lacks_says_so(new_cluster, prompts):
    worker = new_cluster("bfloat16").add_worker("mixed", "mixed-0", start=False)
    worker.settings["model"]["dtype"] = "bfloat16"
    worker.start()
    worker.wait_ready()

    note = worker.client.http.get("/version").json()["device"]["note"]
    assert "computes in bfloat16, which this CPU does not multiply natively" in note
    assert "set model.dtype to float32" in note
    assert len(worker.client.complete(prompts(20)).tokens) == 8


def test_request_without_finite_logits_fails_alone_and_is_counted(
    new_cluster, tiny_model, tmp_path, prompts
):
    """The embedding of one token is NaN, as in weights that training has broken."""
    folder = shutil.copytree(tiny_model, tmp_path / "poisoned")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = float("nan")
    # another file in its place: the fixture's may be the same one by a link
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    worker = new_cluster("nan").add_worker("mixed", "mixed-0", model=folder)
    worker.wait_ready()

    good = [token for token in prompts(40) if token != POISON]
    with worker.client.stream(good, max_tokens=200) as stream:
        stream.read_tokens(1)
        failed = worker.client.post(body([5, POISON, 6]))
        tokens = stream.read_all()
    assert failed.status_code == httpx.codes.INTERNAL_SERVER_ERROR
    assert "the model's logits are not finite after 3 tokens" in failed.json()["error"]["message"]
    assert len(tokens) == 200
    assert worker.client.complete(good, max_tokens=200).tokens == tokens
    worker.wait_for(
        lambda: worker.metrics().value("engine_failed_rows_total", reason="not_finite") == 1,
        "the failed row is counted",
    )
