"""The front end: makes the tokens of prompts, and says how their answers are read.

Ours does it with the model's tokenizer and chat template; that of a stock engine by its own
endpoints (docs/design/engine-front-end.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pdcluster_worker.messages.requests import Image
from pdcluster_worker.server.generation.chat_answer import ModelParsers
from pdcluster_worker.server.generation.choice import AnswerRules
from pdcluster_worker.server.generation.derender import Derender
from pdcluster_worker.server.generation.sampling import ModelLimits, SamplingRequest
from pdcluster_worker.server.schemas.requests import ChatRequest, CompletionRequest
from pdcluster_worker.server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prepared:
    """Tokens of the prompts, what is wanted of the engine, and how the answers are read.

    derender: None = by our own parsers.  images: of the only prompt.
    """

    prompts: list[list[int]]
    sampling_request: SamplingRequest
    rules: AnswerRules
    derender: Derender | None = None
    images: Sequence[Image] = ()


class ServedModel(Protocol):
    @property
    def model_name(self) -> str: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def parsers(self) -> ModelParsers: ...

    @property
    def limits(self) -> ModelLimits: ...


class FrontEnd(Protocol):
    """num_bytes: of the request's body.  Raises RequestError."""

    async def chat(self, served: ServedModel, request: ChatRequest, num_bytes: int) -> Prepared: ...

    async def completion(
        self, served: ServedModel, request: CompletionRequest, num_bytes: int
    ) -> tuple[Prepared, list[str]]:
        """Also the prompts' texts where they are to be echoed."""
        ...

    async def encode(
        self, served: ServedModel, text: str, num_bytes: int, *, add_special_tokens: bool
    ) -> list[int]: ...

    async def decode(self, served: ServedModel, token_ids: list[int], num_bytes: int) -> str: ...

    async def embed(self, fields: dict[str, Any]) -> bytes:
        """JSON of the answer to a request for embeddings."""
        ...
