"""The engine process: runs schedule -> execute -> update, and sleeps when idle until a message."""

import gc
import logging
import os
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.config.worker import (
    EngineRank,
    Identity,
    WorkerConfig,
    load_worker_config,
    share_of,
)
from pdcluster_worker.engine.core import EngineCore
from pdcluster_worker.engine.ports import EngineBrokenError, KVMemory
from pdcluster_worker.engine.prefill_delayer import OwnBoard, PrefillDelayer
from pdcluster_worker.engine.tier_ports import NO_TIERS, KVTierIO
from pdcluster_worker.errors import (
    NO_DEVICE,
    WRONG_SETTING,
    ConfigError,
    DeviceError,
    ModelError,
    WorkerError,
)
from pdcluster_worker.headless import VERSION, HeadConnectionError, HeadHello
from pdcluster_worker.kv_tiers.open import BlockFacts, open_tiers
from pdcluster_worker.kv_transfer.carriers import keep_ucx_within
from pdcluster_worker.kv_transfer.rank_port import Listen, RankPort
from pdcluster_worker.kv_transfer.tcp import TcpSettings, TcpTransport
from pdcluster_worker.messages.engine import Begin, EngineFailed, EngineReady, Ping, Pong, Stop
from pdcluster_worker.messages.engine_settings import DelayerSettings, EngineSettings
from pdcluster_worker.messages.facts import DeviceFacts
from pdcluster_worker.model.device import check_computes_on, find_device
from pdcluster_worker.model.drafter_loader import divide, make_drafter, open_draft_runner
from pdcluster_worker.model.loading.loader import ModelInfo
from pdcluster_worker.model.memory import reserve_pinned, reserve_private
from pdcluster_worker.model.runner import Cache, Runner, share_threads
from pdcluster_worker.model.runner_loader import open_runner
from pdcluster_worker.processes.dp_board import DpBoard
from pdcluster_worker.processes.engine_mailbox import EngineMailbox, EngineSocket, HeadClient
from pdcluster_worker.system.cpu_cores import open_cores
from pdcluster_worker.system.native_dtype import DType, dtype_of_device, slow_note

logger = logging.getLogger(__name__)

LOWER = "lower its size"

# for the engine's last message when one of its ranks is gone; then the process exits
RANK_GRACE_SECONDS = 0.7


def run(config_path: Path, address: str, engine_rank: EngineRank) -> int:
    """Run one engine.

    0 stopped, 2 wrong configuration or model, 3 not the requested device, 1 anything else.
    """
    mailbox = EngineSocket(address)
    try:
        dtype = _dtype(mailbox)
        if dtype is not None:
            config = _in_dtype(load_worker_config(config_path), dtype)
            keep_ucx_within(config.listen.kv)
            _serve(share_of(config, engine_rank.rank), mailbox, engine_rank)
    except DeviceError as e:
        mailbox.send([EngineFailed(str(e))])
        return NO_DEVICE
    except WorkerError as e:
        mailbox.send([EngineFailed(str(e))])
        return WRONG_SETTING
    except EngineBrokenError as e:  # what broke it was logged where it happened
        logger.error("engine failed: %s", e)
        mailbox.send([EngineFailed(str(e))])
        return 1
    except Exception as e:
        logger.exception("engine failed")
        mailbox.send([EngineFailed(f"{type(e).__name__}: {e}")])
        return 1
    finally:
        mailbox.close()
    return 0


def run_headless(config_path: Path, head: str | None, join_seconds: float) -> int:
    """Run one engine for the worker at `head`, host:port.  Exit status 1: the head is gone."""
    host, _, port = (head or "").rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(
            f"--headless needs --head HOST:PORT, the listen.head of a worker, not {head!r}"
        )
    config, identity = load_worker_config(config_path), Identity.from_env()
    keep_ucx_within(config.listen.kv)
    hello = HeadHello(
        VERSION, config.cluster, config.revision, config.role, identity.pod, identity.address
    )
    try:
        mailbox = HeadClient((host.strip("[]"), int(port)), config.tls, hello, join_seconds)
        try:
            dtype: DType = "bfloat16" if mailbox.answer.dtype == "bfloat16" else "float32"
            alone = msgspec.structs.replace(
                config, engine=msgspec.structs.replace(config.engine, data_parallel_size=1)
            )
            _serve(_in_dtype(alone, dtype), mailbox, EngineRank())
        except HeadConnectionError:
            raise
        except EngineBrokenError as e:
            logger.error("engine failed: %s", e)
            mailbox.send([EngineFailed(str(e))])
            return 1
        except WorkerError as e:
            mailbox.send([EngineFailed(str(e))])
            raise
        finally:
            mailbox.close()
    except HeadConnectionError as e:
        logger.error("%s", e)  # the last line of the log
        return 1
    return 0


