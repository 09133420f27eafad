"""The front end of a stock engine: vLLM's render, derender and token endpoints.

docs/design/engine-front-end.md says what they take and give.
"""

import asyncio
from dataclasses import replace
from typing import Any

import msgspec

from pdcluster_worker.errors import field_error
from pdcluster_worker.messages.requests import MAX_CONSTRAINT_CHARACTERS, Constraint
from pdcluster_worker.server.generation.choice import rules_of
from pdcluster_worker.server.generation.derender import MAX_CALLS, Ask, Derender
from pdcluster_worker.server.generation.front_end import Prepared, ServedModel
from pdcluster_worker.server.generation.sampling import check_token_ids
from pdcluster_worker.server.http.json_body import off_loop
from pdcluster_worker.server.openai.images import Features, image_urls, images_of
from pdcluster_worker.server.openai.own_front_end import completion_sampling_of, sampling_of
from pdcluster_worker.server.schemas.chat_fields import NamedToolChoice
from pdcluster_worker.server.schemas.requests import ChatRequest, CompletionRequest, Generate
from pdcluster_worker.server.schemas.structured import constraint_of
from pdcluster_worker.stock_engine.front_end import CHAT, COMPLETIONS, DETOKENIZE, EMBEDDINGS
from pdcluster_worker.stock_engine.generate_api import structured

