"""POST /verify: verifies a KV transfer to this decode worker, for the operator and `pdctl verify`.

It is for the holders of the cluster's private key alone: API keys are those of clients, and each
call costs a short request.  A call without a proof is given a challenge (docs/contracts.md); the
proof of one call is good for no other, since the port is plain HTTP.
"""

import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec
from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response

from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.verification import VerificationResult
from pdcluster_worker.server.errors import shapes as error_shapes
from pdcluster_worker.server.http.authorization import presented_key
from pdcluster_worker.server.http.challenges import Challenges

PATH = "/verify"
SCHEME = "PDCluster"
_SEPARATOR = ":"


@dataclass(frozen=True, slots=True)
class VerifyHandler:
    """run: verify the transfer from that prefill pool; True = even if the workers are busy.

    proof: of what is asked for, under the key as it is now; see `peers.tls.Credentials.proof`.
    """

    run: Callable[[str, bool], Awaitable[VerificationResult]]
    proof: Callable[[str], str]


def add_verification(
    app: FastAPI, verifying: VerifyHandler, challenges: Challenges | None = None
) -> None:
    """Serve it."""
    given = challenges or Challenges()

    @app.post(PATH, include_in_schema=False)
    async def verify(
        request: Request,
        prefill_pool: Annotated[str, Query(min_length=1, max_length=63)],
        even_if_busy: bool = False,
    ) -> Response:
        challenge, _, shown = (presented_key(request.scope) or "").rpartition(_SEPARATOR)
        expected = verifying.proof(f"{prefill_pool} {str(even_if_busy).lower()} {challenge}")
        is_right = hmac.compare_digest(shown.encode(), expected.encode())
        if not is_right or not given.use(challenge):
            message = "only the operator and pdctl verify may ask for this"
            error = RequestError(message, status=401, code="invalid_proof")
            header = f"{SCHEME} challenge={given.new()}"
            return error_shapes.response(error, request.scope, {"www-authenticate": header})
        return JSONResponse(msgspec.to_builtins(await verifying.run(prefill_pool, even_if_busy)))
