"""Carries connections from an inherited listening socket to an address of this network namespace.

    python -m e2e.rig.relay FD HOST PORT

The socket was made outside and stays there; that is how a user's kubectl
reaches an API server that has no interface to the machine.
"""

import asyncio
import socket
import sys

CHUNK_BYTES = 65536


async def relay(listener: socket.socket, host: str, port: int) -> None:
    """Serve until cancelled."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_reader, to_writer = await asyncio.open_connection(host, port)
        # not up yet, or being started again: the client sees a closed connection and tries again
        except OSError:
            writer.close()
            return
        try:
            await asyncio.gather(_copy(reader, to_writer), _copy(to_reader, writer))
        finally:
            to_writer.close()
            writer.close()

    async with await asyncio.start_server(accept, sock=listener) as server:
        await server.serve_forever()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy one direction to its end; a connection that broke ends the other direction with it."""
    try:
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        writer.close()


if __name__ == "__main__":
    asyncio.run(relay(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], int(sys.argv[3])))
