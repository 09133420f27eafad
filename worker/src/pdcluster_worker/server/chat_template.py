"""A model's chat template: messages to one prompt text.

Templates come with models from anywhere, so they run in Jinja's immutable
sandbox, with the globals and tags that model folders use (`raise_exception`,
`strftime_now`, `tojson`, break and continue, `{% generation %}`).
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdcluster_worker.errors import ModelError, RequestError

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks assistant text for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Take the tag away and keep what is inside."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template and the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as e:
            raise ModelError(f"chat template, line {e.lineno}: {e.message}") from e
        self._special_tokens = special_tokens

    @classmethod
    def load(cls, folder: Path, tokenizer_config: dict[str, Any]) -> "ChatTemplate | None":
        """From chat_template.jinja, else from tokenizer_config.json; None when the folder has none."""
        path = folder / "chat_template.jinja"
        source = path.read_text(encoding="utf-8") if path.is_file() else _named_default(tokenizer_config.get("chat_template"))
        if source is None:
            return None
        tokens = {name: _content(tokenizer_config[name]) for name in _SPECIAL_TOKENS if tokenizer_config.get(name)}
        return cls(source, tokens)

    def render(self, messages: list[dict[str, str]]) -> str:
        """Prompt text up to where the assistant answers.  Raises RequestError when the template refuses the messages."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, tools=None, documents=None, **self._special_tokens)
        except (jinja2.TemplateError, TypeError) as e:
            raise RequestError(f"the model's chat template refuses these messages: {e}", param="messages") from e


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _named_default(templates: Any) -> str | None:
    """tokenizer_config.json has one template, or a list of named ones."""
    if isinstance(templates, list):
        return next((item["template"] for item in templates if item.get("name") == "default"), None)
    return templates if isinstance(templates, str) else None


def _content(token: Any) -> str:
    """A special token is written as a string, or as an object with its content."""
    return str(token["content"] if isinstance(token, dict) else token)
