"""Text to tokens and back, without transformers, which would load torch (0.5 GB)."""

import codecs
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from pdcluster_worker import token_bytes
from pdcluster_worker.errors import ModelError, RequestError
from pdcluster_worker.server.text.chat_template import ChatTemplate, TemplateInput
from pdcluster_worker.system.fingerprint import gguf_fix

_Utf8 = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class Piece:
    """text: None where the bytes are not whole characters."""

    raw: bytes
    text: str | None = field(init=False)

    def __post_init__(self) -> None:
        try:
            text = self.raw.decode()
        except UnicodeDecodeError:
            text = None
        object.__setattr__(self, "text", text)


class Detokenizer:
    def __init__(self) -> None:
        self._utf8 = _Utf8(errors="replace")
        self._holds = False  # the beginning of a character

    def feed(self, piece: Piece) -> str:
        if piece.text is not None and not self._holds:
            return piece.text
        text = self._utf8.decode(piece.raw)
        self._holds = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation: its text, and the tokens of that."""

    text: str
    token_ids: list[int]


class Tokenizer:
    """eos_token_ids: of generation_config.json, else config.json, else the tokenizer's own."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        template: ChatTemplate | None,
        eos_token_ids: list[int],
    ) -> None:
        self._tokenizer = tokenizer
        self.chat_template = template
        self._pieces: dict[int, Piece] = {}
        self.eos_token_ids = eos_token_ids

    @classmethod
    def load(cls, folder: Path, chat_template: str | None = None) -> "Tokenizer":
        """Raises ModelError naming the file that is missing or wrong."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(
                f"{folder}: no tokenizer.json: save the model with its fast tokenizer "
                f"(AutoTokenizer.save_pretrained){gguf_fix(folder)}"
            )
        tokenizer = _read_tokenizer(path)
        config = _read_json(folder / "tokenizer_config.json")
        loaded = cls(
            tokenizer,
            ChatTemplate.load(folder, config, chat_template),
            _eos_token_ids(folder, tokenizer, config),
        )
        loaded.token_bytes(0)  # an unsupported decoder shows at start, not at the first answer
        return loaded

    @classmethod
    def of_engine(cls, folder: Path) -> "Tokenizer":
        """Beside an engine's own front end: names of tokens, where there is a tokenizer.json, and
        no chat template.  Raises ModelError.
        """
        path = folder / "tokenizer.json"
        config = _read_json(folder / "tokenizer_config.json")
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        if path.is_file():
            tokenizer = _read_tokenizer(path)
        return cls(tokenizer, None, _eos_token_ids(folder, tokenizer, config))

    @property
    def has_names(self) -> bool:
        return self._tokenizer.get_vocab_size() > 0

    # Of the library's calls the batch ones let go of the interpreter lock, without which a thread
    # would not help.

    def encode(self, texts: list[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode_batch([token_ids], skip_special_tokens=False)[0]

    def token(self, token_id: int) -> str:
        """A token as its vocabulary spells it; "" for an id beyond it."""
        return self._tokenizer.id_to_token(token_id) or ""

    def encode_chat(self, given: TemplateInput) -> ChatPrompt:
        """Raises RequestError without a chat template, and when that refuses the messages."""
        template = self.chat_template
        if template is None:
            raise RequestError(
                "this model has no chat template: use /v1/completions, or set model.chatTemplate",
                param="messages",
            )
        text = template.render(given)
        return ChatPrompt(text, self.encode([text], add_special_tokens=False)[0])

    def token_bytes(self, token_id: int) -> bytes:
        """b"" for an id beyond the vocabulary (padded embeddings)."""
        return self.piece(token_id).raw

    def piece(self, token_id: int) -> Piece:
        known = self._pieces.get(token_id)
        if known is None:
            token = self._tokenizer.id_to_token(token_id)
            known = self._pieces[token_id] = Piece(b"" if token is None else self._read(token))
        return known

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    @cached_property
    def _read(self) -> Any:
        return token_bytes.reader_for(json.loads(self._tokenizer.to_str())["decoder"])

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(
            id_
            for id_, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        )


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises bare Exception
        raise ModelError(f"{path}: cannot be read: {e}") from e
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _eos_token_ids(
    folder: Path, tokenizer: tokenizers.Tokenizer, config: dict[str, Any]
) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        if value is not None:
            return value if isinstance(value, list) else [value]
    token = config.get("eos_token")
    token_id = (
        tokenizer.token_to_id(token["content"] if isinstance(token, dict) else token)
        if token
        else None
    )
    return [] if token_id is None else [token_id]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as e:
        raise ModelError(f"{path}: cannot be read: {e}") from e
