"""Children that start while gRPC is busy, as an engine that comes back does."""

import subprocess
import sys

NUM_CHILDREN = 400
"""One of thirteen crashed."""

BUSY = """
import asyncio
import sys

import pdcluster_worker.__main__
import grpc
import uvloop


class Echo(grpc.GenericRpcHandler):
    def service(self, details):
        async def answer(request, context):
            return request

        return grpc.unary_unary_rpc_method_handler(answer)


async def call(target, ended):
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(target, options) as channel:
        while not ended.is_set():
            await channel.unary_unary("/a/b")(b"request")


async def main():
    server, ended = grpc.aio.server(), asyncio.Event()
    server.add_generic_rpc_handlers((Echo(),))
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    calls = [asyncio.create_task(call(target, ended)) for _ in range(4)]
    found = set()
    for _ in range(int(sys.argv[1])):
        child = await asyncio.create_subprocess_exec("/bin/true")
        found.add(await child.wait())
    ended.set()
    await asyncio.gather(*calls)
    await server.stop(None)
    print(*found)


uvloop.run(main())
"""


def test_no_child_crashes_before_it_is_its_own_program() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", BUSY, str(NUM_CHILDREN)], capture_output=True, text=True, check=False
    )
    assert (ended.stdout.strip(), ended.returncode) == ("0", 0), ended.stderr
