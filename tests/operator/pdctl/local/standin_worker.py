"""A worker for tests of `pdctl`: announces itself in etcd, answers nothing, drains on SIGTERM.

STANDIN says how it behaves: `serve` (default), `exit CODE`, `stubborn` (ignores
SIGTERM) or `parent` (starts a child in its session that ignores SIGTERM).
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import aetcd
import yaml


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine-config", type=Path, required=True)
    parser.add_argument("--policy", type=Path, required=True)
    arguments = parser.parse_args()
    behaviour, _, code = os.environ.get("STANDIN", "serve").partition(" ")
    if behaviour == "exit":
        sys.stderr.write("loading\nerror: model kind is not supported\nbye\n")
        sys.exit(int(code))
    if behaviour == "parent":
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()",
            ]
        )
    asyncio.run(
        serve(yaml.safe_load(arguments.engine_config.read_text()), stubborn=behaviour == "stubborn")
    )


async def serve(config: dict, *, stubborn: bool) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGTERM, (lambda: None) if stubborn else stop.set
    )
    host, _, port = config["discovery"]["endpoints"][0].partition(":")
    pod, namespace = os.environ["POD_NAME"], os.environ["POD_NAMESPACE"]
    place = "/".join(config[name] for name in ("revision", "role", "pool"))
    key = f"/pdcluster/{namespace}/{config['cluster']}/workers/{place}/{pod}"
    with socket.create_server(
        (config["listen"]["host"], config["listen"].get("http", 8000))
    ) as listener:
        record = {
            "engine_id": uuid.uuid4().hex,
            "state": "ready",
            "http_address": f"127.0.0.1:{listener.getsockname()[1]}",
            "grpc_address": "127.0.0.1:1",
            "kv_address": "127.0.0.1:2",
        }
        async with aetcd.Client(host=host, port=int(port)) as client:
            lease = await client.lease(3600)
            await client.put(key.encode(), json.dumps(record).encode(), lease=lease)
            print(f"process {os.getpid()} is ready", flush=True)
            await stop.wait()
            await client.revoke_lease(lease.id)


main()
