"""Our own front end: prompts by the model's tokenizer and chat template, answers by our parsers."""

from pdcluster_worker.errors import RequestError, field_error
from pdcluster_worker.server.generation.choice import rules_of
from pdcluster_worker.server.generation.front_end import Prepared, ServedModel
from pdcluster_worker.server.generation.sampling import SamplingRequest, check_token_ids
from pdcluster_worker.server.http.json_body import off_loop
from pdcluster_worker.server.openai.conversation import prepare
from pdcluster_worker.server.schemas.requests import ChatRequest, CompletionRequest
from pdcluster_worker.server.schemas.structured import constraint_of

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


class OwnFrontEnd:
    """A `FrontEnd`."""

    async def chat(self, served: ServedModel, request: ChatRequest, num_bytes: int) -> Prepared:
        return await off_loop(num_bytes, prepare, served, request)

    async def completion(
        self, served: ServedModel, request: CompletionRequest, num_bytes: int
    ) -> tuple[Prepared, list[str]]:
        return await off_loop(num_bytes, _completion, served, request)

    async def encode(
        self, served: ServedModel, text: str, num_bytes: int, *, add_special_tokens: bool
    ) -> list[int]:
        encode = served.tokenizer.encode
        encoded = await off_loop(num_bytes, encode, [text], add_special_tokens=add_special_tokens)
        return encoded[0]

    async def decode(self, served: ServedModel, token_ids: list[int], num_bytes: int) -> str:
        return await off_loop(num_bytes, served.tokenizer.decode, token_ids)


def _completion(served: ServedModel, request: CompletionRequest) -> tuple[Prepared, list[str]]:
    """Also the prompts' texts where they are to be echoed.  Slow for a large request."""
    sampling_request, tokenizer = completion_sampling_of(request), served.tokenizer
    rules = rules_of(request, sampling_request.prompt_logprobs)
    for prompt in request.prompt:
        if not isinstance(prompt, str):
            check_token_ids("prompt", prompt, served.limits)
    encoded = iter(tokenizer.encode([text for text in request.prompt if isinstance(text, str)]))
    prompts = [next(encoded) if isinstance(given, str) else given for given in request.prompt]
    echoed = request.prompt if request.echo else []
    texts = [given if isinstance(given, str) else tokenizer.decode(given) for given in echoed]
    return Prepared(prompts, sampling_request, rules), texts


def completion_sampling_of(request: CompletionRequest) -> SamplingRequest:
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise field_error(
            "best_of", "is not supported here: leave it out or set it to the value of n"
        )
    scored = [request.prompt_logprobs, request.logprobs if request.echo else None]
    counts = [count for count in scored if count is not None]
    if request.max_tokens == 0 and not (request.echo or counts):
        message = (
            "max_tokens: must be greater than or equal to 1, or 0 together with echo=true or "
            "prompt_logprobs"
        )
        raise RequestError(message, param="max_tokens")
    return SamplingRequest(
        max_tokens=None if request.max_tokens is None else max(1, request.max_tokens),
        max_tokens_param="max_tokens",
        default_max_tokens=_DEFAULT_MAX_TOKENS,
        prompt_param="prompt",
        logprobs=request.logprobs,
        prompt_logprobs=max(counts, default=None),
        constraint=constraint_of(request),
    )
