"""`pdctl why --request`: the workers asked, the output, and the message when no worker knows the
request.
"""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from pdctl.cli.main import app
from pdctl.local.run_directory import RunDirectory

INGRESS = {
    "request_id": "abc",
    "began_unix": 1700000000.0,
    "events": [
        {"name": "issued", "seconds": 0.0, "worker": "", "facts": {"role": "ingress"}},
        {
            "name": "decode",
            "seconds": 0.0012,
            "worker": "",
            "facts": {"worker": "d1", "policy": "prefixAware", "cost": 2.5},
        },
        {
            "name": "offload",
            "seconds": 0.0031,
            "worker": "d1",
            "facts": {"remote": True, "uncached_tokens": 512},
        },
    ],
}
AT_PEER = {
    "request_id": "abc-0",
    "began_unix": 1.0,
    "events": [{"name": "issued", "seconds": 0.0, "worker": "", "facts": {"role": "decode"}}],
}

Answers = dict[str, tuple[int, Any]]


@pytest.fixture
def serve() -> Iterator[Callable[[Answers], str]]:
    """Serves JSON by path; returns host:port.  Other paths are 404."""
    servers: list[ThreadingHTTPServer] = []

    def start(answers: Answers) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = answers.get(
                    self.path.partition("?")[0], (404, {"error": {"message": "not here"}})
                )
                if self.headers.get("Authorization") not in (None, "Bearer k"):
                    status, body = 401, {"error": {"message": "incorrect API key provided"}}
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        return f"127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def why(tmp_path: Path) -> Callable[..., Any]:
    runner = CliRunner(env={"TERM": "dumb", "COLUMNS": "100"})
    return lambda *arguments: runner.invoke(
        app, ["why", "--request", "abc", "--state-dir", str(tmp_path), *arguments]
    )


def worker(name: str, address: str | None) -> dict[str, Any]:
    return {"name": name, "http": address}


def test_why_request_shows_each_decision_with_its_numbers(
    why: Callable[..., Any], serve: Callable[[Answers], str]
) -> None:
    address = serve({"/debug/requests/abc": (200, {"journeys": [INGRESS]})})

    assert why("--url", f"http://{address}/", "--api-key", "k").output.splitlines() == [
        f"request abc at http://{address}/, 2023-11-14 22:13:20 UTC",
        " MS  WHAT     WORKER                   BY",
        f"0.0  issued   http://{address}/  role ingress",
        f"1.2  decode   http://{address}/  worker d1, policy prefixAware, cost 2.5",
        "3.1  offload  d1                       remote yes, uncached_tokens 512",
    ]


def test_why_request_asks_the_workers_of_this_machine(
    why: Callable[..., Any], serve: Callable[[Answers], str], tmp_path: Path
) -> None:
    path = "/debug/requests/abc"
    addresses = [serve({path: (200, {"journeys": [each]})}) for each in (AT_PEER, INGRESS)]
    workers = [
        worker("d1", addresses[0]),
        worker("d0", addresses[1]),
        worker("p0", None),
        worker("d2", serve({})),
    ]
    RunDirectory.create(tmp_path, "chat").write_state({"name": "chat", "workers": workers})

    result = why()

    heads = [line for line in result.output.splitlines() if line.startswith("request")]
    # where it came in first
    assert [head.split(",")[0] for head in heads] == ["request abc at d0", "request abc-0 at d1"]


def test_why_request_that_no_worker_knows_names_those_tried(
    why: Callable[..., Any], serve: Callable[[Answers], str], tmp_path: Path
) -> None:
    RunDirectory.create(tmp_path, "chat").write_state(
        {"name": "chat", "workers": [worker("d0", serve({})), worker("d1", "127.0.0.1:1")]}
    )
    result = why()

    assert result.exit_code == 1
    first, second = result.stderr.splitlines()
    assert (
        first
        == "error: 1 of 2 workers could not be asked; the others do not know request abc: each "
        "keeps its last 2048 that have ended"
    )
    assert second.startswith("d1 does not answer")


def test_why_request_that_all_workers_do_not_know_says_so(
    why: Callable[..., Any], serve: Callable[[Answers], str], tmp_path: Path
) -> None:
    workers = [worker("d0", serve({})), worker("d1", serve({}))]
    RunDirectory.create(tmp_path, "chat").write_state({"name": "chat", "workers": workers})

    assert why().stderr == (
        "error: none of 2 workers knows request abc: each keeps its last 2048 that have ended\n"
    )


def test_why_request_names_workers_that_may_have_more(
    why: Callable[..., Any], serve: Callable[[Answers], str], tmp_path: Path
) -> None:
    known = serve({"/debug/requests/abc": (200, {"journeys": [INGRESS]})})
    RunDirectory.create(tmp_path, "chat").write_state(
        {"name": "chat", "workers": [worker("d0", known), worker("d1", "127.0.0.1:1")]}
    )
    result = why()

    assert (result.exit_code, result.stdout.splitlines()[0].split(",")[0]) == (
        0,
        "request abc at d0",
    )
    assert result.stderr.startswith("warning: d1 does not answer")


def test_why_request_passes_on_what_a_worker_refuses(
    why: Callable[..., Any], serve: Callable[[Answers], str]
) -> None:
    result = why("--url", f"http://{serve({})}", "--api-key", "wrong")

    assert result.exit_code == 1
    first, second = result.stderr.splitlines()
    assert first == "error: 1 of 1 workers could not be asked for request abc"
    assert second.endswith(
        " 401: incorrect API key provided; give the cluster's key by PDCLUSTER_API_KEY or --api-key"
    )


def test_why_request_refuses_a_key_that_no_header_can_hold(why: Callable[..., Any]) -> None:
    result = why("--url", "http://127.0.0.1:9", "--api-key", "sec\nret")

    assert result.exit_code == 2
    assert result.stderr.startswith("error: --api-key, or PDCLUSTER_API_KEY: a client can send ")


def test_why_request_needs_a_cluster_to_ask(why: Callable[..., Any]) -> None:
    result = why()

    assert (
        result.exit_code,
        "give the NAME of one in Kubernetes, or --url of a worker" in result.stderr,
    ) == (2, True)


def test_why_request_asks_the_pods_through_the_api_server(
    why: Callable[..., Any], serve: Callable[[Answers], str], tmp_path: Path
) -> None:
    pods = "/api/v1/namespaces/default/pods"
    listed = {"items": [{"metadata": {"name": name}} for name in ("d0", "d1", "d2")]}
    answers: Answers = {
        pods: (200, listed),
        f"{pods}/d1:8000/proxy/debug/requests/abc": (200, {"journeys": [INGRESS]}),
        f"{pods}/d2:8000/proxy/debug/requests/abc": (401, {"error": {"message": "no key"}}),
    }
    context = {"name": "test", "context": {"cluster": "test", "user": "test"}}
    clusters = [{"name": "test", "cluster": {"server": f"http://{serve(answers)}"}}]
    found = {
        "current-context": "test",
        "contexts": [context],
        "clusters": clusters,
        "users": [{"name": "test", "user": {}}],
    }
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", **found}))

    shown = why("chat", "--kubeconfig", str(file))
    assert shown.stdout.startswith("request abc at d1, ")
    assert shown.stderr.startswith("warning: d2 cannot be asked through the API server")
    answers.pop(f"{pods}/d1:8000/proxy/debug/requests/abc")
    result = why("chat", "--kubeconfig", str(file))
    assert (result.exit_code, "kubectl port-forward d2 8000" in result.stderr) == (1, True)
