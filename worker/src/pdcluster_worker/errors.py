"""Every error that this package raises on purpose, and the exit statuses that the operator reads.

WorkerError
├── ConfigError          a config file or an environment value is wrong; the process ends with 2
├── DeviceError          the engine cannot compute on the device that it was asked for; the process
│                        ends with 3
├── ModelError           the model folder is missing, unsupported or does not fit; the process ends
│                        with 2
├── FetchError           a model cannot be downloaded as asked; the process ends with 2
├── HubError             the model hub did not answer, or broke off; tried again, then the process
│                        ends with 1
├── RequestError         a request cannot be served; carries the HTTP status and OpenAI's error
│   │                    fields
│   └── ContextLengthError  prompt and answer do not fit the model's context
└── PeerError            another worker failed us: unreachable, refused, or broke off
"""

WRONG_SETTING = 2  # exit status: wrong settings or model

NO_DEVICE = 3  # exit status: the requested device is not available

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"  # code of a RequestError


class WorkerError(Exception):
    pass


class ConfigError(WorkerError):
    pass


class DeviceError(WorkerError):
    pass


class ModelError(WorkerError):
    pass


class FetchError(WorkerError):
    """A retry would not help."""


class HubError(WorkerError):
    """A retry may help."""


class RequestError(WorkerError):
    """The server turns it into OpenAI's error shape."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_seconds = retry_after_seconds


def field_error(param: str, words: str) -> RequestError:
    """words: what is wrong with the field, and the fix."""
    return RequestError(f"{param}: {words}", param=param)


def no_embeddings() -> RequestError:
    return RequestError(
        "the model that is served generates text, and makes no embeddings: ask a PDCluster whose "
        "model does, of engine.type: vllm with roles.mixed and model.frontend: engine",
        status=404,
    )


def embeds_only() -> RequestError:
    return RequestError(
        "the model that is served makes embeddings, and generates no text: use /v1/embeddings",
        status=404,
    )


class ContextLengthError(RequestError):
    """max_tokens: of the answer, None where the prompt alone is too long; most: of both."""

    def __init__(
        self, message: str, *, param: str, num_prompt: int, max_tokens: int | None, most: int
    ) -> None:
        super().__init__(message, param=param, code=CONTEXT_LENGTH_EXCEEDED)
        self.num_prompt = num_prompt
        self.max_tokens = max_tokens
        self.most = most


class PeerError(WorkerError):
    """The caller decides whether the request can continue elsewhere."""