def _dtype(mailbox: EngineSocket) -> DType | None:
    """From the first message; None where it is Stop."""
    first = next(iter(mailbox.receive(None)))
    return first.dtype if isinstance(first, Begin) else None


def _serve(
    config: WorkerConfig,
    mailbox: EngineMailbox,
    engine_rank: EngineRank,
) -> None:
    device = find_device(config)
    logger.info("computes on device=%s name=%s", device.kind, device.name)
    if device.note:
        logger.warning("computes on %s: %s", device.name, device.note)
    sizes = config.engine.tensor_parallel_size, config.engine.pipeline_parallel_size
    is_alone = (*sizes, config.engine.data_parallel_size) == (1, 1, 1)
    # From here on no other engine computes on its cores.
    cores = open_cores(os.environ) if device.kind == "cpu" and is_alone else None
    division = divide(config.model, config.engine)
    drafting = open_draft_runner(config.model, division, device.kind)
    runner, memory, info = open_runner(
        config.model,
        division.engine,
        device.kind,
        on_rank_death=lambda reason: _end_soon(mailbox, reason),
    )
    device = msgspec.structs.replace(
        device, tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1]
    )
    check_computes_on(device, memory.tensor.device)
    engine_id = uuid.uuid4().hex
    transport = _open_transport(config, memory, runner, engine_id, mailbox)
    settings = _settings(config, info, memory.num_blocks)
    runner.grammars.on_change = mailbox.wake
    if runner.adapters is not None:
        runner.adapters.on_change = mailbox.wake
    delayer = _delayer(config.engine.prefill_delayer, engine_rank)
    drafter = make_drafter(config.engine, drafting, info)
    tiers = open_kv_tiers(config.engine, memory, runner, mailbox.wake)
    core = EngineCore(
        *(settings, runner, transport, time.monotonic),
        delayer=delayer,
        drafter=drafter,
        tiers=tiers,
    )
    ready = _ready(engine_id, transport, runner, settings, device)
    with ExitStack() as ends:
        runners = [runner] if drafting is None else [drafting[0], runner]
        for each in runners:
            ends.callback(each.close)
        threads = share_threads(cores, runners)
        ends.callback(threads.close)
        ends.callback(transport.close)
        ends.callback(tiers.close)
        mailbox.send([ready, *core.step()])
        gc.collect()
        gc.freeze()  # what was loaded stays: later collections need not look at it
        loop(core, mailbox, threads.rest)


