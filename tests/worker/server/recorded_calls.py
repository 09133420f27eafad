"""Outputs in the forms in which families of models write calls of tools, and what they mean.

Each has the tools of `TOOLS`, and is what such a model writes after its chat template's opening.
"""

from dataclasses import dataclass

from pdcluster_worker.server.tools.calls import Tool
from pdcluster_worker.server.tools.registry import ParserName

TOOLS = {
    "get_weather": Tool(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "hourly": {"type": "boolean"},
                "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "where": {"type": "object"},
            },
        },
    ),
    "now": Tool("now"),
}
PARIS = ("get_weather", {"city": "Paris"})
NOW: tuple[str, dict[str, object]] = ("now", {})


@dataclass(frozen=True)
class Recorded:
    """A model's output; text: what of it is no call."""

    parser: ParserName
    output: str
    calls: tuple[tuple[str, dict[str, object]], ...] = ()
    text: str = ""


HERMES_PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
HERMES_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
CODER_PARIS = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "<parameter=hourly>\nTrue\n</parameter>\n<parameter=units>\nnull\n</parameter>\n"
    '<parameter=where>\n{"near": [1, 2]}\n</parameter>\n</function>\n</tool_call>'
)
CODER_MEANS = (
    "get_weather",
    {"city": "Paris", "days": 3, "hourly": True, "units": None, "where": {"near": [1, 2]}},
)

HERMES_MARKS = (
    '<tool_call>\n{"name": "get_weather", "arguments": '
    '{"city": "a\\\\\\"</tool_call>{\\"<tool_call>"}}\n</tool_call>'
)
MARKS = ("get_weather", {"city": 'a\\"</tool_call>{"<tool_call>'})
CODER_MARKS = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\n"
    "</tool_call></function><function=now><tool_call>\n</parameter>\n</function>\n</tool_call>"
)
CODER_MARKED = ("get_weather", {"city": "</tool_call></function><function=now><tool_call>"})

RECORDED = [
    Recorded("hermes", HERMES_PARIS, (PARIS,)),
    Recorded(
        "hermes", f"Let me look.\n\n{HERMES_PARIS}\n{HERMES_NOW}\n", (PARIS, NOW), "Let me look."
    ),
    Recorded("hermes", HERMES_PARIS.removesuffix("</tool_call>"), (PARIS,)),
    Recorded(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
        (PARIS,),
    ),
    Recorded("hermes", '<tool_call>{"name": "now"}</tool_call> done', (NOW,), "done"),
    Recorded(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "a\nb"}}</tool_call>',
        (("get_weather", {"city": "a\nb"}),),
    ),
    Recorded("hermes", f"{HERMES_MARKS}\n{HERMES_NOW}.", (MARKS, NOW), "."),
    Recorded("hermes", HERMES_MARKS.removesuffix("</tool_call>"), (MARKS,)),
    Recorded(
        "hermes",
        f'<tool_call>{{"name": "x</tool_call>{HERMES_NOW} "',
        (NOW,),
        '<tool_call>{"name": "x</tool_call>"',
    ),
    Recorded(
        "hermes",
        f'<tool_call>"</tool_call>{HERMES_NOW}<tool_call>"</tool_call><tool_call>',
        (NOW,),
        '<tool_call>"</tool_call><tool_call>"</tool_call><tool_call>',
    ),
    Recorded("qwen3_coder", CODER_PARIS, (CODER_MEANS,)),
    Recorded("qwen3_coder", f"{CODER_MARKS}\n{CODER_PARIS}", (CODER_MARKED, CODER_MEANS)),
    Recorded(
        "qwen3_coder",
        CODER_MARKS.removeprefix("<tool_call>\n").removesuffix("</tool_call>"),
        (CODER_MARKED,),
    ),
    Recorded(
        "qwen3_coder",
        f"<tool_call><function=now><parameter=x>1</function></tool_call>{CODER_PARIS}",
        (CODER_MEANS,),
        "<tool_call><function=now><parameter=x>1</function></tool_call>",
    ),
    Recorded(
        "qwen3_coder",
        "<tool_call><function=now><parameter=x></tool_call> and <function=now></function>",
        (NOW,),
        "<tool_call><function=now><parameter=x></tool_call> and",
    ),
    Recorded("qwen3_coder", f"I will.\n{CODER_PARIS}", (CODER_MEANS,), "I will."),
    Recorded("qwen3_coder", "<function=now>\n</function>", (NOW,)),
    Recorded(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nline 1\nline "
        "2\n</parameter>\n<parameter=days>\nmany\n</parameter>\n"
        "</function>\n</tool_call>",
        (("get_weather", {"city": "line 1\nline 2", "days": "many"}),),
    ),
    Recorded("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', (PARIS,)),
    Recorded("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}', (NOW,)),
    Recorded(
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": '
        "{}}",
        (PARIS, NOW),
    ),
    Recorded(
        "mistral",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", '
        '"arguments": {}}]',
        (PARIS, NOW),
    ),
    Recorded(
        "mistral",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}',
        (PARIS, NOW),
    ),
    Recorded(
        "mistral", "One moment. [TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}", (NOW,), "One moment."
    ),
    Recorded("mistral", '[TOOL_CALLS]get_weather{"city": "Paris"}', (PARIS,)),
    Recorded(
        "mistral",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "[TOOL_CALLS]"}[TOOL_CALLS]now[ARGS]{}',
        (("get_weather", {"city": "[TOOL_CALLS]"}), NOW),
    ),
    Recorded("pythonic", "[get_weather(city='Paris'), now()]", (PARIS, NOW)),
    Recorded("pythonic", "<|python_start|>[get_weather(city='Paris')]<|python_end|>", (PARIS,)),
    Recorded(
        "pythonic",
        "[get_weather(city='P', days=-2, hourly=true, units=null, where={'near': [1, None, "
        "False]})]",
        (
            (
                "get_weather",
                {
                    "city": "P",
                    "days": -2,
                    "hourly": True,
                    "units": None,
                    "where": {"near": [1, None, False]},
                },
            ),
        ),
    ),
]

