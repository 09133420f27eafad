"""`python -m pdcluster_worker`: one worker.  The parent is the server process; it starts the engine process by the same module.

Exit status: 0 after a drain, 2 when a setting or the model is wrong and 3 when
the engine cannot have the device that it was asked for (one line `error: ...`
on stderr says what), 143 when SIGTERM came before there was
anything to drain, 1 for anything else.
"""

import argparse
import logging
import os
import sys
from pathlib import Path

from pdcluster_worker.early_end import end_on_sigterm
from pdcluster_worker.errors import NO_DEVICE, WRONG_SETTING, ConfigError, DeviceError, ModelError
from pdcluster_worker.logs import start_logging


def main() -> int:
    """Parse the command line and run this process's side."""
    end_on_sigterm()
    arguments = _parser().parse_args()
    start_logging()
    try:
        if arguments.engine is not None:
            from pdcluster_worker import engine_start  # torch is for the engine process only

            status = engine_start.run(arguments.engine_config, arguments.engine)
            logging.shutdown()
            # Nothing is left to save, and the interpreter's own end would report what torch's libraries leak at exit.
            os._exit(status)
        from pdcluster_worker import worker_start

        return worker_start.run(arguments.engine_config, arguments.policy)
    except (ConfigError, ModelError) as e:
        sys.stderr.write(f"error: {e}\n")
        return WRONG_SETTING
    except DeviceError as e:
        sys.stderr.write(f"error: {e}\n")
        return NO_DEVICE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pdcluster_worker", description="One prefill, decode or mixed worker of a PDCluster.")
    parser.add_argument("--engine-config", type=Path, required=True, metavar="FILE", help="engine file, immutable while the worker runs")
    parser.add_argument("--policy", type=Path, metavar="FILE", help="policy file, watched for changes")
    parser.add_argument("--engine", metavar="ADDRESS", help=argparse.SUPPRESS)  # run the engine process against this ZMQ address
    return parser


if __name__ == "__main__":
    sys.exit(main())
