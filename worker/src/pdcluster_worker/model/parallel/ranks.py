"""Rank 0's side of the other ranks: starts them, sends them plans, watches them.

If one dies, every call raises EngineBrokenError, and a thread calls `on_death` at once.
"""

import logging
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.config.worker import ModelConfig
from pdcluster_worker.engine.ports import EngineBrokenError
from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.memory import attach, reserve_shared
from pdcluster_worker.model.parallel import control as wire
from pdcluster_worker.model.rank_layout import ParallelRank
from pdcluster_worker.model.step_plan import StepLimits, StepPlan
from pdcluster_worker.system.cgroups import available_threads

logger = logging.getLogger(__name__)

LAST_WORDS_SECONDS = 0.2  # a rank sends the reason of a broken step before it ends

OnDeath = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Rank:
    process: "subprocess.Popen[bytes]"
    control: socket.socket
    kv_channel: socket.socket | None
    watched: int


def rank_threads(engine: EngineConfig) -> int:
    """CPU threads of each rank."""
    return max(1, (engine.threads or available_threads()) // engine.num_ranks)


class RankProcesses:
    """kv_channels: to the ranks that transfer KV; store: rendezvous file."""

    def __init__(
        self, model: ModelConfig, engine: EngineConfig, device: str, on_death: OnDeath
    ) -> None:
        """Starts the processes, which load the model meanwhile."""
        self.place = ParallelRank(engine.tensor_parallel_size, engine.pipeline_parallel_size)
        self._folder = tempfile.TemporaryDirectory(prefix="pdcluster-ranks-")
        self.store = Path(self._folder.name) / "store"
        self._on_death = on_death
        self._is_closing = False
        self._slots: wire.PlanSlots | None = None
        self._ranks = [self._start(place, model, engine, device) for place in self.place.others()]
        self.kv_channels = [rank.kv_channel for rank in self._ranks if rank.kv_channel is not None]
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def open(self, num_blocks: int, cache_memory: int | None, limits: StepLimits) -> None:
        """cache_memory: descriptor of the cache; None = a part on each GPU.  Raises ModelError."""
        self.expect_done()
        plans = reserve_shared("plans of steps", self.place.pipeline_size * limits.plan_bytes)
        try:
            self._slots = wire.PlanSlots(attach(plans), limits)
            for rank in self._ranks:
                given = [plans] if cache_memory is None else [plans, cache_memory]
                wire.send_cache(rank.control, num_blocks, given)
        finally:
            os.close(plans)

    def expect_done(self) -> list[bytes]:
        """Wait until each rank has loaded, then packed its weights.  Raises ModelError.

        Returns the second time handles of their parts of the cache, empty on CPUs.
        """
        answers = [_received(rank.control) for rank in self._ranks]
        for index, answer in enumerate(answers, 1):
            if not answer.startswith(wire.DONE):
                raise ModelError(_reason(index, answer))
        return [answer.removeprefix(wire.DONE) for answer in answers]

    def step(self, plan: StepPlan, slot: int) -> None:
        """Answers are read by `wait`."""
        assert self._slots is not None, "ranks are opened before a step"
        self._send(wire.STEP + self._slots.write(plan, slot))

    def warm_up(self, num_rows: int) -> None:
        self._send(wire.WARM_UP + num_rows.to_bytes(4, "big"))

    def wait(self, num_answers: int = 1) -> None:
        """Read so many answers of each rank.  Raises EngineBrokenError."""
        for index, rank in enumerate(self._ranks, 1):
            for _ in range(num_answers):
                answer = _received(rank.control)
                if answer != wire.DONE:
                    raise EngineBrokenError(_reason(index, answer))

    def explain(self, error: Exception) -> EngineBrokenError:
        """The last message of a rank that ended, else the error of rank 0."""
        controls = {rank.control.fileno(): index for index, rank in enumerate(self._ranks, 1)}
        for descriptor in _readable(controls, LAST_WORDS_SECONDS):
            index = controls[descriptor]
            answer = _received(self._ranks[index - 1].control)
            if answer.startswith(wire.FAILED):
                return EngineBrokenError(_reason(index, answer))
        return (
            error
            if isinstance(error, EngineBrokenError)
            else EngineBrokenError(f"a step broke off on rank 0: {error!r}")
        )

    def close(self) -> None:
        """Kill the processes, which have nothing to save."""
        self._is_closing = True
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()
            rank.control.close()
        for channel in self.kv_channels:
            channel.close()
        self._folder.cleanup()

    def _start(
        self, place: ParallelRank, model: ModelConfig, engine: EngineConfig, device: str
    ) -> _Rank:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channels = socket.socketpair() if place.pipeline_size == 1 else ()
        given = [theirs, *channels[1:]]
        descriptors = [end.fileno() for end in given]
        command = (
            sys.executable,
            "-P",
            "-m",
            "pdcluster_worker.processes.rank_process",
            *map(str, descriptors),
        )
        try:
            process = subprocess.Popen(command, pass_fds=descriptors, stdin=subprocess.DEVNULL)
        finally:
            for end in given:
                end.close()
        model = msgspec.structs.replace(model, path=str(Path(model.path).expanduser()))
        wire.send_setup(
            ours,
            wire.RankSetup(
                place.rank, model, engine, device, rank_threads(engine), str(self.store)
            ),
        )
        return _Rank(process, ours, channels[0] if channels else None, os.pidfd_open(process.pid))

    def _watch(self) -> None:
        """Returns when the first rank ends."""
        watched = {rank.watched: index for index, rank in enumerate(self._ranks, 1)}
        ended = [watched[descriptor] for descriptor in _readable(watched, None)]
        for descriptor in watched:
            os.close(descriptor)
        if not self._is_closing:
            reason = f"rank {ended[0]} of this engine's {self.place.num_ranks} ended"
            logger.error("%s", reason)
            self._on_death(reason)

    def _send(self, message: bytes) -> None:
        for index, rank in enumerate(self._ranks, 1):
            try:
                rank.control.send(message)
            except OSError as e:
                raise EngineBrokenError(f"rank {index} of this engine is gone: {e.strerror}") from e


def _readable(descriptors: Iterable[int], seconds: float | None) -> list[int]:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(seconds and seconds * 1000)]


def _received(control: socket.socket) -> bytes:
    """Empty when the rank has ended."""
    try:
        return control.recv(wire.MAX_BYTES)
    except ConnectionResetError:
        return b""


def _reason(index: int, answer: bytes) -> str:
    reason = answer[1:].decode(errors="replace") if answer else "it ended without a word"
    return f"rank {index} of this engine failed: {reason}"
