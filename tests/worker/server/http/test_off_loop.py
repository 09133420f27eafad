"""The work of a large request is done in a thread, and comes back as if it were not."""

import threading
from contextvars import ContextVar

import pytest

from pdcluster_worker.server.http.json_body import INLINE_BYTES, off_loop

NAME: ContextVar[str] = ContextVar("name", default="")


def _work(suffix: str, *, more: str) -> tuple[str, threading.Thread]:
    return NAME.get() + suffix + more, threading.current_thread()


@pytest.mark.parametrize(("num_bytes", "is_inline"), [(INLINE_BYTES, True), (1 << 20, False)])
async def test_work_has_its_context_and_arguments(num_bytes: int, is_inline: bool) -> None:
    NAME.set("a")
    text, thread = await off_loop(num_bytes, _work, "b", more="c")

    assert text == "abc"
    assert (thread is threading.current_thread()) == is_inline


async def test_an_error_of_the_work_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        await off_loop(1 << 20, divmod, 1, 0)