_HEAD = '<tool_call>\n{"name": "get_weather", "arguments": '

MALFORMED = [
    Recorded(
        "hermes", '<tool_call>\n{"name": "get_weather", "arguments": {\'city\': 1}}\n</tool_call>'
    ),
    Recorded("hermes", '<tool_call>{"name": "launch", "arguments": {}}</tool_call>'),
    Recorded("hermes", f'{_HEAD}{{"city": "Par'),
    Recorded("hermes", f"{_HEAD}[1]}}</tool_call> and so on"),
    Recorded("hermes", f'{_HEAD}{{"x": NaN}}}}</tool_call>'),
    Recorded("hermes", "<tool_call>" + "[" * 50_000),
    Recorded("hermes", "a < b, <tool> and <tool_cal"),
    Recorded("hermes", "<tool_call></tool_call>"),
    Recorded("qwen3_coder", "<tool_call>\n<function=launch>\n</function>\n</tool_call>"),
    Recorded(
        "qwen3_coder", "<tool_call>\n<function=now>\n<parameter=x>\n1\n</function>\n</tool_call>"
    ),
    Recorded("qwen3_coder", "<tool_call>\nnow()\n</tool_call>"),
    Recorded("llama3_json", '{"name": "Bob", "parameters": {"age": 3}}'),
    Recorded("llama3_json", '{"answer": 42}'),
    Recorded("llama3_json", '{"name": "now", "parameters": {}} is what I would call'),
    Recorded("llama3_json", "  The answer is {}"),
    Recorded("mistral", "[TOOL_CALLS]launch[ARGS]{}"),
    Recorded("mistral", '[TOOL_CALLS][{"name": "now", "arguments": '),
    Recorded("mistral", "[TOOL_CALLS]"),
    Recorded("pythonic", "[get_weather('Paris')]"),
    Recorded("pythonic", "[get_weather(city=__import__('os'))]"),
    Recorded("pythonic", "[get_weather(**{})]"),
    Recorded("pythonic", "[1, 2]"),
    Recorded("pythonic", "[now(), "),
    Recorded("pythonic", "[" * 3000),
    Recorded("pythonic", "[now(x=1j)]"),
    Recorded("pythonic", "[now(x={[]: 1})]"),
    Recorded("pythonic", "[now(x={[1]})]"),
    Recorded("pythonic", '[now(x="\\ud800")]'),
    Recorded("hermes", '<tool_call>{"name": "now", "arguments": {"x": "\\ud800"}}</tool_call>'),
    Recorded("pythonic", "[]"),
]
