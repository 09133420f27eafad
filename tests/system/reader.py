"""A reader of the documentation's paths: it types each block as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

ADDRESS = "http://127.0.0.1:8000"  # of the API, in all pages
SECONDS = 500.0


def blocks(page: str) -> list[str]:
    """The indented blocks of a page, in order, without their indentation."""
    found = re.findall(r"(?:^    .*\n(?:\n(?=    ))*)+", page, re.MULTILINE)
    return [re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in found]


class Reader:
    """Types what the page says, in a folder with the examples."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = ADDRESS
        self.request = ""  # x-request-id of the last answer that had one
        self.environment = os.environ | {
            "XDG_STATE_HOME": str(folder / "state"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def type(self, block: str) -> str:
        """Run a block, to its end or until one of its commands fails; what it printed."""
        shell = [sys.executable] if block.startswith("from ") else ["bash", "-e"]
        text = block.replace(ADDRESS, self.address).replace("--request ID", self.request)
        done = subprocess.run(
            shell,
            input=text,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        if found := re.search(r"^x-request-id: (\S+)", done.stdout, re.MULTILINE):
            self.request = f"--request {found[1]}"
        return done.stdout
