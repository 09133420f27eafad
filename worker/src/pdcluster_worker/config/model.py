"""The section `model` of the engine file: which model, and how its text is read."""

from typing import Annotated, Literal

import msgspec

from pdcluster_worker.config.section import Section

MAX_TEMPLATE = 65_536
"""Characters of a chat template."""

ToolParserName = Literal[
    "auto", "none", "hermes", "llama3_json", "mistral", "pythonic", "qwen", "qwen3_coder"
]
ReasoningParserName = Literal["auto", "none", "deepseek_r1", "qwen3"]


class ModelConfig(Section, frozen=True):
    """Model to serve.

    dtype:         auto = one for all workers of the revision (`peers.dtype`)
    chat_template: Jinja text in place of the model's own, or one of `server.text.default_templates`
                   for requests with tools; None = its own
    tool_parser, reasoning_parser: how the model writes calls and thoughts; auto = as its chat
                                   template says
    """

    name: str
    path: str
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    chat_template: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TEMPLATE)] | None = None
    tool_parser: ToolParserName = "auto"
    reasoning_parser: ReasoningParserName = "auto"
