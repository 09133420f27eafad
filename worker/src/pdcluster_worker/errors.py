"""Every error that this package raises on purpose.

WorkerError
├── ConfigError          a config file or an environment value is wrong; the process ends with 2
├── ModelError           the model folder is missing, unsupported or does not fit; the process ends with 2
├── FetchError           a model cannot be downloaded as asked; the process ends with 2
├── HubError             the model hub did not answer, or broke off; tried again, then the process ends with 1
├── RequestError         a request cannot be served; carries the HTTP status and OpenAI's error fields
└── PeerError            another worker failed us: unreachable, refused, or broke off
"""


class WorkerError(Exception):
    """Root of the tree."""


class ConfigError(WorkerError):
    """A setting is wrong; the message names the field, the limit and the fix."""


class ModelError(WorkerError):
    """The model cannot be served; the message names the reason."""


class FetchError(WorkerError):
    """Trying again would not help; the message names the repository and the fix."""


class HubError(WorkerError):
    """Trying again may help; the message says what broke off."""


class RequestError(WorkerError):
    """A request is refused or failed; the server turns it into OpenAI's error shape."""

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


class PeerError(WorkerError):
    """A peer did not do its part; whether the request can go on elsewhere is the caller's decision."""
