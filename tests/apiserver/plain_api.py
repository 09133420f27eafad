"""Requests of a test to the API server, without kubectl's start-up time and without the operator's own client."""

import base64
import json
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml

Body = dict[str, Any]
MERGE_PATCH = "application/merge-patch+json"


class PlainApi:
    """As the user of a kubeconfig.  Paths are those of the API, as in /api/v1/namespaces/x/pods."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self._server = cluster["server"]
        self._tls = ssl.create_default_context(cadata=base64.b64decode(cluster["certificate-authority-data"]).decode())
        pair = kubeconfig.with_suffix(".pair.pem")
        pair.write_bytes(base64.b64decode(user["client-certificate-data"]) + b"\n" + base64.b64decode(user["client-key-data"]))
        self._tls.load_cert_chain(str(pair))

    def get(self, path: str) -> Body | None:
        """An object or a list; None = not found."""
        return self._send("GET", path)

    def items(self, path: str) -> list[Body]:
        """The objects of a list; none when the kind is not there."""
        return list((self.get(path) or {}).get("items", ()))

    def create(self, path: str, body: Body) -> Body:
        """POST to the path of a list."""
        made = self._send("POST", path, body)
        assert made is not None, path
        return made

    def merge(self, path: str, patch: Body) -> Body | None:
        """JSON merge patch; None = not found."""
        return self._send("PATCH", path, patch, MERGE_PATCH)

    def delete(self, path: str) -> Body | None:
        """Delete; None = not found."""
        return self._send("DELETE", path)

    def _send(self, method: str, path: str, body: Body | None = None, content_type: str = "application/json") -> Body | None:
        request = urllib.request.Request(self._server + path, method=method, data=None if body is None else json.dumps(body).encode())
        request.add_header("Content-Type", content_type)
        try:
            with urllib.request.urlopen(request, timeout=30, context=self._tls) as reply:
                answer: Body = json.load(reply)
                return answer
        except urllib.error.HTTPError as e:
            with e:
                text = e.read().decode(errors="replace")
            if e.code == 404:
                return None
            raise AssertionError(f"{method} {path}: {e.code} {text}") from e
