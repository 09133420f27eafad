"""The answer to a request that its row of a step has failed."""

from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.engine import RequestFailed


def failure(request_id: str, error: Exception) -> RequestFailed:
    """A refusal where its own settings are at fault, and else the model's failure."""
    if isinstance(error, RequestError) and error.status == 400:
        return RequestFailed(request_id, error.message, is_refusal=True, param=error.param)
    why = str(error) if isinstance(error, RequestError) else f"{type(error).__name__}: {error}"
    return RequestFailed(request_id, f"the model failed on this request: {why}")
