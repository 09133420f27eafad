"""Every case of the operations, of sampling and of the staged cache against the reference, on the
device.
"""

import os
import re
import subprocess
import sys

from setting import REHEARSES, save

CASES = (
    "tests/worker/model/ops/test_cuda_operations.py",
    "tests/worker/model/ops/test_cuda_sampling.py",
    "tests/worker/model/test_kv_cache.py",
)


def main() -> int:
    """Run pytest; warnings of other versions of the libraries do not count."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    command += ["-n", "2" if REHEARSES else "8", "-W", "default", "--no-header", "--tb=short"]
    command += ["-o", "addopts=--import-mode=importlib"]
    environment = os.environ | ({} if REHEARSES else {"PDCLUSTER_GPU_CHECK": "1"})
    ran = subprocess.run(
        [*command, *(CASES[2:] if REHEARSES else CASES)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(ran.stdout[-12000:])
    counts = {
        word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error)", ran.stdout)
    }
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", ran.stdout, re.MULTILINE)
    save({"counts": counts, "failed": failed})
    return ran.returncode


if __name__ == "__main__":
    sys.exit(main())
