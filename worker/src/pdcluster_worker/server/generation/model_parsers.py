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
    """As configured."""

    tools: ToolParserName = "auto"
    reasoning: ReasoningParserName = "auto"

    @classmethod
    def of(cls, model: ModelConfig) -> "ParserNames":
        """Names from the settings of a worker's model."""
        return cls(model.tool_parser, model.reasoning_parser)


@dataclass(frozen=True, slots=True)
class ModelParsers:
    """Parsers of one model.

    tools, reasoning: None = no parser is known, or none is wanted.
    takes_tools:      its template shows tools to the model.
    leaves_calls:     calls are to stay text.
    """

    tools: tools_registry.ParserName | None = None
    reasoning: ReasoningName | None = None
    takes_tools: bool = False
    leaves_calls: bool = False


NO_PARSERS = ModelParsers()


def model_parsers(names: ParserNames, template: ChatTemplate | None) -> ModelParsers:
    """The parsers of a model with this chat template."""
    if template is None:
        return NO_PARSERS
    return ModelParsers(
        tools_registry.parser_for(names.tools, template.tool_source),
        reasoning_parser_for(names.reasoning, template.source),
        template.takes_tools,
        names.tools == "none",
    )
