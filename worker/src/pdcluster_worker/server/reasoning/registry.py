"""The parsers of reasoning by name, and which of them a model's chat template asks for."""

from typing import Literal

from pdcluster_worker.config.model import ReasoningParserName
from pdcluster_worker.server.reasoning.think import CLOSE, Start, start_of

ParserName = Literal["deepseek_r1", "qwen3"]


def parser_for(name: ReasoningParserName, template: str) -> ParserName | None:
    """The parser to use: by its name, or for `auto` by the text of the model's chat template; None
    = none is known.

    A template with think tags is of a model that may reason; one that can be asked not to is
    Qwen3's.
    """
    if name == "none":
        return None
    if name != "auto":
        return name
    if CLOSE not in template:
        return None
    return "deepseek_r1" if "<\uff5cAssistant\uff5c>" in template else "qwen3"


def start_for(name: ParserName, prompt: str) -> Start:
    """Place at which the answer to this prompt begins."""
    return start_of(prompt, assumes_open=name == "deepseek_r1")
