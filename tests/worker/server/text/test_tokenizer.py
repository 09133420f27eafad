"""Reading a model folder: what may be missing, what is refused, and that torch stays out of the
server process.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pdcluster_worker.errors import ModelError, RequestError
from pdcluster_worker.server.text.chat_template import TemplateInput
from pdcluster_worker.server.text.tokenizer import Tokenizer
from tests.chat_model import chat_model

HELLO = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def test_server_modules_load_neither_torch_nor_transformers():
    code = (
        "import sys, pdcluster_worker.server.app, pdcluster_worker.server.http.run, "
        "pdcluster_worker.serving.engines.metrics;"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config.json": {"eos_token_id": [7, 8]}}, [7, 8]),
        ({"generation_config.json": {"eos_token_id": 9}}, [9]),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 5}}, [5]),
        ({"generation_config.json": None}, [258]),
        (
            {
                "generation_config.json": None,
                "tokenizer_config.json": {"eos_token": {"content": "<|im_start|>"}},
            },
            [257],
        ),
        ({"generation_config.json": None, "tokenizer_config.json": None}, []),
        ({"generation_config.json": None, "tokenizer_config.json": {"eos_token": "nothing"}}, []),
    ],
)
def test_eos_ids_come_from_the_first_file_that_names_them(folder, files, expected):
    for name, content in files.items():
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_text(json.dumps(content))

    assert Tokenizer.load(folder).eos_token_ids == expected


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "m.gguf").touch()
    with pytest.raises(
        ModelError, match=r"no tokenizer\.json: .*m\.gguf is GGUF, which a worker does not"
    ):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_broken_file_is_named(folder, name, content):
    (folder / name).write_text(content)

    with pytest.raises(ModelError, match=name):
        Tokenizer.load(folder)


def test_chat_without_a_template_is_a_clear_error(folder):
    (folder / "chat_template.jinja").unlink()

    with pytest.raises(RequestError, match="no chat template: use /v1/completions"):
        Tokenizer.load(folder).encode_chat(TemplateInput(HELLO))


@pytest.mark.parametrize("as_list", [False, True])
def test_template_may_be_in_tokenizer_config(folder, as_list):
    (folder / "chat_template.jinja").unlink()
    source = (
        "{{ bos_token }}{% generation %}{{ messages[0].content }}{% endgeneration %}{{ messages | "
        "tojson }}{{ strftime_now('%%') }}"
    )
    template = (
        [{"name": "tool_use", "template": "x"}, {"name": "default", "template": source}]
        if as_list
        else source
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|im_start|>", "chat_template": template})
    )
    tokenizer = Tokenizer.load(folder)
    expected = '<|im_start|>é[{"role": "user", "content": "é"}]%'

    assert (
        tokenizer.encode_chat(TemplateInput([{"role": "user", "content": "é"}]))
    ).token_ids == tokenizer._tokenizer.encode(expected).ids


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ nothing.here }}",
    ],
)
def test_a_template_that_refuses_is_a_400(folder, template):
    (folder / "chat_template.jinja").write_text(template)

    with pytest.raises(RequestError, match="chat template refuses these messages") as caught:
        Tokenizer.load(folder).encode_chat(TemplateInput(HELLO))
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_a_template_with_a_syntax_error_is_refused_at_load(folder):
    (folder / "chat_template.jinja").write_text("a\n{% if %}")

    with pytest.raises(ModelError, match="chat template, line 2"):
        Tokenizer.load(folder)


def test_long_texts_encode_as_short_ones_do(folder):
    tokenizer = Tokenizer.load(folder)
    text = "Hello é " * 2000

    prompt = (tokenizer.encode_chat(TemplateInput([{"role": "user", "content": text}]))).token_ids

    assert tokenizer.encode(["a", text]) == [
        tokenizer._tokenizer.encode(item).ids for item in ("a", text)
    ]
    assert tokenizer._tokenizer.decode(prompt, skip_special_tokens=False).count(text) == 1


def test_ids_beyond_the_vocabulary_have_no_bytes(folder):
    tokenizer = Tokenizer.load(folder)

    assert tokenizer.token_bytes(100_000) == b""
    assert tokenizer.token_bytes(256) == b"He"
    assert [tokenizer.is_special(i) for i in (256, 257, 258)] == [False, True, True]


@pytest.mark.model
def test_sample_model_renders_as_transformers_does():
    transformers = pytest.importorskip("transformers")
    folder = chat_model()
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.load(folder)
    messages = [
        {"role": "user", "content": "What is the capital of France? Né 日本"},
        {"role": "assistant", "content": "Paris."},
    ]

    assert (ours.encode_chat(TemplateInput(messages))).token_ids == theirs.apply_chat_template(
        messages, add_generation_prompt=True
    )["input_ids"]
    assert ours.encode(["Hello  world"]) == [theirs("Hello  world")["input_ids"]]
    assert b"".join(map(ours.token_bytes, range(2000))).decode(errors="replace") == theirs.decode(
        range(2000)
    )
    assert ours.eos_token_ids == [2]
