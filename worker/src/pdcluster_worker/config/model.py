"""The section `model` of the engine file: the model, and how its text is read."""

from typing import Annotated, Literal

import msgspec

from pdcluster_worker.config.section import Section

MAX_TEMPLATE = 65_536  # characters

ToolParserName = Literal[
    "auto", "none", "hermes", "llama3_json", "mistral", "pythonic", "qwen", "qwen3_coder"
]
ReasoningParserName = Literal["auto", "none", "deepseek_r1", "qwen3"]


class ModelConfig(Section, frozen=True):
    name: str
    path: str
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto = one for the revision
    # Jinja, or a name of `default_templates`
    chat_template: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TEMPLATE)] | None = None
    tool_parser: ToolParserName = "auto"  # auto = by the chat template
    reasoning_parser: ReasoningParserName = "auto"
