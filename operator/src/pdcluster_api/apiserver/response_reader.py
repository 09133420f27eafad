"""Answers of the API server as bytes: in lines of any length, or as a whole up to a bound.

Whatever a user stores comes in lists and watches of all users' objects.  A control character is
one byte in etcd and six in JSON, so that an object of 1.5 MiB may be a line of 9 MiB.
"""

from collections.abc import AsyncIterator

import aiohttp


class LongResponseError(Exception):
    """An answer has more bytes than were to be read of it."""


async def lines_of(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines as they come; aiohttp's own end the connection at one that is longer than a buffer."""
    begun = bytearray()
    async for chunk in content.iter_any():
        begun += chunk
        if b"\n" in chunk:
            *lines, rest = bytes(begun).split(b"\n")
            begun = bytearray(rest)
            for line in lines:
                yield line
    if begun:
        yield bytes(begun)


async def read(response: aiohttp.ClientResponse, most: int | None) -> bytes:
    """All of an answer.  most: bytes; None = any number.  Raises LongResponseError."""
    if most is None:
        return await response.read()
    content = bytearray()
    async with response:
        async for chunk in response.content.iter_any():
            content += chunk
            if len(content) > most:
                response.close()
                raise LongResponseError
    return bytes(content)
