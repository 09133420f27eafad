"""The bytes of every token of a model, as a grammar sees them.

Control tokens are no text: a constrained answer has none but the one that ends
it.  The same bytes are what the server makes text of (`token_bytes`).
"""

import json
from pathlib import Path

import tokenizers

from pdcluster_worker.errors import ModelError
from pdcluster_worker.token_bytes import reader_for

NO_TEXT = b""
"""Text of control tokens, and of ids beyond the tokenizer's: never part of an answer."""


def read_vocabulary(folder: Path, vocab_size: int) -> list[bytes]:
    """One entry for each id of the model.

    Raises ModelError for a tokenizer that cannot be read.
    """
    path = folder / "tokenizer.json"
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises bare Exception
        raise ModelError(f"{path}: cannot be read: {e}") from e
    read = reader_for(json.loads(tokenizer.to_str())["decoder"])
    control = {
        token_id
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special
    }
    tokens = ((token_id, tokenizer.id_to_token(token_id)) for token_id in range(vocab_size))
    return [
        NO_TEXT if token is None or token_id in control else read(token)
        for token_id, token in tokens
    ]
