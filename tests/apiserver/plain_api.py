"""Requests of a test to the API server, without kubectl's start-up time and without the operator's
own client.
"""

import base64
import json
import ssl
import threading
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any

import yaml

Body = dict[str, Any]
MERGE_PATCH = "application/merge-patch+json"


class PlainApi:
    """As the user of a kubeconfig.  Paths are those of the API, as in /api/v1/namespaces/x/pods.

    Each thread keeps its connection: tests poll, and a handshake costs more than the rest of a
    request.
    """

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self._address = cluster["server"].removeprefix("https://")
        self._tls = ssl.create_default_context(
            cadata=base64.b64decode(cluster["certificate-authority-data"]).decode()
        )
        pair = kubeconfig.with_suffix(".pair.pem")
        pair.write_bytes(
            base64.b64decode(user["client-certificate-data"])
            + b"\n"
            + base64.b64decode(user["client-key-data"])
        )
        self._tls.load_cert_chain(str(pair))
        self._kept = threading.local()

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

    def _send(
        self,
        method: str,
        path: str,
        body: Body | None = None,
        content_type: str = "application/json",
    ) -> Body | None:
        status, text = self._exchange(
            method, path, None if body is None else json.dumps(body), {"Content-Type": content_type}
        )
        if status == 404:
            return None
        assert status < 300, f"{method} {path}: {status} {text}"
        answer: Body = json.loads(text)
        return answer

    def _exchange(
        self, method: str, path: str, content: str | None, headers: dict[str, str]
    ) -> tuple[int, str]:
        kept = self._kept.__dict__.pop("connection", None)
        connection = kept or _Closing(self._address, timeout=30, context=self._tls)
        try:
            connection.request(method, path, content, headers)
            reply = connection.getresponse()
            answer = reply.status, reply.read().decode(errors="replace")
        except (OSError, HTTPException):
            connection.close()
            if kept is None:
                raise
            # the server closed it meanwhile, as one does that restarts
            return self._exchange(method, path, content, headers)
        self._kept.connection = connection
        return answer


class _Closing(HTTPSConnection):
    """Closed with the thread or the PlainApi that keeps it."""

    def __del__(self) -> None:
        self.close()
