"""`pdctl chat` with servers that answer as a test says, and a terminal of the kernel; with a real
cluster in tests/system/test_up_model.
"""

import contextlib
import json
import os
import pty
import select
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pdctl.cli.main import app
from pdctl.local.run_directory import RunDirectory, write_api_key
from tests.operator.pdctl.bench.small_servers import events, serving_aside, usage
from tests.operator.pdctl.run_of_up import BY_A_USER

ENOUGH_SECONDS = 60.0


def content_events(*words: str) -> bytes:
    """An answer of these words, as a stream."""
    deltas = [{"choices": [{"index": 0, "delta": {"content": word}}]} for word in words]
    return events(*deltas, usage(len(words)), b"[DONE]")


def last_words(body: dict[str, Any]) -> bytes:
    return content_events("you said ", body["messages"][-1]["content"])


def chat(url: str, prompt: str, *options: str) -> Any:
    return CliRunner().invoke(app, ["chat", "--url", url, *options], input=prompt)


def test_stdin_is_one_prompt_and_stdout_the_answer_alone() -> None:
    with serving_aside(last_words) as server:
        result = chat(f"{server.base_url}/v1/", "two\nlines\n")

    assert (result.exit_code, result.stdout) == (0, "you said two\nlines\n")
    assert result.stderr.split(",")[0].endswith(" ms to the first token")
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "two\nlines"}]
    assert server.bodies[0]["model"] == "small"


def test_model_and_temperature_of_the_options_are_sent() -> None:
    with serving_aside(last_words) as server:
        assert chat(server.base_url, "hi", "--model", "large", "--temperature", "0").exit_code == 0

    assert (server.bodies[0]["model"], server.bodies[0]["temperature"]) == ("large", 0)


