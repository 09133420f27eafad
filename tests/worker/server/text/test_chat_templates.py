"""Template that renders a conversation, and its arguments."""

import json
from pathlib import Path

import pytest

from pdcluster_worker.errors import ModelError
from pdcluster_worker.server.generation.chat_answer import (
    NO_PARSERS,
    ModelParsers,
    ParserNames,
    model_parsers,
)
from pdcluster_worker.server.text.chat_template import ChatTemplate, TemplateInput

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f"}}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}],
}


def test_a_template_of_ours_renders_conversations_with_tools_and_the_models_own_all_others(
    tmp_path: Path,
) -> None:
    (tmp_path / "chat_template.jinja").write_text("own: {{ messages[0].content }}")
    template = ChatTemplate.load(tmp_path, {}, "chatml-tools")

    assert template.takes_tools
    assert template.render(TemplateInput([USER])) == "own: Hi"
    for given in (
        TemplateInput([USER], [TOOL]),
        TemplateInput([USER, CALLED]),
        TemplateInput([{**USER, "role": "tool"}]),
    ):
        assert "<|im_start|>" in template.render(given)


def test_a_template_of_ours_renders_everything_where_the_model_has_none(tmp_path: Path) -> None:
    assert (
        ChatTemplate.load(tmp_path, {}, "chatml-tools")
        .render(TemplateInput([USER]))
        .startswith("<|im_start|>user\nHi")
    )
    assert ChatTemplate.load(tmp_path, {}) is None


def test_a_template_that_is_given_takes_the_place_of_the_models_own(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("own")
    template = ChatTemplate.load(
        tmp_path, {"bos_token": "<s>"}, "{{ bos_token }}{{ messages[0].role }}"
    )

    assert template.render(TemplateInput([USER])) == "<s>user"
    assert not template.takes_tools
    with pytest.raises(ModelError, match="chat template, line 1"):
        ChatTemplate.load(tmp_path, {}, "{% if %}")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("chatml-tool", "'chatml-tool' is neither chatml-tools .*: did you mean chatml-tools"),
        ("{{ bos_token }}messages", "model.chatTemplate: .* nor Jinja text that names messages"),
        ("{# {{ messages }} #}", "write the model's template, or leave it out"),
    ],
)
def test_a_template_that_shows_no_messages_is_refused(
    tmp_path: Path, given: str, words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        ChatTemplate.load(tmp_path, {}, given)


def test_a_models_own_template_for_tools_is_used_for_them(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | tojson(indent=None) }}"},
    ]
    template = ChatTemplate.load(tmp_path, {"chat_template": named})

    assert template.render(TemplateInput([USER])) == "plain"
    assert json.loads(template.render(TemplateInput([USER], [TOOL]))) == [TOOL]


def test_settings_reach_the_template_and_cannot_take_the_place_of_messages() -> None:
    template = ChatTemplate("{{ messages[0].content }} {{ depth }} {{ add_generation_prompt }}", {})

    assert (
        template.render(TemplateInput([USER], kwargs={"depth": 3, "messages": []}, opens=False))
        == "Hi 3 False"
    )


def test_an_answer_goes_on_where_the_last_message_ends() -> None:
    template = ChatTemplate(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }} [end]{% endfor %}", {}
    )
    messages = [USER, {"role": "assistant", "content": "Hi, Hi "}]

    assert (
        template.render(TemplateInput(messages, opens=False, continues=True))
        == "[user] Hi [end][assistant] Hi, Hi "
    )


@pytest.mark.parametrize("last", ["e", "[", " [end]", "Hi", "end] "])
@pytest.mark.parametrize(("strips", "kept"), [("", str), (" | trim", str.strip)])
def test_what_follows_the_last_message_is_never_taken_for_its_end(
    last: str, strips: str, kept
) -> None:
    template = ChatTemplate(
        "{% for m in messages %}[{{ m.role }}] {{ m.content" + strips + " }} [end]{% endfor %}", {}
    )
    messages = [USER, {"role": "assistant", "content": last}]
    text = template.render(TemplateInput(messages, opens=False, continues=True))

    assert text == "[user] Hi [end][assistant] " + kept(last)


def test_parsers_are_as_configured_or_as_the_template_shows(tmp_path: Path) -> None:
    own = "{{ messages }}<think></think>"
    (tmp_path / "chat_template.jinja").write_text(own)
    template = ChatTemplate.load(tmp_path, {}, "chatml-tools")

    assert model_parsers(ParserNames(), template) == ModelParsers(
        "hermes", "qwen3", takes_tools=True
    )
    assert model_parsers(ParserNames("none", "none"), template) == ModelParsers(
        None, None, takes_tools=True, leaves_calls=True
    )
    assert model_parsers(ParserNames("mistral", "deepseek_r1"), template) == ModelParsers(
        "mistral", "deepseek_r1", takes_tools=True
    )
    assert model_parsers(ParserNames("hermes", "qwen3"), None) == NO_PARSERS
