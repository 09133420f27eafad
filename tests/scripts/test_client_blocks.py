"""The blocks of a page of clients: their headings, packages and programs, and the table of
outcomes.
"""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from client_blocks import Block, blocks, with_port, with_results

SCRIPTS = Path(__file__).parents[2] / "scripts"

PAGE = """# Clients

## One

```python
# pip install one two[x]
print("http://127.0.0.1:8000/v1")
```

```javascript
// npm install three
console.log(1);
```

## Two

```bash
# pip install four
four --go
```

## Tested

<!-- tested -->
old
"""


def test_blocks_have_their_heading_packages_and_program() -> None:
    found = blocks(PAGE)

    assert found[0] == Block(
        "One",
        "python",
        ("one", "two[x]"),
        '# pip install one two[x]\nprint("http://127.0.0.1:8000/v1")\n',
    )
    assert [(block.title, block.packages, block.program, block.suffix) for block in found[1:]] == [
        ("One", ("three",), "node", "mjs"),
        ("Two", ("four",), "bash", "sh"),
    ]


@pytest.mark.parametrize("first", ["print(1)", "# install one"])
def test_a_block_that_names_no_packages_is_refused(first: str) -> None:
    with pytest.raises(ValueError, match="A: a block of python begins with"):
        blocks(f"## A\n```python\n{first}\n```\n")


def test_the_port_is_all_that_changes() -> None:
    assert (
        with_port(blocks(PAGE)[0].code, 123).splitlines()[1] == 'print("http://127.0.0.1:123/v1")'
    )


def test_outcomes_take_the_place_of_older_ones() -> None:
    page = with_results(PAGE, [("One", "one 1.0", True), ("Two", "four 2", False)], "2026-01-02")

    assert page.endswith(
        "<!-- tested -->\n| block | newest version on 2026-01-02 | |\n| --- | --- | --- |\n"
        "| One | one 1.0 | passed |\n| Two | four 2 | failed |\n"
    )
    assert blocks(page) == blocks(PAGE)


def test_a_word_of_no_heading_is_refused_before_anything_starts() -> None:
    command = [sys.executable, str(SCRIPTS / "clients.py"), "--only", "pydantic-ai"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert "no heading has one of these words; there are OpenAI, Python, " in done.stderr
