"""Our own front end: prompts by the model's tokenizer and chat template, answers by our parsers."""

from collections.abc import Iterator, Sequence
from typing import Any

from pdcluster_schema.text import quoted
from pdcluster_worker.errors import RequestError, field_error, no_embeddings
from pdcluster_worker.messages.requests import Constraint
from pdcluster_worker.server.generation.answer_format import (
    answer_constraint,
    holds_calls,
    tool_use,
)
from pdcluster_worker.server.generation.chat_answer import check_tools, reasoning_of, rules_for
from pdcluster_worker.server.generation.choice import rules_of
from pdcluster_worker.server.generation.front_end import Prepared, ServedModel
from pdcluster_worker.server.generation.sampling import SamplingRequest, check_token_ids
from pdcluster_worker.server.http.json_body import MAX_CONTAINERS, num_containers, off_loop
from pdcluster_worker.server.schemas.chat_fields import Conversation, Message, ToolCallField
from pdcluster_worker.server.schemas.fields import is_sendable
from pdcluster_worker.server.schemas.requests import ChatRequest, CompletionRequest
from pdcluster_worker.server.schemas.structured import constraint_of
from pdcluster_worker.server.text.chat_template import TemplateInput
from pdcluster_worker.server.tools.calls import object_of

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

    async def embed(self, fields: dict[str, Any]) -> bytes:
        raise no_embeddings()


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


def prepare(served: ServedModel, request: ChatRequest) -> Prepared:
    """Render and check a chat request, of any API; slow for a large one.  Raises RequestError."""
    use, parsers = tool_use(request), served.parsers
    check_tools(use, parsers)
    constraint = constraint_of(request)
    prompt = served.tokenizer.encode_chat(_template_input(request, shows_tools=use.mode != "none"))
    reasoning = reasoning_of(request, parsers, prompt.text)
    sampling_request = sampling_of(
        request, answer_constraint(constraint, use, parsers.tools, reasoning)
    )
    # A stop string may cut a call off, whose text is shown then.
    holds = holds_calls(constraint, use, parsers.tools) and not request.stop
    rules = rules_for(request, use, parsers, reasoning, holds_calls=holds)
    return Prepared([prompt.token_ids], sampling_request, rules)


def sampling_of(request: ChatRequest, constraint: Constraint | None) -> SamplingRequest:
    if request.top_logprobs is not None and not request.logprobs:
        raise field_error("top_logprobs", "is allowed only with logprobs=true")
    param = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    return SamplingRequest(
        max_tokens=getattr(request, param),
        max_tokens_param=param,
        default_max_tokens=None,
        prompt_param="messages",
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
        constraint=constraint,
    )


def _template_input(request: Conversation, *, shows_tools: bool) -> TemplateInput:
    _check_continuation(request)
    tools = (
        [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
        if shows_tools
        else None
    )
    continues = bool(request.continue_final_message)
    opens = (
        not continues if request.add_generation_prompt is None else request.add_generation_prompt
    )
    messages = list(_templated(request.messages))
    return TemplateInput(messages, tools, _kwargs(request), opens, continues)


def _kwargs(request: Conversation) -> dict[str, Any]:
    # effort "none" is also said as Qwen3's templates and their kin understand it
    effort = request.reasoning_effort
    own: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        own |= {"enable_thinking": False, "thinking": False}
    return own | (request.chat_template_kwargs or {})


def _check_continuation(request: Conversation) -> None:
    if not request.continue_final_message:
        return
    name, last = "continue_final_message", request.messages[-1]
    if request.add_generation_prompt:
        raise field_error(
            name,
            "is not possible with add_generation_prompt=true, which begins a new message: give one "
            "of the two",
        )
    if last.role != "assistant" or last.tool_calls or not last.text.strip():
        raise field_error(
            name, "the last message must be text of role assistant, which the answer goes on with"
        )


def _templated(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    names: dict[str, str] = {}  # of the tools that were called, by the call's id
    for number, message in enumerate(messages):
        path = f"messages[{number}]"
        _check_shape(message, path)
        shown: dict[str, Any] = {
            "role": "system" if message.role == "developer" else message.role,
            "content": message.text,
        }
        if message.tool_calls:
            shown["tool_calls"] = [
                _call(call, f"{path}.tool_calls[{place}]")
                for place, call in enumerate(message.tool_calls)
            ]
            names |= {call.id: call.function.name for call in message.tool_calls}
        if message.role == "tool":
            shown |= _answered(message, names, path)
        reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
        if reasoning:
            shown["reasoning_content"] = reasoning
        yield shown


def _check_shape(message: Message, path: str) -> None:
    if message.tool_calls and message.role != "assistant":
        raise field_error(
            f"{path}.tool_calls", f"are made by role assistant, not {message.role}: leave them out"
        )
    for number, part in enumerate(message.parts):
        if part["type"] != "text":
            raise field_error(
                f"{path}.content",
                f"part {number} is an image, which needs model.frontend: engine of the PDCluster "
                "and a model that takes images: send text",
            )
    if message.content is None and message.role != "assistant":
        raise field_error(
            f"{path}.content", f"is required for role {message.role}: give a string, or text parts"
        )
    if message.tool_call_id is not None and message.role != "tool":
        raise field_error(
            f"{path}.tool_call_id", f"belongs to role tool, not {message.role}: leave it out"
        )


def _answered(message: Message, names: dict[str, str], path: str) -> dict[str, Any]:
    path = f"{path}.tool_call_id"
    if message.tool_call_id is None:
        raise field_error(
            path, "is required for role tool: give the id of the call that this answers"
        )
    if message.tool_call_id not in names:
        raise field_error(
            path,
            f"no earlier message has a call {quoted(message.tool_call_id)} in its tool_calls: send "
            "that message too",
        )
    return {"tool_call_id": message.tool_call_id, "name": names[message.tool_call_id]}


def _call(call: ToolCallField, path: str) -> dict[str, Any]:
    text = call.function.arguments
    if num_containers(text) > MAX_CONTAINERS:
        raise field_error(
            f"{path}.function.arguments",
            f"have more than {MAX_CONTAINERS} objects and lists, the limit of this server: send "
            "fewer",
        )
    arguments: Any = object_of(text) if text.strip() else {}
    if arguments is None or not is_sendable(arguments):
        arguments = text
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }
