"""`python -m pdcluster_worker.model.hf_inspect_process FILE SETTINGS`: inspect a model.

Writes its spec and reference logits to FILE.  Exit status 2: refused, with the reason on stdout.
"""

import fcntl
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pdcluster_worker.errors import WRONG_SETTING, ModelError
from pdcluster_worker.logs import start_logging
from pdcluster_worker.model.loading.hf_inspect import InspectRequest, drop_oldest
from pdcluster_worker.system.parent_death import die_with_parent

if TYPE_CHECKING:
    from pdcluster_worker.model.arch_spec import ArchAnswer


def main(file: Path, settings: str) -> int:
    die_with_parent()
    start_logging()
    path, dtype, max_model_len, threads = json.loads(settings)
    return inspect_once(file, InspectRequest(Path(path), dtype, max_model_len, threads))


def inspect_once(file: Path, question: InspectRequest) -> int:
    """Write the answer unless it exists, one process at a time.  Returns the exit status."""
    lock_file = file.with_suffix(".lock")
    with lock_file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if not file.exists():
                _keep(inspect(question), file)
        except ModelError as e:
            sys.stdout.write(f"{e}\n")
            return WRONG_SETTING
        finally:
            lock_file.unlink(missing_ok=True)
    return 0


def inspect(question: InspectRequest) -> "ArchAnswer":
    """Raises ModelError for a model that cannot be served."""
    from pdcluster_worker.model import arch_spec, logits_check
    from pdcluster_worker.model.families import UnsupportedArchError
    from pdcluster_worker.model.loading.loader import load_model

    loaded = load_model(
        question.path,
        question.dtype,
        block_size=logits_check.BLOCK_SIZE,
        max_model_len=question.max_model_len,
        threads=question.threads,
    )
    try:
        form, tensors = arch_spec.describe(loaded, question.path)
    except UnsupportedArchError as e:
        return arch_spec.ArchAnswer(arch_spec.NoArchSpec(str(e)), {})
    return arch_spec.ArchAnswer(form, {**tensors, "logits": logits_check.expected_logits(loaded)})


def _keep(found: "ArchAnswer", file: Path) -> None:
    from pdcluster_worker.model.arch_spec import write_answer

    fresh = file.with_suffix(f".{os.getpid()}")
    write_answer(found, fresh)
    fresh.replace(file)
    drop_oldest(file.parent)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
