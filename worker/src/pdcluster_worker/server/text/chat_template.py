"""A model's chat template: messages to one prompt text, in Jinja's immutable sandbox."""

import json
from dataclasses import dataclass, field
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdcluster_schema.text import quoted
from pdcluster_worker.errors import ModelError, RequestError, field_error

_CHATML_TOOLS = """\
{%- set has_system = messages[0].role == 'system' -%}
{%- if tools or has_system -%}
<|im_start|>system
{% if has_system %}{{ messages[0].content }}{% if tools %}{{ '\\n\\n' }}{% endif %}{% endif -%}
{%- if tools -%}
You may call functions to help with the request. Their signatures:
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
Write each call as a JSON object with the function's name and arguments, like this:
<tool_call>
{"name": "a function", "arguments": {"an argument": "its value"}}
</tool_call>
{%- endif %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' and loop.first -%}
{%- elif message.role == 'tool' -%}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.tool_calls -%}
<|im_start|>assistant
{{ message.content }}{% for call in message.tool_calls %}
{%- if message.content or not loop.first %}{{ '\\n' }}{% endif %}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% else -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""

TEMPLATES = {"chatml-tools": _CHATML_TOOLS}


_JSON_OPTIONS = frozenset({"separators", "sort_keys"})
_END_MARK = "END-OF-THE-LAST-MESSAGE\t \t"
"""A template that strips messages strips its white space, and so the message's own."""
SPECIAL_TOKENS = [f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")]


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """opens: ends with the opening of the turn.  continues: ends inside the last message."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    opens: bool = True
    continues: bool = False

    @property
    def has_tools(self) -> bool:
        return self.tools is not None or any(
            "tool_calls" in message or message["role"] == "tool" for message in self.messages
        )


class _GenerationTag(Extension):
    """`{% generation %}` marks assistant text for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """tool_source: of another template, for conversations with tools."""

    def __init__(
        self, source: str, special_tokens: dict[str, str], tool_source: str | None = None
    ) -> None:
        self.source = source
        self.tool_source = source if tool_source is None else tool_source
        self._template = _compiled(source)
        self._with_tools = self._template if tool_source is None else _compiled(tool_source)
        self.takes_tools = "tools" in _names_in(self.tool_source)
        self._special_tokens = special_tokens

    @classmethod
    def load(
        cls, folder: Path, tokenizer_config: dict[str, Any], given: str | None = None
    ) -> "ChatTemplate | None":
        """given: Jinja text in its place, or the name of one of ours.  Raises ModelError."""
        tokens = {
            name: _content(tokenizer_config[name])
            for name in SPECIAL_TOKENS
            if tokenizer_config.get(name)
        }
        if given is not None and given not in TEMPLATES:
            template = cls(given, tokens)
            _check_given(given)
            return template
        path, inline = folder / "chat_template.jinja", tokenizer_config.get("chat_template")
        source = path.read_text(encoding="utf-8") if path.is_file() else _named(inline, "default")
        tool_source = (
            TEMPLATES[given]
            if given is not None
            else _named(inline, "tool_use")
            if isinstance(inline, list)
            else None
        )
        source = tool_source if source is None else source
        return None if source is None else cls(source, tokens, tool_source)

    def render(self, given: TemplateInput) -> str:
        """Raises RequestError when the template refuses the messages."""
        messages = _marked(given.messages) if given.continues else given.messages
        try:
            return self._rendered(given, messages)
        except RequestError:
            whole = _with_objects(messages)
            if whole == messages:
                raise
            return self._rendered(given, whole)

    def _rendered(self, given: TemplateInput, messages: list[dict[str, Any]]) -> str:
        template = self._with_tools if given.has_tools else self._template
        names = {**self._special_tokens, **given.kwargs}
        try:
            text = template.render(
                **{
                    **names,
                    "messages": messages,
                    "tools": given.tools,
                    "documents": None,
                    "add_generation_prompt": given.opens,
                }
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            RecursionError,
        ) as e:
            raise RequestError(
                f"the model's chat template refuses these messages: {e}", param="messages"
            ) from e
        return _cut_at_mark(text) if given.continues else text


def _check_given(template: str) -> None:
    if "messages" in _names_in(template):
        return
    close = get_close_matches(template, TEMPLATES, n=1)
    fix = f"did you mean {close[0]}?" if close else "write the model's template, or leave it out"
    raise ModelError(
        f"model.chatTemplate: {quoted(template)} is neither {' or '.join(TEMPLATES)} nor Jinja "
        f"text that names messages: {fix}"
    )


def _with_objects(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    # many templates take arguments that are objects alone
    return [
        {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    is_text = isinstance(function["arguments"], str)
    return {**call, "function": {**function, "arguments": {}}} if is_text else call


def _marked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The mark at the end of the last message shows where the template puts that end."""
    return [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + _END_MARK}]


def _cut_at_mark(text: str) -> str:
    end = text.rfind(_END_MARK.rstrip())
    if end < 0:
        name = "continue_final_message"
        raise field_error(
            name, "the model's chat template changes the last message: send it without"
        )
    keeps_space = text.startswith(_END_MARK, end)
    return text[:end] if keeps_space else text[:end].rstrip()


def _names_in(source: str) -> set[str]:
    return meta.find_undeclared_variables(_environment().parse(source))


def _compiled(source: str) -> jinja2.Template:
    try:
        template = _environment().from_string(source)
    except jinja2.TemplateSyntaxError as e:
        raise ModelError(f"chat template, line {e.lineno}: {e.message}") from e
    # They are copied for each rendering, and Jinja's chain of maps is slow to copy.
    template.globals = dict(template.globals)
    return template


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        **{name: options[name] for name in _JSON_OPTIONS & options.keys()},
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _named(templates: Any, name: str) -> str | None:
    if isinstance(templates, list):
        return next((item["template"] for item in templates if item.get("name") == name), None)
    return templates if isinstance(templates, str) else None


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)
