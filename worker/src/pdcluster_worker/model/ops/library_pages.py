"""Lets go of the pages of shared libraries that loading has read and computing does not need.

torch from the registry loads the libraries of CUDA on a CPU too: most of 0.2 GB that a worker
keeps resident without use.  A page that is needed after all is mapped again from the page cache.
"""

import contextlib
import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

_DONT_NEED = 4  # MADV_DONTNEED
_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \d+ *(.*)")


def release_library_pages() -> None:
    """Unmap the unchanged pages of this process's shared libraries, where it is Linux."""
    with contextlib.suppress(AttributeError, OSError):
        madvise = ctypes.CDLL(None).madvise
        for start, size in unchanged_ranges(Path("/proc/self/smaps").read_text()):
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _DONT_NEED)


def unchanged_ranges(smaps: str) -> Iterator[tuple[int, int]]:
    """Address and size, in bytes, of the mappings of shared libraries that are all file: read-only,
    without a page that the loader wrote and then protected.

    smaps: text of /proc/PID/smaps.

    >>> relocated = "20-30 r--p 0 08:01 7 /lib/a.so.1\\nRss: 4 kB\\nAnonymous: 4 kB\\n"
    >>> unnamed = "30-40 ---p 0 00:00 0 \\nRss: 0 kB\\nAnonymous: 0 kB\\n"
    >>> text = "40-60 r-xp 0 08:01 7 /lib/a.so.1\\nRss: 4 kB\\nAnonymous: 0 kB\\n"
    >>> found = unchanged_ranges(relocated + unnamed + text)
    >>> [(hex(start), hex(size)) for start, size in found]
    [('0x40', '0x20')]
    """
    head: re.Match[str] | None = None
    for line in smaps.splitlines():
        if (found := _HEAD.fullmatch(line)) is not None:
            is_library = ".so" in found[4].rpartition("/")[2] and "w" not in found[3]
            head = found if is_library else None
        elif head is not None and re.fullmatch(r"Anonymous: +0 kB", line):
            yield int(head[1], 16), int(head[2], 16) - int(head[1], 16)
