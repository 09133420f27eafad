"""Unmaps code pages of shared libraries that are needed only while loading.

torch from PyPI loads CUDA's libraries on a CPU too: most of 0.16 GB of resident code.
"""

import contextlib
import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

_DONT_NEED = 4  # MADV_DONTNEED
_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \d+ *(.*)")
_WRITTEN = re.compile(r"(Anonymous|Swap): +(\d+) kB")


def release_library_pages() -> None:
    with contextlib.suppress(AttributeError, OSError):
        madvise = ctypes.CDLL(None).madvise
        smaps = Path("/proc/self/smaps").read_text(errors="surrogateescape")
        for start, size in unchanged_ranges(smaps):
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _DONT_NEED)


def unchanged_ranges(smaps: str) -> Iterator[tuple[int, int]]:
    """(address, bytes) of mappings with unmodified code; relocated pages would be lost.

    smaps: text of /proc/PID/smaps.

    >>> data = "20-30 r--p 0 08:01 7 /lib/a.so.1\\nAnonymous: 0 kB\\nSwap: 4 kB\\n"
    >>> code = "40-60 r-xp 0 08:01 7 /lib/a.so.1\\nAnonymous: 0 kB\\nSwap: 0 kB\\n"
    >>> [(hex(start), hex(size)) for start, size in unchanged_ranges(data + code)]
    [('0x40', '0x20')]
    """
    head: re.Match[str] | None = None
    for line in smaps.split("\n"):
        if (found := _HEAD.fullmatch(line)) is not None:
            is_code = found[3] == "r-xp" and ".so" in found[4].rpartition("/")[2]
            head = found if is_code else None
        elif head is not None and (number := _WRITTEN.fullmatch(line)) is not None:
            if number[2] != "0":
                head = None
            elif number[1] == "Swap":
                yield int(head[1], 16), int(head[2], 16) - int(head[1], 16)
