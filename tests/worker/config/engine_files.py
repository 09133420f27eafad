"""The shortest engine file that a worker takes."""

from pathlib import Path

MINIMUM = """
cluster: chat
revision: r1
role: decode
pool: cpu
model: {name: m, path: /models/m}
discovery: {endpoints: ["127.0.0.1:2379"]}
tls: {ca: ca.pem, certificate: worker.pem, key: worker.key}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "engine.yaml"
    path.write_text(text)
    return path
