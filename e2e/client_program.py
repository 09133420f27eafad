"""Runs inside the cluster, on the standard library alone: asks a Service for chat answers, or
fetches a page.

    client_program.py ask URL PREFILL           one question; PREFILL: auto, local or remote
    client_program.py load URL COUNT CLIENTS    COUNT questions from CLIENTS threads, each on a
                                                connection of its own
    client_program.py streams URL OPTIONS       stories as streams; OPTIONS: the fields of Stories
                                                as JSON
    client_program.py get URL                   a page

Prints one JSON object for each answer as it comes: {"status", "prefill", "text"},
with status 0 and the reason as text when there was none, and of an error
"retry_after", its header.  Of a stream it prints
{"index", "begun"} at the first token, and at its end {"index", "status", "prefill",
"tokens", "done", "error"}: the bytes of each token, and whether [DONE] came.
"""

import itertools
import json
import random
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

TIMEOUT_SECONDS = 120.0
STREAM_SECONDS = 240.0  # the most between two tokens
MODEL = "smollm2-135m-instruct"
QUESTION = "What is the capital of France?"
WORDS = (
    "river",
    "stone",
    "lantern",
    "winter",
    "garden",
    "captain",
    "letter",
    "music",
    "window",
    "bridge",
    "silver",
    "forest",
    "market",
    "engine",
    "harbour",
    "mirror",
)


@dataclass(frozen=True)
class Stories:
    """Many streams, no two with the same prompt.

    count, seconds: after so many, or so long, no more are begun
    clients:        at a time
    first:          index of the first prompt
    words:          of each prompt, about as many tokens
    third_words:    of every third one; 0 = as the others
    pause:          seconds after each one
    prefill:        where the prompts are computed, in turn
    """

    count: int
    clients: int
    max_tokens: int
    words: int
    seconds: float = 600.0
    first: int = 0
    prefill: tuple[str, ...] = ("auto",)
    third_words: int = 0
    pause: float = 0.0

    def words_of(self, index: int) -> int:
        return self.third_words if self.third_words and index % 3 == 0 else self.words


def prompt(index: int, words: int) -> str:
    """The prompt of an index, here and in the check of the answer."""
    return (
        "Tell a long story of "
        f"{' and '.join(random.Random(index).choices(WORDS, k=(words + 1) // 2))}."
    )


def ask(url: str, prefill: str) -> dict[str, object]:
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 16,
        "pdcluster": {"prefill": prefill},
    }
    return fetch(
        chat(url, body), lambda text: str(json.loads(text)["choices"][0]["message"]["content"])
    )


def chat(url: str, body: dict[str, object]) -> urllib.request.Request:
    """A greedy request on a connection of its own."""
    data = json.dumps({"model": MODEL, "temperature": 0, **body}).encode()
    return urllib.request.Request(
        f"{url}/v1/chat/completions",
        data,
        {"Content-Type": "application/json", "Connection": "close"},
    )


def fetch(request: urllib.request.Request, read: Callable[[str], str]) -> dict[str, object]:
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as reply:
            text = reply.read().decode()
            return {
                "status": reply.status,
                "prefill": reply.headers.get("x-pdcluster-prefill"),
                "text": read(text),
            }
    except urllib.error.HTTPError as e:
        retry_after = e.headers.get("retry-after")
        text = e.read().decode()
        return {"status": e.code, "prefill": None, "text": text, "retry_after": retry_after}
    except Exception as e:
        return {"status": 0, "prefill": None, "text": f"{type(e).__name__}: {e}"}


def stream(url: str, index: int, stories: Stories) -> dict[str, object]:
    """One story to its end, as far as it came."""
    body = {
        "messages": [{"role": "user", "content": prompt(index, stories.words_of(index))}],
        "max_tokens": stories.max_tokens,
        "ignore_eos": True,
        "stream": True,
        "logprobs": True,
        "pdcluster": {"prefill": stories.prefill[index % len(stories.prefill)]},
    }
    tokens: list[list[int]] = []
    answer: dict[str, object] = {
        "index": index,
        "status": 0,
        "prefill": None,
        "tokens": tokens,
        "done": False,
        "error": None,
    }
    try:
        with urllib.request.urlopen(chat(url, body), timeout=STREAM_SECONDS) as reply:
            answer.update(status=reply.status, prefill=reply.headers.get("x-pdcluster-prefill"))
            for data in events(reply):
                if data == b"[DONE]":
                    answer["done"] = True
                else:
                    take(json.loads(data), answer, tokens)
    except urllib.error.HTTPError as e:
        answer.update(status=e.code, error=e.read().decode())
    except Exception as e:
        answer["error"] = f"{type(e).__name__}: {e}"
    return answer


def events(reply: Iterable[bytes]) -> Iterator[bytes]:
    """The data of each server-sent event."""
    return (line[6:].strip() for line in reply if line.startswith(b"data: "))


def take(event: dict[str, Any], answer: dict[str, object], tokens: list[list[int]]) -> None:
    """Add one event to an answer."""
    answer["error"] = event.get("error", answer["error"])
    is_first = not tokens
    for choice in event.get("choices", []):
        tokens += [token["bytes"] for token in (choice.get("logprobs") or {}).get("content") or []]
    if is_first and tokens:
        tell({"index": answer["index"], "begun": True})


def tell(answer: dict[str, object]) -> None:
    """One line, in one write: print() would let another thread in before the line's end."""
    sys.stdout.write(f"{json.dumps(answer)}\n")
    sys.stdout.flush()


def tell_stories(url: str, stories: Stories) -> None:
    """Every client begins its next story until there are enough, or the time is over."""
    end, indices = time.monotonic() + stories.seconds, itertools.count(stories.first)

    def client(_: int) -> None:
        while time.monotonic() < end and (index := next(indices)) < stories.first + stories.count:
            tell(stream(url, index, stories))
            time.sleep(stories.pause)

    with ThreadPoolExecutor(stories.clients) as threads:
        list(threads.map(client, range(stories.clients)))


def main(arguments: list[str]) -> None:
    match arguments:
        case ["ask", url, prefill]:
            tell(ask(url, prefill))
        case ["get", url]:
            tell(fetch(urllib.request.Request(url), str))
        case ["load", url, count, clients]:
            with ThreadPoolExecutor(int(clients)) as threads:
                list(threads.map(lambda _: tell(ask(url, "auto")), range(int(count))))
        case ["streams", url, options]:
            tell_stories(url, Stories(**json.loads(options)))


if __name__ == "__main__":
    main(sys.argv[1:])
