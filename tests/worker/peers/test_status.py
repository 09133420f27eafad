"""End of a call whose body raises, seen without a network."""

import logging
from typing import Any

import grpc
import pytest

from pdcluster_worker.peers.status import answering


class DeadContext:
    """The context of a call that has no listener any more."""

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise AssertionError(f"{code} {details} was sent to a call that has ended")


async def test_call_that_is_already_over_ends_without_an_answer_or_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    context: Any = DeadContext()
    with caplog.at_level(logging.INFO):
        async with answering(context):
            raise grpc.aio.InternalError("Server already stopped.")

    assert [record.exc_info for record in caplog.records] == [None]
    assert "Server already stopped." in caplog.text
