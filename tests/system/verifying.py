"""Ask a decode worker to verify a KV transfer, as the operator does."""

import hashlib
import hmac

import httpx

from tests.system.certificates import Certificates
from tests.system.client import Json
from tests.system.worker_process import WorkerProcess


def requested(
    worker: WorkerProcess,
    certificates: Certificates,
    pool: str = "cpu",
    *,
    even_if_busy: bool = False,
) -> httpx.Response:
    """Ask as the operator does: with a proof that it has the workers' private key."""
    said = call(worker, pool, even_if_busy=even_if_busy)
    if said.status_code != httpx.codes.UNAUTHORIZED:
        return said
    proof = proof_of(worker, certificates, said, pool, even_if_busy=even_if_busy)
    return call(worker, pool, even_if_busy=even_if_busy, proof=proof)


def call(
    worker: WorkerProcess, pool: str = "cpu", *, even_if_busy: bool = False, proof: str = ""
) -> httpx.Response:
    """One call, with that proof or none."""
    return worker.client.http.post(
        "/verify",
        params={"prefill_pool": pool, "even_if_busy": even_if_busy},
        headers={"Authorization": f"Bearer {proof}"} if proof else {},
    )


def proof_of(
    worker: WorkerProcess,
    certificates: Certificates,
    said: httpx.Response,
    pool: str = "cpu",
    *,
    even_if_busy: bool = False,
) -> str:
    """The proof for the challenge of an answer."""
    challenge = said.headers["www-authenticate"].removeprefix("PDCluster challenge=")
    purpose = f"verify {worker.name} {pool} {str(even_if_busy).lower()} {challenge}".encode()
    key = certificates.key.read_bytes()
    return f"{challenge}:{hmac.new(key, purpose, hashlib.sha256).hexdigest()}"


def verified(
    worker: WorkerProcess,
    certificates: Certificates,
    pool: str = "cpu",
    *,
    even_if_busy: bool = True,
) -> Json:
    """Its answer.

    even_if_busy: a load report may still have the request of the verification before
    """
    answer: Json = (
        requested(worker, certificates, pool, even_if_busy=even_if_busy).raise_for_status().json()
    )
    return answer
