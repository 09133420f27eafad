"""Chat templates that come with the worker, for conversations with tools: `chatml-tools` is ChatML
with tools in Hermes' form, for models trained on ChatML whose own template has no tools.
"""

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
