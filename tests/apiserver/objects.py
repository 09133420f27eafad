"""Objects of our kinds over plain HTTP: faster than kubectl, and with the server's own words in
parts.
"""

import json
from dataclasses import dataclass
from typing import Any

import httpx

from tests.apiserver.control_plane import ControlPlane

Json = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """Answer of the API server.  content: the object, or a Status with the reason of a refusal."""

    code: int
    content: Json

    @property
    def accepted(self) -> bool:
        return self.code in (200, 201)

    @property
    def causes(self) -> list[tuple[str, str]]:
        """Field and message of everything that was wrong; one with no field when it gave no
        details.
        """
        causes = self.content.get("details", {}).get("causes", [])
        return [(cause["field"], cause["message"]) for cause in causes] or [
            ("", self.content.get("message", ""))
        ]


class Objects:
    """The objects of one plural name in one namespace; unknown fields are refused, as kubectl asks
    for.
    """

    def __init__(self, plane: ControlPlane, namespace: str, plural: str = "pdclusters") -> None:
        self._path = f"/apis/pdcluster.io/v1alpha1/namespaces/{namespace}/{plural}"
        self._http = httpx.Client(
            base_url=plane.url, verify=plane.tls, timeout=30.0, trust_env=False
        )

    def close(self) -> None:
        self._http.close()

    def create(self, document: Json, *, dry_run: bool = False) -> Answer:
        return self._send("POST", "", document, dry_run)

    def replace(self, document: Json, *, dry_run: bool = False) -> Answer:
        """PUT over whatever version is there, as `kubectl replace` does."""
        return self._send("PUT", f"/{document['metadata']['name']}", document, dry_run)

    def apply(self, document: Json, manager: str = "tests", *, force: bool = False) -> Answer:
        """Server-side apply."""
        parameters = {
            "fieldManager": manager,
            "fieldValidation": "Strict",
            "force": str(force).lower(),
        }
        return self._answer(
            "PATCH",
            f"/{document['metadata']['name']}",
            document,
            "application/apply-patch+yaml",
            parameters,
        )

    def merge(self, name: str, patch: Json, subresource: str = "") -> Answer:
        path = f"/{name}/{subresource}".rstrip("/")
        return self._answer(
            "PATCH", path, patch, "application/merge-patch+json", {"fieldValidation": "Strict"}
        )

    def get(self, name: str, subresource: str = "") -> Json:
        return self._answer("GET", f"/{name}/{subresource}".rstrip("/"), None, "", {}).content

    def delete(self, name: str) -> Answer:
        return self._answer("DELETE", f"/{name}", None, "", {})

    def _send(self, method: str, path: str, document: Json, dry_run: bool) -> Answer:
        parameters = {"fieldValidation": "Strict", **({"dryRun": "All"} if dry_run else {})}
        return self._answer(method, path, document, "application/json", parameters)

    def _answer(
        self, method: str, path: str, document: Json | None, kind: str, parameters: dict[str, str]
    ) -> Answer:
        content = None if document is None else json.dumps(document)
        headers = {"Content-Type": kind} if kind else {}
        reply = self._http.request(
            method, self._path + path, content=content, headers=headers, params=parameters
        )
        return Answer(reply.status_code, reply.json())
