"""The flags of the etcd that the tests run: one member on loopback, quick and unsafe."""

from pathlib import Path


def etcd_flags(data: Path, client: str, peer_port: int) -> list[str]:
    """client: URL for clients."""
    peer = f"http://127.0.0.1:{peer_port}"
    options = {
        "name": "test",
        "data-dir": data,
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"test={peer}",
        "log-level": "warn",
        "unsafe-no-fsync": "true",
    }
    return [f"--{name}={value}" for name, value in options.items()]
