"""Text from a file, or from stdin for `-`."""

import sys
from pathlib import Path

from pdcluster_api.errors import StartError

STDIN = Path("-")


def read_text(path: Path) -> str:
    """Raises StartError (exit code 2) when it cannot be read."""
    try:
        return sys.stdin.read() if path == STDIN else path.read_text(encoding="utf-8")
    except OSError as e:
        raise StartError(
            f"{path}: cannot be read: {e.strerror or e}; give the path of a file, or - for stdin",
            exit_code=2,
        ) from e
    except UnicodeDecodeError as e:
        raise StartError(f"{path}: is not UTF-8 text; save it as UTF-8", exit_code=2) from e
