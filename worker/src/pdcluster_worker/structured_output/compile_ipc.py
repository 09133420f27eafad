"""Messages between an engine and its compile process: frames of msgpack over a pair of pipes.

A process first says Opened or Wrong; then it answers each constraint by Compiled or Wrong.
"""

from typing import BinaryIO

import msgspec

from pdcluster_worker.messages.constraint import Constraint

LENGTH_BYTES = 8
"""Length of the number before each frame: its bytes, the least significant first."""


class CompilerReady(msgspec.Struct, frozen=True, tag=True):
    """The vocabulary as xgrammar writes it, for the engine to compile with."""

    vocabulary: str


class Compiled(msgspec.Struct, frozen=True, tag=True):
    """A grammar that compiles, as xgrammar writes it before it is compiled."""

    grammar: str


class Wrong(msgspec.Struct, frozen=True, tag=True):
    """Reason why a constraint cannot be compiled, and its place in the text."""

    message: str


CompileAnswer = CompilerReady | Compiled | Wrong

encode = msgspec.msgpack.Encoder().encode
decode_answer = msgspec.msgpack.Decoder(CompileAnswer).decode
decode_constraint = msgspec.msgpack.Decoder(Constraint).decode


def frame(message: CompileAnswer | Constraint) -> bytes:
    """A message with its length."""
    content = encode(message)
    return len(content).to_bytes(LENGTH_BYTES, "little") + content


def read_frame(stream: BinaryIO) -> bytes | None:
    """The content of the next frame; None at the end of the stream."""
    length = stream.read(LENGTH_BYTES)
    return stream.read(int.from_bytes(length, "little")) if len(length) == LENGTH_BYTES else None
