"""POST /verify: verifies a KV transfer to this decode worker, for holders of the cluster's private
key. A call without a proof is given a challenge (docs/contracts.md); a proof is good for one call.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec
from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.peers import VerificationResult
from pdcluster_worker.server.errors.handlers import response_for
from pdcluster_worker.server.errors.validation import from_validation
from pdcluster_worker.server.http.authorization import presented_key

SCHEME = "PDCluster"
SECONDS = 60.0
"""From giving a challenge out to its proof."""

_SEPARATOR = ":"


@dataclass(frozen=True, slots=True)
class VerifyHandler:
    """run: verify the transfer from that prefill pool; True = even if the workers are busy.

    proof: for these words, under the key as it is now; see `peers.tls.Credentials.proof`.
    """

    run: Callable[[str, bool], Awaitable[VerificationResult]]
    proof: Callable[[str], str]


class Challenges:
    """Challenges that are answered with a proof, each once: random, made by this process, and good
    for a short time.  Nothing is kept for one that is given out, so asking costs no memory.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._used: dict[str, float] = {}

    def new(self) -> str:
        text = f"{self._clock():.3f}.{secrets.token_hex(16)}"
        return f"{text}.{self._mac(text)}"

    def use(self, challenge: str) -> bool:
        """Take one of which the proof is right; False = not ours, too old, or taken before."""
        text, _, mac = challenge.rpartition(".")
        if not hmac.compare_digest(mac.encode(), self._mac(text).encode()):
            return False
        made, now = float(text[: text.rindex(".")]), self._clock()
        self._used = {used: at for used, at in self._used.items() if now - at <= SECONDS}
        if now - made > SECONDS or challenge in self._used:
            return False
        self._used[challenge] = made
        return True

    def _mac(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()


class _Query(BaseModel):
    prefill_pool: Annotated[str, Field(min_length=1, max_length=63)]
    even_if_busy: bool = False


def verify_route(handler: VerifyHandler) -> Route:
    challenges = Challenges()

    async def verify(request: Request) -> Response:
        given = dict(request.query_params)
        try:
            query = _Query.model_validate(given)
        except ValidationError as e:
            raise from_validation(e.errors(include_url=False), given) from e
        pool, even_if_busy = query.prefill_pool, query.even_if_busy
        challenge, _, shown = (presented_key(request.scope) or "").rpartition(_SEPARATOR)
        expected = handler.proof(f"{pool} {str(even_if_busy).lower()} {challenge}")
        is_right = hmac.compare_digest(shown.encode(), expected.encode())
        if not is_right or not challenges.use(challenge):
            message = "only the operator and pdctl verify may ask for this"
            error = RequestError(message, status=401, code="invalid_proof")
            header = f"{SCHEME} challenge={challenges.new()}"
            return response_for(error, request.scope, {"www-authenticate": header})
        return JSONResponse(msgspec.to_builtins(await handler.run(pool, even_if_busy)))

    return Route("/verify", verify, methods=["POST"])