_CHAT_FIELDS = {
    *("messages", "tools", "parallel_tool_calls", "response_format"),
    *("reasoning_effort", "include_reasoning", "thinking_token_budget", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message", "skip_special_tokens"),
}

_encode = msgspec.json.Encoder().encode


class _Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Fields that the engine's parsers add to the sampling of a request."""

    structured_outputs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None


class _Rendered(msgspec.Struct):
    token_ids: list[int]
    sampling_params: _Sampling = _Sampling()
    features: Features | None = None  # of parts that are no text
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None


class _Detokenized(msgspec.Struct):
    prompt: str


_rendered = msgspec.json.Decoder(_Rendered).decode
_all_rendered = msgspec.json.Decoder(list[_Rendered]).decode
_detokenized = msgspec.json.Decoder(_Detokenized).decode


class EngineFrontEnd:
    """A `FrontEnd`."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._calls = asyncio.Semaphore(MAX_CALLS)
        # of prompts, which come before any limit of a tenant; answers that stream do not wait
        self._prompts = asyncio.Semaphore(MAX_CALLS)

    async def chat(self, served: ServedModel, request: ChatRequest, num_bytes: int) -> Prepared:
        _check_names(served, request, request.logprobs)
        sampling = sampling_of(request, None)
        fields = _chat_fields(request)
        urls = await off_loop(num_bytes, image_urls, request.messages, request.n or 1)
        # the images as tensors, which are many times as long, are left out (from vLLM 0.32 on)
        body = {**fields, "mm_payload": "none"} if urls else fields
        rendered = _rendered(await self._render_call(f"{CHAT}/render", body))
        images = images_of(rendered.features, urls, rendered.token_ids)
        is_forced = isinstance(request.tool_choice, NamedToolChoice) or (
            request.tool_choice == "required"
        )
        rules = rules_of(request, request.prompt_logprobs)
        rules = replace(
            rules,
            ends_by_calls=not isinstance(request.tool_choice, NamedToolChoice),
            stop=() if is_forced else rules.stop,
            constraint_param=rules.constraint_param or "tools",
        )
        # of the conversation a parser reads the calls alone, to number new ones
        calls = [
            {"role": message["role"], "tool_calls": message["tool_calls"]}
            for message in fields["messages"]
            if message.get("tool_calls")
        ]
        kept = {**fields, "messages": calls}
        kept.pop("continue_final_message", None)
        derender = self._derender(
            CHAT, request, {"chat_request": kept}, shows=request.include_reasoning is not False
        )
        constraint = _constraint_of(rendered)
        sampling = replace(sampling, constraint=constraint)
        return Prepared([rendered.token_ids], sampling, rules, derender, images)

    async def completion(
        self, served: ServedModel, request: CompletionRequest, num_bytes: int
    ) -> tuple[Prepared, list[str]]:
        sampling = completion_sampling_of(request)
        _check_names(served, request, sampling.logprobs is not None)
        texts = [prompt for prompt in request.prompt if isinstance(prompt, str)]
        for prompt in request.prompt:
            if not isinstance(prompt, str):
                check_token_ids("prompt", prompt, served.limits)
        encoded = iter(await self._render(request.model, texts))
        prompts = [next(encoded) if isinstance(each, str) else each for each in request.prompt]
        echoed = [
            each if isinstance(each, str) else await self.decode(served, each, num_bytes)
            for each in (request.prompt if request.echo else ())
        ]
        rules = rules_of(request, sampling.prompt_logprobs)
        fields = {
            "model": request.model,
            "prompt": "-",  # of which nothing is read, but vLLM takes no empty one
            "skip_special_tokens": rules.skip_special,
        }
        derender = self._derender(COMPLETIONS, request, {"completion_request": fields})
        return Prepared(prompts, sampling, rules, replace(derender, parses=False)), echoed

    async def encode(
        self, served: ServedModel, text: str, num_bytes: int, *, add_special_tokens: bool
    ) -> list[int]:
        model = served.model_name
        fields = {"add_special_tokens": add_special_tokens}
        return (await self._render(model, [text], fields))[0]

    async def decode(self, served: ServedModel, token_ids: list[int], num_bytes: int) -> str:
        body = {"model": served.model_name, "tokens": token_ids}
        return _detokenized(await self._render_call(DETOKENIZE, body)).prompt

    async def embed(self, fields: dict[str, Any]) -> bytes:
        return await self._ask(EMBEDDINGS, _encode(fields))

    async def _render(
        self, model: str, texts: list[str], fields: dict[str, Any] | None = None
    ) -> list[list[int]]:
        if not texts:
            return []
        body = {"model": model, "prompt": texts, "max_tokens": 1, **(fields or {})}
        answer = await self._render_call(f"{COMPLETIONS}/render", body)
        return [rendered.token_ids for rendered in _all_rendered(answer)]

    async def _render_call(self, path: str, fields: dict[str, Any]) -> bytes:
        async with self._prompts:
            return await self._ask(path, _encode(fields))

    def _derender(
        self, path: str, request: Generate, fields: dict[str, Any], *, shows: bool = True
    ) -> Derender:
        fields = {"model": request.model, **fields}
        return Derender(self._ask, f"{path}/derender", fields, self._calls, shows_reasoning=shows)


def _chat_fields(request: ChatRequest) -> dict[str, Any]:
    """The request as vLLM's chat API has it; what our API alone knows is translated."""
    fields = request.model_dump(include=_CHAT_FIELDS, exclude_none=True, by_alias=True)
    fields["model"] = request.model
    choice = request.tool_choice
    if choice is not None:
        named = choice.model_dump() if isinstance(choice, NamedToolChoice) else choice
        fields["tool_choice"] = named
    constraint = constraint_of(request)
    if constraint is not None and request.response_format is None:
        fields["structured_outputs"] = structured(constraint)
    if request.continue_final_message:
        fields.setdefault("add_generation_prompt", False)
    return fields


def _constraint_of(rendered: _Rendered) -> Constraint | None:
    """The form of the answer by the engine's own parsers, which follow it once reasoning ends."""
    sampling = rendered.sampling_params
    if sampling == _Sampling():
        return None
    body = {
        "sampling_params": sampling,
        "reasoning_ended": rendered.reasoning_ended,
        "reasoning_parser_kwargs": rendered.reasoning_parser_kwargs,
    }
    text = _encode(body).decode()
    if len(text) > MAX_CONSTRAINT_CHARACTERS:
        raise field_error(
            "tools",
            f"with the answer's form they have {len(text)} characters as the engine's constraint: "
            f"at most {MAX_CONSTRAINT_CHARACTERS} are accepted, send fewer or smaller schemas",
        )
    return Constraint("rendered", text)


def _check_names(served: ServedModel, request: Generate, has_logprobs: object) -> None:
    """Raises RequestError for log probabilities of tokens that have no names here."""
    if not has_logprobs and request.prompt_logprobs is None:
        return
    if not served.tokenizer.has_names and not request.return_tokens_as_token_ids:
        raise field_error(
            "logprobs",
            "this model has no tokenizer.json, which names tokens: set return_tokens_as_token_ids",
        )