def _open_transport(
    config: WorkerConfig, memory: KVMemory, runner: Runner, engine_id: str, mailbox: EngineMailbox
) -> TcpTransport:
    """KV ports of all ranks, on consecutive port numbers; they share the bandwidth."""
    host, first = config.listen.host, config.listen.kv
    verify, channels = config.engine.verify_transfers, runner.kv_channels
    kind = config.engine.transport
    bandwidth = config.engine.transfer_bandwidth
    if bandwidth:
        bandwidth = max(1, bandwidth // (1 + len(channels)))  # 0 would be no limit at all
    size = len(memory.heads)
    others = [
        RankPort(
            channel,
            range(rank * size, (rank + 1) * size),
            size * memory.head_bytes,
            mailbox.wake,
            Listen(engine_id, host, first + rank if first else 0, verify, bandwidth, kind),
        )
        for rank, channel in enumerate(channels, 1)
    ]
    settings = TcpSettings(verify=verify, bandwidth=bandwidth, transport=kind, clock=time.monotonic)
    return TcpTransport(memory, engine_id, (host, first), mailbox.wake, settings, others=others)


def open_kv_tiers(
    engine: EngineConfig, memory: Cache, runner: Runner, wake: Callable[[], None]
) -> KVTierIO:
    """Tiers of whole blocks, which on CPUs every rank has.  Raises ModelError."""
    if not engine.kv_tiers:
        return NO_TIERS
    info, is_cuda = runner.info, memory.tensor.is_cuda
    if info.window is not None:
        raise ModelError(
            "engine.kvTiers needs whole prefixes, and every layer of this model attends to its "
            f"last {info.window} tokens only: leave it out"
        )
    if is_cuda and engine.num_ranks > 1:
        raise ModelError(
            "engine.kvTiers needs one rank on accelerators, each of which holds a part of every "
            "block: leave it out, or set tensorParallelSize and pipelineParallelSize to 1"
        )
    reserve = reserve_pinned if is_cuda else partial(reserve_private, "engine.kvTiers", fix=LOWER)
    operations = runner.forward.operations.name
    facts = BlockFacts(
        *(info.weights, info.geometry, operations, engine.batch_invariant),
        precision=info.precision,
        is_mixed=engine.allow_mixed_precision,
    )
    return open_tiers(engine.kv_tiers, memory, facts, reserve, wake)


def _end_soon(mailbox: EngineMailbox, reason: str) -> None:
    """A rank of this engine is gone: exit within a second, even if the loop waits for that rank."""
    mailbox.fail(reason)
    time.sleep(RANK_GRACE_SECONDS)
    os._exit(1)


def loop(core: EngineCore, mailbox: EngineMailbox, rest: Callable[[], None]) -> None:
    """Until Stop.  rest: called before waiting idle."""
    while True:
        if not core.has_work:
            rest()
        for message in mailbox.receive(0.0 if core.has_work else core.next_wake_seconds()):
            if isinstance(message, Stop):
                return
            if isinstance(message, Ping):
                # before a step that may take long
                mailbox.send([Pong(core.num_steps, core.has_work)])
            else:
                core.handle(message)
        outputs = core.step()
        if outputs:
            mailbox.send(outputs)
        core.check_when_idle()


def _in_dtype(config: WorkerConfig, dtype: DType) -> WorkerConfig:
    """Replace dtype `auto`."""
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, dtype=dtype))


def _settings(config: WorkerConfig, info: ModelInfo, num_blocks: int) -> EngineSettings:
    """num_blocks: with a sliding window the last one is the null block."""
    engine = config.engine
    return EngineSettings(
        block_size=engine.block_size,
        num_blocks=num_blocks if info.window is None else num_blocks - 1,
        max_batched_tokens=engine.max_batched_tokens,
        max_sequences=engine.max_sequences,
        max_model_len=info.max_model_len,
        prefix_caching=engine.prefix_caching,
        fence_timeout_seconds=engine.fence_timeout_seconds,
        scheduler=engine.scheduler_settings,
        admission_watermark=engine.admission_watermark,
        window=info.window,
        speculation=engine.drafts,
        adapters=frozenset(info.adapters),
    )


def _delayer(settings: DelayerSettings | None, engine_rank: EngineRank) -> PrefillDelayer | None:
    if settings is None or not settings.enabled:
        return None
    board = (
        OwnBoard()
        if engine_rank.board is None
        else DpBoard(engine_rank.board, engine_rank.rank, time.monotonic)
    )
    return PrefillDelayer(settings, board)


def _ready(
    engine_id: str,
    transport: TcpTransport,
    runner: Runner,
    settings: EngineSettings,
    device: DeviceFacts,
) -> EngineReady:
    info, operations = runner.info, runner.forward.operations
    native = dtype_of_device(device.kind)
    notes = [device.note, operations.note, slow_note(info.dtype, native, device.kind)]
    return EngineReady(
        engine_id=engine_id,
        kv_ports=transport.ports,
        geometry=info.geometry,
        weights=info.weights,
        dtype=info.dtype,
        precision=info.precision,
        num_blocks=settings.num_blocks,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        device=msgspec.structs.replace(
            device,
            note="; ".join(filter(None, notes)),
            operations=operations.name,
            model_code=runner.forward.code,
        ),
        length_note=info.length_note,
        transport=transport.own.transport,
        longest_step_seconds=runner.longest_warm_up_seconds,
        scheduler=settings.scheduler.name,
        scheduling_policy=settings.scheduler.policy,
        # of a window only its own blocks come, which are not a prefix
        prefix_caching=settings.prefix_caching and settings.window is None,
    )
