"""One folder of the sample chat model: the Makefile, the examples and the tests agree, whatever the
environment says.
"""

import os
import subprocess
from pathlib import Path

import pytest

from pdcluster_schema.load import load
from pdctl.local.model import cached_model
from tests.chat_model import FOLDER, chat_model

ROOT = Path(__file__).parents[2]


def test_makefile_makes_the_folder_of_the_tests() -> None:
    """With a CACHE in the environment, which must not matter."""
    printed = subprocess.run(
        ["make", "--no-print-directory", "--eval", "folder: ; @echo $(MODEL)", "folder"],
        cwd=ROOT,
        env={**os.environ, "CACHE": "/elsewhere"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert printed.stdout.strip() == str(FOLDER)


@pytest.mark.parametrize("name", ["chat.yaml", "two-by-two.yaml", "mixed.yaml"])
def test_pdctl_finds_the_model_of_an_example_in_the_folder_of_the_tests(name: str) -> None:
    assert cached_model(load(ROOT / "examples" / name).spec.model) == FOLDER


def test_missing_model_fails_the_test_and_names_the_target(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="not complete: run `make model`"):
        chat_model(tmp_path)

    (tmp_path / ".ready").touch()
    assert chat_model(tmp_path) == tmp_path
