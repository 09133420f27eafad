"""The word checker on small files: plain words pass, a private word or a bare opening is named."""

from pathlib import Path

import pytest

from tests.scripts.checker import run_script

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_words.py"


def test_words_that_name_the_thing_pass(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(
        '"""Drain pods."""\n\n\ndef told_pods(wish: int) -> str:\n'
        '    """Return whether a pod is retold."""\n'
        '    return f"pods {wish}" + "told"  # a user who asks\n'
    )

    result = run_script("check_words.py", tmp_path)

    assert result.stdout == "check_words: 1 files, 0 problems\n"
    assert result.returncode == 0


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        pytest.param(
            '"""Pods.\n\nNobody asks."""\n', '3: "nobody" is a private word', id="docstring"
        ),
        pytest.param(
            '"""Pods."""\nx = 1  # made anew\n', '2: "anew" is a private word', id="comment"
        ),
        pytest.param(
            '"""Pods."""\nx = "it was told"\n', '2: "told" is a private word', id="message"
        ),
        pytest.param('"""Pods."""\nx = f"{x} was told"\n', '2: "told" is a private', id="f-string"),
        pytest.param(
            '"""Pods."""\n\n\nasync def test_pods_are_put_back():\n    pass\n',
            '4: "put back" is a private word',
            id="name of a test",
        ),
        pytest.param('"""Waits for\never."""\n', '1: "for ever" is a private word', id="two lines"),
        pytest.param(
            '"""Pods."""\n\n\ndef f() -> None:\n    """Why, by pod."""\n',
            '5: docstring opens with "Why"',
            id="opening of a function",
        ),
        pytest.param(
            '"""Pods."""\nX = 1\n"""Of one pod."""\n',
            '3: docstring opens with "Of"',
            id="of a constant",
        ),
        pytest.param('"""How pods end."""\n', '1: docstring opens with "How"', id="of a module"),
        pytest.param(
            '"""Pods."""\nclass A:\n    """What it is."""\n',
            '3: docstring opens with "What"',
            id="of a class",
        ),
    ],
)
def test_each_breach_is_named(tmp_path: Path, source: str, problem: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(source)

    result = run_script("check_words.py", tmp_path)

    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{path}:{problem}")
    assert lines[-1] == "check_words: 1 files, 1 problems"
    assert result.returncode == 1


@pytest.mark.parametrize(
    ("name", "source", "problem"),
    [
        ("page.md", "# Pods\n\nA pod who waits.\n", '3: "who" is a private word'),
        (
            "crd.yaml",
            "a:\n  description: Whether it is so.\n",
            '2: description opens with "Whether"',
        ),
        ("values.yaml", "replicas: 1 # besides others\n", '1: "besides" is a private word'),
    ],
)
def test_texts_are_read_too(tmp_path: Path, name: str, source: str, problem: str) -> None:
    (tmp_path / name).write_text(source)

    result = run_script("check_words.py", tmp_path)

    assert result.stdout.splitlines()[0].startswith(f"{tmp_path / name}:{problem}")
    assert result.returncode == 1
