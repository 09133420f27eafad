"""Several coroutines that stand and fall together.

As asyncio.TaskGroup, but the error of a part comes out as it is, and a
cancellation is never lost: Python 3.11's TaskGroup forgets one that arrives
while a part fails, and leaves the task looking cancelled after a failure.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def run_until_first_ends(*parts: Coroutine[Any, Any, None]) -> None:
    """Run all parts; when one ends or this task is cancelled, cancel the others and wait for them.

    Raises what the first raised.
    """
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
