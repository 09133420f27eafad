"""Ask a decode worker to verify a KV transfer, as the operator does."""

import json

import grpc

from pdcluster_schema.ports import WORKER_NAME, WORKER_SERVICE
from tests.system.certificates import Certificates
from tests.system.client import Json
from tests.system.worker_process import WorkerProcess


def verified(
    worker: WorkerProcess,
    certificates: Certificates,
    pool: str = "cpu",
    *,
    even_if_busy: bool = True,
    pod: str | None = None,
) -> Json:
    """Its answer.  Raises grpc.RpcError.

    even_if_busy: a load report may still have the request of the verification before
    """
    call = {"pod": pod or worker.name, "prefill_pool": pool, "even_if_busy": even_if_busy}
    address = worker.record["grpc_address"]
    options = [("grpc.ssl_target_name_override", WORKER_NAME)]
    with grpc.secure_channel(address, certificates.channel(), options) as channel:
        verify = channel.unary_unary(f"/{WORKER_SERVICE}/verify")
        answer: Json = json.loads(verify(json.dumps(call).encode(), timeout=150.0))
    return answer
