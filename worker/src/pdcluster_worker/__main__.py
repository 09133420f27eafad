"""`python -m pdcluster_worker`: one worker, its server process and engine processes.

Exit status: 0 after a drain, 2 wrong setting or model, 3 the engine cannot have its device
(`error: ...` on stderr), 143 SIGTERM before there was anything to drain, 1 anything else.
"""

import argparse
import logging
import os
import sys
from pathlib import Path

from pdcluster_worker.config.worker import EngineRank
from pdcluster_worker.errors import NO_DEVICE, WRONG_SETTING, ConfigError, DeviceError, ModelError
from pdcluster_worker.system.process import die_with_parent, end_on_sigterm, start_logging

# Else gRPC starts its threads again in each child between fork and exec, which crashes some of
# them: uvloop forks.  Before gRPC is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def main() -> int:
    end_on_sigterm()
    arguments = _parser().parse_args()
    start_logging()
    try:
        if arguments.headless:
            from pdcluster_worker.processes import engine_process

            status = engine_process.run_headless(
                arguments.engine_config, arguments.head, arguments.join_seconds
            )
            logging.shutdown()
            os._exit(status)
        if arguments.engine is not None:
            die_with_parent()
            from pdcluster_worker.processes import engine_process

            status = engine_process.run(
                arguments.engine_config,
                arguments.engine,
                EngineRank(arguments.rank, arguments.board),
            )
            logging.shutdown()
            # Nothing is left to save, and the interpreter's own end would report what torch's
            # libraries leak at exit.
            os._exit(status)
        from pdcluster_worker.processes import worker_start

        return worker_start.run(arguments.engine_config, arguments.policy)
    except (ConfigError, ModelError) as e:
        sys.stderr.write(f"error: {e}\n")
        return WRONG_SETTING
    except DeviceError as e:
        sys.stderr.write(f"error: {e}\n")
        return NO_DEVICE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pdcluster_worker",
        description="One prefill, decode, mixed, router or picker worker of a PDCluster.",
    )
    parser.add_argument(
        "--engine-config",
        type=Path,
        required=True,
        metavar="FILE",
        help="engine file, immutable while the worker runs",
    )
    parser.add_argument(
        "--policy", type=Path, metavar="FILE", help="policy file, watched for changes"
    )
    parser.add_argument(
        "--headless",
        action="store_true",
        help="run one engine whose requests come from the worker at --head",
    )
    parser.add_argument("--head", metavar="HOST:PORT", help="listen.head of that worker")
    parser.add_argument(
        "--join-seconds",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="time to reach that worker, which may be loading (default 60)",
    )
    # run the engine process against this ZMQ address
    parser.add_argument("--engine", metavar="ADDRESS", help=argparse.SUPPRESS)
    # its place among the engines of its worker
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    # descriptor of the memory that these share
    parser.add_argument("--board", type=int, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
