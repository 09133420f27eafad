"""Runs inside the cluster, on the standard library alone: asks a Service for chat answers, or fetches a page.

    client_program.py ask URL PREFILL             one question; PREFILL: auto, local or remote
    client_program.py load URL COUNT CLIENTS      COUNT questions from CLIENTS threads, each on a connection of its own
    client_program.py get URL                     a page

Prints one JSON object for each answer as it comes: {"status", "prefill", "text"},
with status 0 and the reason as text when there was none.
"""

import json
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

TIMEOUT_SECONDS = 120.0
QUESTION = "What is the capital of France?"


def ask(url: str, prefill: str) -> dict[str, object]:
    body = {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 16,
        "temperature": 0,
        "pdcluster": {"prefill": prefill},
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json", "Connection": "close"}
    )
    return fetch(request, lambda text: str(json.loads(text)["choices"][0]["message"]["content"]))


def fetch(request, read) -> dict[str, object]:  # type: ignore[no-untyped-def]
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as reply:
            text = reply.read().decode()
            return {"status": reply.status, "prefill": reply.headers.get("x-pdcluster-prefill"), "text": read(text)}
    except urllib.error.HTTPError as e:
        return {"status": e.code, "prefill": None, "text": e.read().decode()}
    except Exception as e:
        return {"status": 0, "prefill": None, "text": f"{type(e).__name__}: {e}"}


def tell(answer: dict[str, object]) -> None:
    """One line, in one write: print() would let another thread in before the line's end."""
    sys.stdout.write(f"{json.dumps(answer)}\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> None:
    match arguments:
        case ["ask", url, prefill]:
            tell(ask(url, prefill))
        case ["get", url]:
            tell(fetch(urllib.request.Request(url), str))
        case ["load", url, count, clients]:
            with ThreadPoolExecutor(int(clients)) as threads:
                list(threads.map(lambda _: tell(ask(url, "auto")), range(int(count))))


if __name__ == "__main__":
    main(sys.argv[1:])
