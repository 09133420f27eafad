"""Pictures of the page of a real run, for the site: light, dark and on a phone.

    page_pictures.py FOLDER

Serves examples/chat.yaml, asks it once with a remote prefill, and writes page-*.png into FOLDER.
"""

import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import sync_playwright

SCREENS = {
    "light": {"viewport": {"width": 1200, "height": 800}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1200, "height": 800}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 360, "height": 780}, "device_scale_factor": 2},
}
CHROMIUM = "/usr/bin/chromium"


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with served() as url, sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        for name, screen in SCREENS.items():
            page = browser.new_context(**screen).new_page()
            page.goto(url)
            page.get_by_role("combobox", name="Prefill").select_option("remote")
            page.get_by_label("Message").fill("What is the capital of France?")
            page.get_by_role("button", name="Send").click()
            page.wait_for_selector("#spans li", timeout=120_000)
            page.wait_for_selector("#replicas path", state="attached", timeout=120_000)
            page.screenshot(path=folder / f"page-{name}.png", full_page=True)
        browser.close()


@contextmanager
def served() -> Iterator[str]:
    """Address of a cluster that runs meanwhile."""
    with tempfile.TemporaryDirectory() as state:
        options = ["--port", "0", "--no-progress", "--state-dir", state]
        command = [sys.executable, "-m", "pdctl", "up", "examples/chat.yaml", *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if found := re.match(r"page: +(\S+)", line):
                    yield found[1]
                    return
            raise SystemExit("page_pictures: pdctl up ended before it was ready")
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
