"""Token bytes, incremental decoding, and what of them a choice shows."""

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from pdcluster_worker import token_bytes
from pdcluster_worker.errors import ModelError
from pdcluster_worker.messages.requests import Token
from pdcluster_worker.server.generation.choice import AnswerRules, Choice
from pdcluster_worker.server.text.tokenizer import Detokenizer, Piece, Tokenizer


def decoded(tokens: list[bytes]) -> list[str]:
    detokenizer = Detokenizer()
    return [*(detokenizer.feed(Piece(token)) for token in tokens), detokenizer.flush()]


def byte_level_tokenizer() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens(["é b"])
    return tokenizer


BYTE_LEVEL = byte_level_tokenizer()


@given(st.lists(st.binary(max_size=5), max_size=20))
def test_pieces_joined_are_the_whole_decoded_at_once(tokens):
    assert "".join(decoded(tokens)) == b"".join(tokens).decode(errors="replace")


@given(st.lists(st.integers(0, 257), max_size=40))
def test_byte_level_pieces_are_what_the_tokenizer_library_decodes(token_ids):
    tokens = [token_bytes.byte_level(BYTE_LEVEL.id_to_token(i)) for i in token_ids]

    assert "".join(decoded(tokens)) == BYTE_LEVEL.decode(token_ids, skip_special_tokens=False)


@given(st.text(max_size=30))
def test_sentencepiece_pieces_are_what_the_tokenizer_library_decodes(text):
    tokens = [
        f"<0x{byte:02X}>" if byte > 127 else chr(byte).replace(" ", "\u2581")
        for byte in text.encode()
    ]
    library = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )

    assert "".join(
        decoded([token_bytes.sentencepiece(token) for token in tokens])
    ) == library.decode(tokens)


def test_a_character_appears_with_its_last_byte():
    assert decoded([b"\xf0", b"\x9f\x9a", b"\x80", b"\xe2"]) == ["", "", "🚀", "", "\ufffd"]


@pytest.mark.parametrize(
    ("decoder", "reader"),
    [
        ({"type": "ByteLevel"}, token_bytes.byte_level),
        ({"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}, token_bytes.byte_level),
        ({"type": "Metaspace"}, token_bytes.sentencepiece),
        (
            {
                "type": "Sequence",
                "decoders": [{"type": "Replace", "content": " "}, {"type": "ByteFallback"}],
            },
            token_bytes.sentencepiece,
        ),
    ],
)
def test_reader_is_chosen_by_the_decoder(decoder, reader):
    assert token_bytes.reader_for(decoder) is reader


@pytest.mark.parametrize(
    "decoder", [None, {"type": "WordPiece"}, {"type": "Sequence", "decoders": []}]
)
def test_other_decoders_are_refused(decoder):
    with pytest.raises(ModelError, match=r"tokenizer\.json: decoder .* is not supported"):
        token_bytes.reader_for(decoder)


def run(
    tokenizer: Tokenizer, rules: AnswerRules, text: str, last: Token | None = None
) -> tuple[str, str | None]:
    choice = Choice(0, tokenizer, rules)
    shown = ""
    for character in text.encode():
        delta = choice.feed(Token("r", tokenizer._tokenizer.token_to_id(CHARACTERS[character])))
        shown += delta.text
        if delta.finish_reason:
            return shown, delta.finish_reason
    if last is not None:
        shown += choice.feed(last).text
    return shown, choice.finish_reason


CHARACTERS = {byte: character for character, byte in token_bytes._ALPHABET.items()}
EOS = Token("r", 258, finish_reason="stop")


@pytest.fixture
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(model_folder)


def test_choice_hides_the_token_that_stopped_it(tokenizer):
    assert run(tokenizer, AnswerRules(), "ab", EOS) == ("ab", "stop")
    assert run(tokenizer, AnswerRules(skip_special=False), "ab", EOS) == ("ab", "stop")
    assert run(tokenizer, AnswerRules(skip_special=False, include_stop=True), "ab", EOS) == (
        "ab<|im_end|>",
        "stop",
    )


def test_choice_shows_control_tokens_only_on_request(tokenizer):
    last = Token("r", 257, finish_reason="length")

    assert run(tokenizer, AnswerRules(), "ab", last) == ("ab", "length")
    assert run(tokenizer, AnswerRules(skip_special=False), "ab", last) == (
        "ab<|im_start|>",
        "length",
    )


def test_choice_gives_held_text_at_the_end(tokenizer):
    assert run(tokenizer, AnswerRules(stop=("bcd",)), "abc", EOS) == ("abc", "stop")


def test_choice_flushes_a_cut_off_character(tokenizer):
    cut = Token("r", tokenizer._tokenizer.token_to_id(CHARACTERS[0xE2]), finish_reason="length")

    assert run(tokenizer, AnswerRules(stop=("z",)), "ab", cut) == ("ab\ufffd", "length")


def test_stop_strings_count_after_min_tokens(tokenizer):
    assert run(tokenizer, AnswerRules(stop=("b",), min_tokens=2), "abab", EOS) == ("aba", "stop")
    assert run(tokenizer, AnswerRules(stop=("ab",), min_tokens=3), "abab", EOS) == ("abab", "stop")


def test_a_stop_string_in_the_last_token_wins_over_length(tokenizer):
    last = Token("r", tokenizer._tokenizer.token_to_id("b"), finish_reason="length")

    assert run(tokenizer, AnswerRules(stop=("ab",)), "xa", last) == ("x", "stop")
