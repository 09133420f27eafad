"""Parsers of a model's calls and reasoning: as its PDCluster says, else as its chat
template shows.
"""

from dataclasses import dataclass

from pdcluster_worker.config.model import ModelConfig, ReasoningParserName, ToolParserName
from pdcluster_worker.server.text.chat_template import ChatTemplate
from pdcluster_worker.server.text.reasoning import ReasoningName, reasoning_parser_for
from pdcluster_worker.server.tools import registry as tools_registry


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

    tools: tools_registry.ParserName | None = None
    reasoning: ReasoningName | None = None
    takes_tools: bool = False
    leaves_calls: bool = False


NO_PARSERS = ModelParsers()


def model_parsers(names: ParserNames, template: ChatTemplate | None) -> ModelParsers:
    if template is None:
        return NO_PARSERS
    return ModelParsers(
        tools_registry.parser_for(names.tools, template.tool_source),
        reasoning_parser_for(names.reasoning, template.source),
        template.takes_tools,
        names.tools == "none",
    )
