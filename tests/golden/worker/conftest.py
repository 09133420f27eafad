"""Fixtures of several records of the worker."""

from pathlib import Path

import pytest

from tests.worker.server.conftest import build_model_folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of bytes and a configuration; it has no weights."""
    folder = build_model_folder(tmp_path_factory.mktemp("model"))
    (folder / "config.json").write_text('{"max_position_embeddings": 512, "vocab_size": 259}')
    return folder
