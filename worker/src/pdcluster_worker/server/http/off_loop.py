"""Runs the work of a large request in threads.  They share one interpreter lock: what runs here
must be many short steps, or let go of the lock.
"""

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import ParamSpec, TypeVar

INLINE_BYTES = 4096
"""Largest body whose work is done at once: 2 ms at most, near what a thread would add."""

_THREADS = 4
_SWITCH_SECONDS = 0.0005
"""Longest wait of the event loop for the lock after each call to the kernel.  A step of all streams
has tens of such calls, each of which would wait for Python's default, 5 ms.
"""

ArgsT = ParamSpec("ArgsT")
ResultT = TypeVar("ResultT")

_threads = ThreadPoolExecutor(
    _THREADS, "large-request", initializer=partial(sys.setswitchinterval, _SWITCH_SECONDS)
)


async def off_loop(
    num_bytes: int,
    work: Callable[ArgsT, ResultT],
    *args: ArgsT.args,
    **kwargs: ArgsT.kwargs,
) -> ResultT:
    """The result of `work`, which is about a body of so many bytes; raises what it raises."""
    if num_bytes <= INLINE_BYTES:
        return work(*args, **kwargs)
    run = partial(copy_context().run, work, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_threads, run)
