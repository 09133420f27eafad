"""A tokenizer whose text shows its tokens: token 17 is "[17]", so an answer's text shows its tokens
exactly.
"""

import json
import re
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

_TOKEN = re.compile(r"\[(\d+)\]")

CHAT_TEMPLATE = "{% for message in messages %}[1]{{ message['content'] }}[2]{% endfor %}"
"""A conversation of such texts; tokens 1 and 2 stand around each message."""


def text_of(token_ids: list[int]) -> str:
    return "".join(f"[{token_id}]" for token_id in token_ids)


def tokens_in(text: str) -> list[int]:
    """The tokens of a text.  Raises AssertionError if it holds anything else."""
    token_ids = [int(digits) for digits in _TOKEN.findall(text)]
    assert text_of(token_ids) == text, f"not made of whole tokens: {text!r}"
    return token_ids


def chat_tokens(content: list[int]) -> list[int]:
    return [1, *content, 2]


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Put the tokenizer into a model folder, in place of the one that is there."""
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = Tokenizer(
        models.WordLevel(
            {f"[{token_id}]": token_id for token_id in range(vocab_size)}, unk_token="[0]"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\[\d+\]"), behavior="isolated")
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
