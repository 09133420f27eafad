"""A real etcd process that a test can kill, bring back, and bring back empty, at the
same address.
"""

import base64
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.etcd_member import etcd_flags
from tests.ports import free_port
from tests.system.waiting import wait_for

START_SECONDS = 60.0


class EtcdServer:
    """One etcd member on loopback.  flags: more of them"""

    def __init__(self, folder: Path, flags: Sequence[str] = ()) -> None:
        self._flags = flags
        self.log = folder / "etcd.log"
        self._data = folder / "etcd"
        self._client_port, self._peer_port = free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._http = httpx.Client(base_url=f"http://{self.endpoint}", timeout=5.0)

    @property
    def endpoint(self) -> str:
        """host:port for clients."""
        return f"127.0.0.1:{self._client_port}"

    def start(self, *, empty: bool = False) -> None:
        """Start, with the data of its last life unless `empty`; returns when it serves."""
        if empty:
            shutil.rmtree(self._data)
        command = [
            str(Path(sys.executable).with_name("etcd")),
            *etcd_flags(self._data, f"http://{self.endpoint}", self._peer_port),
            *self._flags,
        ]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_for(self._answers, START_SECONDS, f"etcd answers at {self.endpoint}")

    def kill(self) -> None:
        """SIGKILL; the data stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.kill()
        self._http.close()

    def values(self, prefix: str) -> dict[str, bytes]:
        """Values stored under a prefix."""
        reply = self._http.post(
            "/v3/kv/range",
            content=json.dumps(
                {
                    "key": _base64(prefix),
                    "range_end": _base64(prefix[:-1] + chr(ord(prefix[-1]) + 1)),
                }
            ),
        )
        reply.raise_for_status()
        return {
            base64.b64decode(kv["key"]).decode(): base64.b64decode(kv["value"])
            for kv in reply.json().get("kvs", [])
        }

    def put(self, key: str, value: str) -> None:
        self._http.post(
            "/v3/kv/put", content=json.dumps({"key": _base64(key), "value": _base64(value)})
        ).raise_for_status()

    def end_alarm(self) -> None:
        """Make room, as a user does: forget older versions, defragment, disarm."""
        revision = self._post("maintenance/status", {})["header"]["revision"]
        self._post("kv/compaction", {"revision": revision, "physical": True})
        self._post("maintenance/defragment", {})
        for alarm in self._post("maintenance/alarm", {"action": "GET"})["alarms"]:
            self._post("maintenance/alarm", {"action": "DEACTIVATE", **alarm})

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        reply = self._http.post(f"/v3/{path}", content=json.dumps(body))
        reply.raise_for_status()
        found: dict[str, Any] = reply.json()
        return found

    def delete(self, key: str) -> None:
        self._http.post(
            "/v3/kv/deleterange", content=json.dumps({"key": _base64(key)})
        ).raise_for_status()

    def _answers(self) -> bool:
        """Return whether it is read: `/health` says no of one that is full, too."""
        assert self._process is not None
        assert self._process.poll() is None, (
            f"etcd ended with {self._process.returncode}: see {self.log}"
        )
        try:
            return self._http.post("/v3/kv/range", content='{"key": "AA=="}').is_success
        except httpx.HTTPError:
            return False


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
