"""Rules to read a chat answer, from the request, the model and the rendered prompt."""

import secrets
import string
import uuid
from dataclasses import dataclass, replace

from pdcluster_worker.config.worker import ModelConfig, ReasoningParserName, ToolParserName
from pdcluster_worker.errors import field_error
from pdcluster_worker.server.generation.answer_format import Reasoning, ToolUse
from pdcluster_worker.server.generation.choice import AnswerRules, rules_of
from pdcluster_worker.server.schemas.chat_fields import Conversation
from pdcluster_worker.server.schemas.requests import ChatRequest
from pdcluster_worker.server.text.chat_template import ChatTemplate
from pdcluster_worker.server.text.events import CallParser
from pdcluster_worker.server.text.reasoning import (
    ReasonedAnswer,
    ReasoningName,
    Start,
    ThinkTags,
    UnclosedReasoning,
    reasoning_parser_for,
    start_for,
    start_within,
)
from pdcluster_worker.server.tools.registry import FORMS, ParserName, parser_for
from pdcluster_worker.server.tools.streamed_call import NamedCall, NewId, Numbering, RequiredCalls


@dataclass(frozen=True, slots=True)
class ParserNames:
    tools: ToolParserName = "auto"
    reasoning: ReasoningParserName = "auto"

    @classmethod
    def of(cls, model: ModelConfig) -> "ParserNames":
        return cls(model.tool_parser, model.reasoning_parser)


@dataclass(frozen=True, slots=True)
class ModelParsers:
    """None = unknown, or none is configured.  leaves_calls: calls are to stay text."""

    tools: ParserName | None = None
    reasoning: ReasoningName | None = None
    takes_tools: bool = False
    leaves_calls: bool = False


NO_PARSERS = ModelParsers()


def model_parsers(names: ParserNames, template: ChatTemplate | None) -> ModelParsers:
    if template is None:
        return NO_PARSERS
    return ModelParsers(
        parser_for(names.tools, template.tool_source),
        reasoning_parser_for(names.reasoning, template.source),
        template.takes_tools,
        names.tools == "none",
    )


_LETTERS = string.ascii_letters + string.digits
_MISTRAL_ID_CHARACTERS = 9
"""Mistral's templates refuse ids of any other length when they come back in the history."""


def check_tools(use: ToolUse, parsers: ModelParsers) -> None:
    """Raises RequestError where this model cannot use the request's tools."""
    if use.mode == "none":
        return
    if not parsers.takes_tools:
        raise field_error(
            "tools",
            "the chat template of this model has no place for tools: leave them out, use a "
            "model whose template has one, "
            "or set model.chatTemplate of the PDCluster, such as chatml-tools",
        )
    if use.mode == "auto" and parsers.tools is None and not parsers.leaves_calls:
        raise field_error(
            "tools",
            "the chat template of this model does not say how it writes calls: set "
            "model.toolParser of the PDCluster, or tool_choice to required",
        )


def reasoning_of(request: Conversation, parsers: ModelParsers, prompt: str) -> Reasoning:
    """Raises RequestError for a budget where the model is not known to reason."""
    budget = request.thinking_token_budget
    if parsers.reasoning is None:
        if budget is not None:
            raise field_error(
                "thinking_token_budget",
                "this model is not known to reason: leave it out, or set "
                "model.reasoningParser of the PDCluster",
            )
        return Reasoning()
    start: Start = start_for(parsers.reasoning, prompt)
    if request.continue_final_message:
        start = start_within(request.messages[-1].text)
    return Reasoning(start, budget)


def rules_for(
    request: ChatRequest,
    use: ToolUse,
    parsers: ModelParsers,
    reasoning: Reasoning,
    *,
    holds_calls: bool,
) -> AnswerRules:
    """Rules to read the answer.  holds_calls: calls have their form and are not cut."""
    rules = rules_of(request, request.prompt_logprobs)
    form = FORMS[parsers.tools] if parsers.tools is not None and use.mode == "auto" else None
    new_id = _mistral_id if parsers.tools == "mistral" else _call_id
    if form is None and not use.is_forced and parsers.reasoning is None:
        return rules

    def new_parser() -> ReasonedAnswer:
        thinking = None if parsers.reasoning is None else ThinkTags(reasoning.start)
        shows = request.include_reasoning is not False
        if form is None:
            calls = _forced(use, new_id) if use.is_forced else None
            return ReasonedAnswer(thinking, calls, shows_reasoning=shows)
        return ReasonedAnswer(
            thinking,
            form.parser(use.tools, Numbering(new_id, use.most), is_constrained=holds_calls),
            unclosed=UnclosedReasoning(form.parser(use.tools, Numbering(new_id))),
            markers=form.markers,
            shows_reasoning=shows,
        )

    is_of_tools = use.is_forced or (use.mode == "auto" and rules.constraint_param is None)
    return replace(
        rules,
        new_parser=new_parser,
        ends_by_calls=use.mode != "named",
        # stop strings may not end calls that the engine keeps well formed
        stop=() if use.is_forced else rules.stop,
        constraint_param="tools" if is_of_tools else rules.constraint_param,
    )


def _forced(use: ToolUse, new_id: NewId) -> CallParser:
    numbering = Numbering(new_id, use.most)
    return (
        NamedCall(use.name, numbering)
        if use.mode == "named"
        else RequiredCalls(use.tools, numbering)
    )


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _mistral_id() -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(_MISTRAL_ID_CHARACTERS))