@pytest.mark.parametrize(("options", "asked_for"), [([], 512), (["--max-tokens", "2"], 2)])
def test_an_answer_is_cut_at_max_tokens_and_the_figures_say_so(
    options: list[str], asked_for: int
) -> None:
    end = events({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
    with serving_aside(lambda body: end + content_events("one", "two")) as server:
        result = chat(server.base_url, "hi", *options)

    assert server.bodies[0]["max_tokens"] == asked_for
    assert result.stderr.endswith(", cut by its length: see --max-tokens\n")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (events(b"{}"), "the answer ended early: an event without choices: b'{}'"),
        (events({"error": {"message": "lost"}}), "the answer ended early: error event: "),
        (events({"choices": []}), "the answer ended early: its stream has no end"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error(answer: bytes, error: str) -> None:
    with serving_aside(lambda body: answer) as server:
        result = chat(server.base_url, "hi")

    assert result.exit_code == 1
    assert f"error: {error}" in result.stderr


def test_control_characters_are_shown_of_an_answer_are_shown_by_their_codes() -> None:
    title, clipboard = "\x1b]0;mine\x07", "\x9d52;c;bWluZQ==\x9c"
    thought = {"choices": [{"delta": {"reasoning_content": title}}]}
    with serving_aside(
        lambda body: events(thought) + content_events(title, "\n\ta", clipboard)
    ) as server:
        result = chat(server.base_url, "hi")

    shown = "\\x1b]0;mine\\x07"
    assert result.stdout == f"{shown}\n\ta\\x9d52;c;bWluZQ==\\x9c\n"
    assert result.stderr.startswith(shown)


def test_control_characters_of_an_error_are_shown_by_their_codes() -> None:
    with serving_aside(lambda body: events({"error": "\x1b[2J"})) as server:
        result = chat(server.base_url, "hi")

    assert result.stderr == "error: the answer ended early: error event: \\x1b[2J\n"


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ({"choices": [1]}, "AttributeError"),
        ({"choices": [{"delta": {"content": 5}}]}, "TypeError"),
        (
            {"choices": [], "usage": {"completion_tokens": "many"}},
            "TypeError(\"usage.completion_tokens is 'many'\")",
        ),
    ],
)
def test_a_server_of_another_api_is_named(event: dict[str, Any], reason: str) -> None:
    with serving_aside(lambda body: events(event)) as server:
        result = chat(server.base_url, "hi")

    assert result.exit_code == 1
    assert f"an event is not of OpenAI's API: {reason}" in result.stderr


def test_halves_of_a_surrogate_pair_are_joined_and_one_alone_is_replaced() -> None:
    with serving_aside(
        lambda body: content_events("a\ud83d", "\ude00b", "\ude00", "\ud83d", "c")
    ) as server:
        result = chat(server.base_url, "hi")

    assert (result.exit_code, result.stdout) == (0, "a\U0001f600b\ufffd\ufffdc\n")


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        result = chat(url, "hi")

    assert (result.exit_code, result.stderr) == (
        1,
        f"error: nothing answers at {url}: Connection refused; is the server running there?\n",
    )


@pytest.mark.parametrize(
    ("arguments", "prompt", "error"),
    [
        (["--url", "127.0.0.1:8000"], "hi", "--url: must begin with http:// or https://, not '127"),
        (["chat", "--url", "http://a"], "hi", "give a NAME or --url, not both"),
        (["--url", "http://a"], " \n", "stdin is empty; write a prompt to it"),
        (["--api-key", "sec\nret"], "hi", "--api-key, or PDCLUSTER_API_KEY: a client can send "),
    ],
)
def test_wrong_input_is_named(arguments: list[str], prompt: str, error: str) -> None:
    result = CliRunner().invoke(app, ["chat", *arguments], input=prompt)

    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {error}")


def run_at(state_dir: Path, http: str | None) -> RunDirectory:
    run = RunDirectory.create(state_dir, "chat")
    workers = [{"name": "decode-0", "http": http}]
    run.write_state({"name": "chat", "model": "tiny", "ingress": "decode-0", "workers": workers})
    return run


def test_the_cluster_that_runs_here_gets_its_own_key(tmp_path: Path) -> None:
    with serving_aside(last_words) as server:
        run = run_at(tmp_path, server.base_url.removeprefix("http://"))
        write_api_key(run.path / "api-keys", "sesame")
        result = CliRunner().invoke(app, ["chat", "--state-dir", str(tmp_path)], input="hi")

    assert (result.exit_code, result.stdout) == (0, "you said hi\n")
    assert server.bodies[0]["model"] == "tiny"
    assert server.headers[0]["Authorization"] == "Bearer sesame"


def test_an_ingress_that_is_not_ready_is_named(tmp_path: Path) -> None:
    run_at(tmp_path, None)
    result = CliRunner().invoke(app, ["chat", "--state-dir", str(tmp_path)], input="hi")

    assert (result.exit_code, result.stderr) == (
        1,
        "error: decode-0, the ingress of chat, is not ready; see pdctl status\n",
    )


def test_odd_bytes_of_headers_are_shown_plainly(
    endless: tuple[str, list[bytes]], terminal: Callable[..., "Terminal"]
) -> None:
    chat = terminal("chat", "--url", endless[0], "--model", "m")
    chat.shows("> ")
    chat.type("count\n")
    chat.shows("and on")
    chat.process.send_signal(signal.SIGINT)
    chat.shows("prefill ?\\x9b")


class Terminal:
    """A pdctl on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [*BY_A_USER, sys.executable, "-m", "pdctl", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(theirs)
        self._shown = ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def shows(self, text: str) -> None:
        """Wait for it, after what was waited for before."""
        deadline = time.monotonic() + ENOUGH_SECONDS
        while text not in self._shown:
            assert time.monotonic() < deadline, self._shown
            if select.select([self._ours], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):  # its other end is closed
                    self._shown += os.read(self._ours, 65536).decode()
        self._shown = self._shown.partition(text)[2]

    def interrupted(self) -> int:
        """Its exit code.  A signal between readline's prompt and its wait is seen with the next,
        which must not come while the process ends.
        """
        deadline = time.monotonic() + ENOUGH_SECONDS
        while time.monotonic() < deadline:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(10)
        raise AssertionError(self._shown)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    begun: list[Terminal] = []

    def begin(*arguments: str) -> Terminal:
        begun.append(Terminal(*arguments))
        return begun[-1]

    yield begin
    for each in begun:
        each.end()


@pytest.fixture
def endless() -> Iterator[tuple[str, list[bytes]]]:
    """A server whose answers end with their connections; its URL, and the requests that it got."""
    requests: list[bytes] = []

    class Endless(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            requests.append(self.request.recv(65536))
            head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            self.request.sendall(head + b"x-pdcluster-prefill: \xff\xc2\x9b\r\n\r\n")
            with contextlib.suppress(OSError):
                while True:
                    delta = {"content": "and on "}
                    self.request.sendall(events({"choices": [{"index": 0, "delta": delta}]}))
                    time.sleep(0.01)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Endless) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", requests
        server.shutdown()
        thread.join()


def test_a_conversation_keeps_its_turns_and_goes_on_after_an_error(
    terminal: Callable[..., Terminal],
) -> None:
    def answer(body: dict[str, Any]) -> bytes:
        if "wrong" in body["messages"][-1]["content"]:
            return events({"error": {"message": "no room"}})
        return last_words(body)

    with serving_aside(answer) as server:
        chat = terminal("chat", "--url", server.base_url)
        for prompt in ("one", "wrong", "two"):
            chat.shows("> ")
            chat.type(f"{prompt}\n")
            chat.shows("ended early" if prompt == "wrong" else f"you said {prompt}")
        chat.shows("ms to the first token")
        chat.shows("> ")
        chat.type("\x04")
        assert chat.process.wait(ENOUGH_SECONDS) == 0

    assert [[m["content"] for m in body["messages"]] for body in server.bodies] == [
        ["one"],
        ["one", "you said one", "wrong"],
        ["one", "you said one", "two"],
    ]


def test_ctrl_c_ends_the_answer_and_a_second_one_the_chat(
    endless: tuple[str, list[bytes]], terminal: Callable[..., Terminal]
) -> None:
    url, requests = endless
    chat = terminal("chat", "--url", url, "--model", "m")
    chat.shows("> ")
    chat.type("count\n")
    chat.shows("and on")
    chat.process.send_signal(signal.SIGINT)
    chat.shows("ms to the first token")
    chat.shows("> ")
    chat.type("again\n")
    chat.shows("and on")
    kept = json.loads(requests[1].partition(b"\r\n\r\n")[2])["messages"]
    assert [message["content"] for message in kept][::2] == ["count", "again"]
    assert kept[1]["content"].startswith("and on")
    chat.process.send_signal(signal.SIGINT)
    chat.shows("> ")
    assert chat.interrupted() == 130
