"""Ends what makes an answer when its client leaves."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive


async def unless_disconnected(receive: Receive, answer: Coroutine[Any, Any, object]) -> bool:
    """True if `answer` ended by itself.  In the running task: another one would cost more."""
    task, has_left = asyncio.current_task(), False
    assert task is not None, "an answer is given in a task"

    def leave(_: asyncio.Task[None]) -> None:
        nonlocal has_left
        has_left = True
        task.cancel()

    gone = asyncio.create_task(_disconnected(receive))
    gone.add_done_callback(leave)
    try:
        await answer
    except asyncio.CancelledError:
        if not has_left or task.uncancel():
            raise
        return False
    finally:
        gone.remove_done_callback(leave)
        gone.cancel()  # it ends by itself: to wait for that would hold up the next request
    return True


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
