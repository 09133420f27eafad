"""This worker among its peers: the objects of its role, and its state in etcd."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import grpc
from msgspec.structs import replace

from pdcluster_schema.etcd_keys import command_key, dtype_key, role_key, workers_prefix
from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.ports import join_address
from pdcluster_worker.config.worker import Identity, Role, WorkerConfig
from pdcluster_worker.errors import PeerError, RequestError
from pdcluster_worker.messages.engine import EngineReady
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.messages.peers import Hello
from pdcluster_worker.peers.client import LocalWorker, Peer, PeerEvents
from pdcluster_worker.peers.directory import Directory
from pdcluster_worker.peers.discovery import Discovery, DiscoveryEvents, DiscoveryKeys
from pdcluster_worker.peers.pair_check import Refusals
from pdcluster_worker.peers.records import WorkerRecord, WorkerState
from pdcluster_worker.peers.service import Verify, WorkerService, start_grpc
from pdcluster_worker.peers.tls import Credentials
from pdcluster_worker.routing.credits import CreditLedger
from pdcluster_worker.serving.cluster_view import ClusterView
from pdcluster_worker.serving.decode.broker import CreditBroker
from pdcluster_worker.serving.decode.decode_dispatcher import DecodeDispatcher
from pdcluster_worker.serving.decode.remote_prefill import RemotePrefill
from pdcluster_worker.serving.decode.verification import TransferVerification
from pdcluster_worker.serving.disaggregation_stats import POLL_SECONDS, DisaggregationStats
from pdcluster_worker.serving.draining import DrainController
from pdcluster_worker.serving.engines.engines import Engine
from pdcluster_worker.serving.ingress.ingress import Ingress
from pdcluster_worker.serving.peer_handler import PeerRequestHandler
from pdcluster_worker.serving.role_command import PAIRED, RoleCommand
from pdcluster_worker.serving.worker_context import WorkerContext
from pdcluster_worker.stock_engine.front_end import ASK_SECONDS
from pdcluster_worker.stock_engine.http import HttpFailedError

logger = logging.getLogger(__name__)

NO_FRONT_END = "no_front_end"  # code of the error where no engine answers for its front end

_NO_GEOMETRY = KVGeometry(num_kv_heads=0, head_dim=0, num_layers=0, block_size=0, dtype="")

GRPC_GRACE_SECONDS = 1.0
"""Grace of the gRPC server: after a drain no call of ours is open; this bounds a peer that keeps
its streams.
"""


def hello_of(config: WorkerConfig, worker_id: str, facts: EngineReady | None) -> Hello:
    """Handshake of this worker; with its operations where it promises equal bits.

    facts: None of a router.
    """
    name = config.model.name
    if facts is None:
        return Hello(worker_id, config.role, _NO_GEOMETRY, "", config.revision, model=name)
    return Hello(
        *(worker_id, config.role, facts.geometry, facts.weights, config.revision),
        tensor_parallel_size=facts.device.tensor_parallel_size,
        operations=facts.device.operations if config.engine.batch_invariant else "",
        model=name,
        max_model_len=facts.max_model_len,
        max_batched_tokens=config.engine.max_batched_tokens * config.engine.data_parallel_size,
        vocab_size=facts.vocab_size,
        restarts_grammar=facts.restarts_grammar,
        hands_over_kv=facts.hands_over_kv,
        precision=facts.precision,
        mixes_precisions=config.engine.allow_mixed_precision,
    )


class WorkerRuntime:
    """One worker in one role: from its engine being ready to its end or its next role."""

    def __init__(
        self,
        config: WorkerConfig,
        identity: Identity,
        credentials: Credentials,
        worker: WorkerContext,
        unacked: Callable[[], Awaitable[frozenset[str]]],
    ) -> None:
        self.worker = worker
        self.ingress: Ingress | None = None
        self.on_peers: Callable[[], None] = lambda: None  # called when the state of a peer changed
        self._config = config
        self._identity = identity
        self._credentials = credentials
        facts = worker.engine_ready if worker.engineless is None else None
        hello = replace(hello_of(config, worker.engine_id, facts), role=worker.role)
        refusals = Refusals(worker.metrics)
        local = LocalWorker(hello, credentials, refusals, worker.blocks)
        self._pod_role = None if worker.role == config.role else config.role
        self._directory = Directory(identity.pod, local, worker.metrics, self._pod_role)
        self._broker = CreditBroker(
            worker.credit_queue,
            self._directory.prefills,
            lambda: worker.policy.prefill_score,
            worker.block_size,
            worker.transfer_seconds,
        )
        self._directory.report_to(
            PeerEvents(self._broker.on_credit, self._broker.on_lost, self._on_peer)
        )
        worker.absence = self._directory.absence
        worker.peer_block_size = self._directory.block_size
        self._ledger = self._make_ledger()
        worker.gpu, worker.promised_tokens = config.gpu, lambda: self._ledger.outstanding_tokens
        handler = PeerRequestHandler(worker, hello, self._ledger, self._make_dispatcher())
        self._service = WorkerService(handler, refusals, self._make_verification())
        self._drain = DrainController(
            lambda: worker.num_holding + self._ledger.unused_grants,
            self._announce,
            unacked,
            identity.grace_seconds,
        )
        worker.on_request = self._drain.poll
        worker.is_drain_noticed = lambda: self._drain.is_noticed
        worker.estimation.slots = lambda: config.engine.max_sequences * max(1, len(worker.engines))
        worker.metrics.draining.set_function(lambda: self._drain.num_holding)
        self._role_command = RoleCommand(config.role, worker.role, self._drain.leave_role)
        self._discovery = self._make_discovery()
        self._disaggregation_stats = (
            self._make_disaggregation_stats() if worker.role in PAIRED else None
        )
        worker.metrics.role_info.clear()
        worker.metrics.role_info.labels(worker.role).set(1)
        self.view = ClusterView(config, identity, worker, self._directory)
        self._polling: list[asyncio.Task[None]] = []
        self._grpc: grpc.aio.Server | None = None

    def _make_dispatcher(self) -> DecodeDispatcher | None:
        if self.worker.role == self._config.role == "prefill":
            return None
        directory = self._directory
        remote = RemotePrefill(self.worker, self._broker)
        decoding = DecodeDispatcher(
            self.worker, remote, directory.prefills, directory.decodes, directory.decode
        )
        self.ingress = Ingress(self.worker, decoding, directory.decodes, self._identity.pod)
        return None if self.worker.role == "prefill" else decoding

    def _make_verification(self) -> Verify | None:
        if self.worker.role != "decode":
            return None
        directory = self._directory
        return TransferVerification(
            self._identity.pod,
            self.worker,
            self._broker,
            directory.known_prefills,
            lambda: directory.refused("prefill"),
        ).run

    def decodes(self) -> list[Peer]:
        return self._directory.decodes()

    def known_decodes(self) -> list[Peer]:
        return self._directory.known_decodes()

    async def ask(self, path: str, body: bytes) -> bytes:
        """As `ServingBackend.ask`."""
        try:
            async with asyncio.timeout(ASK_SECONDS):  # for all: a slow one is slow at each
                return await self._ask_each(path, body)
        except TimeoutError:
            why = f"none answered within {ASK_SECONDS:g} s"
        except (HttpFailedError, PeerError) as e:
            why = str(e)
        raise RequestError(
            f"no engine renders prompts or reads answers now ({why}): retry later",
            status=503,
            code=NO_FRONT_END,
            retry_after_seconds=1,
        )

    async def _ask_each(self, path: str, body: bytes) -> bytes:
        """Raises what the last one did."""
        failed: HttpFailedError | PeerError = PeerError("this worker has no engine")
        if self.worker.front_end is not None:
            try:
                return await self.worker.front_end.ask(path, body)
            except HttpFailedError as e:
                failed = e
        peers = self._directory.known_decodes()
        for peer in sorted(peers, key=lambda peer: (not peer.ready, peer.load.num_requests)):
            try:
                return await peer.ask(path, body)
            except PeerError as e:
                failed = e
        raise failed

    def num_ingresses(self) -> int:
        return self._directory.num_ingresses(relaying=self.worker.policy.relaying.enabled)

    def _on_peer(self, peer: Peer) -> None:
        self._broker.on_change(peer)
        if self.ingress is not None:
            self.ingress.on_change()
        self.on_peers()

    def _make_ledger(self) -> CreditLedger:
        worker, metrics = self.worker, self.worker.metrics
        ledger = CreditLedger(self._credit_limit(), asyncio.get_running_loop().time)
        ledger.set_policy(worker.policy.prefill_queue, self._batch_tokens())
        ledger.on_group = metrics.prefill_group_requests.observe
        metrics.credit_wants.set_function(lambda: ledger.queued_requests)
        metrics.credit_tokens.set_function(lambda: ledger.outstanding_tokens)
        return ledger

    def _make_disaggregation_stats(self) -> DisaggregationStats:
        worker = self.worker
        return DisaggregationStats(
            lambda: (worker.transport, worker.transport_note),
            worker.share,
            # A decode worker shakes hands with each prefill worker: what both sides found, its
            # record says.
            lambda: self._directory.refused("prefill") if worker.role == "decode" else {},
            lambda: worker.sent_bytes_per_second,
            asyncio.get_running_loop().time,
        )

    def _make_discovery(self) -> Discovery:
        config, identity = self._config, self._identity
        prefix = workers_prefix(identity.namespace, config.cluster, config.revision)
        command = command_key(identity.namespace, config.cluster, identity.pod)
        role = role_key(identity.namespace, config.cluster, identity.pod)
        pinned: dict[str, bytes] = {}
        if config.model.dtype == "auto" and self.worker.engineless is None:
            key = dtype_key(identity.namespace, config.cluster, config.revision)
            pinned[key] = self.worker.engine_ready.dtype.encode()
        keys = DiscoveryKeys(prefix, command, role, pinned)
        return Discovery(
            config.discovery,
            keys,
            DiscoveryEvents(
                self._directory.set_members,
                self._drain.command,
                self._role_command.take,
                self._directory.probe,
            ),
        )

    # --- joining ------------------------------------------------------------------------------

    async def join(self, http_port: int) -> None:
        """Serve peers and register in etcd, with retries.  Raises ConfigError for the port."""
        listen = self._config.listen
        self._grpc, port = await start_grpc(
            self._service, listen.host, listen.grpc, self._credentials
        )
        self.worker.state = self._drain.state
        self._record = self._make_record(http_port, port)
        self._discovery.start(self._record)
        self.worker.on_engines = self._on_engines
        if self.worker.engineless is None:
            self._polling.append(asyncio.create_task(self._poll_forever(), name="record"))
        if self.ingress is not None:
            self._polling.append(asyncio.create_task(self.view.run(), name="history"))

    async def _poll_forever(self) -> None:
        """Keep what the record says of disaggregation and tiers up to date."""
        stats = self._disaggregation_stats
        while True:
            await asyncio.sleep(POLL_SECONDS)
            before = self._record
            if stats is not None and stats.poll():
                self._record = replace(self._record, disaggregation=stats.stated)
            self._record = replace(self._record, stopped_tiers=self.worker.stopped_tiers)
            if self._record != before:
                self._discovery.update(self._record)

    def problem(self) -> str | None:
        """Reason why this worker is not ready; latches, whatever etcd does later."""
        if self.worker.state != "ready":
            return f"this worker is {self.worker.state}"
        return None if self._discovery.registered_once else self._discovery.problem

    def _make_record(self, http_port: int, grpc_port: int) -> WorkerRecord:
        config, worker, address = self._config, self.worker, self._identity.address
        has_engine = worker.engineless is None
        return WorkerRecord(
            engine_id=worker.engine_id,
            pod=self._identity.pod,
            grpc_address=join_address(address, grpc_port),
            kv_address=worker.engines.first.kv_address if has_engine else "",
            http_address=config.listen.http_address(address, http_port),
            role=worker.role,
            pod_role=self._pod_role,
            pool=config.pool,
            state="ready",
            device=worker.engine_ready.device if has_engine else None,
            disaggregation=None
            if self._disaggregation_stats is None
            else self._disaggregation_stats.stated,
            engines=worker.engines.records(),
        )

    # --- policy -------------------------------------------------------------------------------

    def set_policy(self, policy: PolicyConfig) -> None:
        self.worker.policy = policy
        self._set_credit_policy()

    def _set_credit_policy(self) -> None:
        policy = self.worker.policy.prefill_queue
        self._service.credit_server.push(self._ledger.set_limit(self._credit_limit()))
        self._service.credit_server.push(self._ledger.set_policy(policy, self._batch_tokens()))

    def _batch_tokens(self) -> int:
        return self._config.engine.max_batched_tokens * max(1, len(self.worker.engines))

    def _credit_limit(self) -> int:
        batches, size = (
            self.worker.policy.credits.batches_ahead,
            self._config.engine.max_batched_tokens,
        )
        return max(1, int(batches * size)) * len(self.worker.engines)

    # --- draining -----------------------------------------------------------------------------

    async def leave(self) -> None:
        """Drain, and return while nothing is left; commands no longer matter."""
        self._drain.end()
        await self._drain.drained()

    async def finish(self) -> None:
        """After `leave`: wait for whatever slipped in since, and from then on refuse everything."""
        await self._drain.drained()
        self.refuse()

    def refuse(self) -> None:
        """Take nothing any more."""
        self.worker.has_ended = True

    async def next_role(self) -> Role:
        """Wait for a command of another role, and until nothing of the present one is left."""
        return await self._role_command.changed(self._drain.drained)

    @property
    def seconds_left(self) -> float:
        """Until what runs has to be ended, once the process is to end."""
        return self._drain.seconds_left

    @property
    def is_drained(self) -> bool:
        return self._drain.state == "drained"

    def _announce(self, state: WorkerState) -> None:
        logger.info(
            "state=%s active=%d holding=%d", state, self.worker.active, self._drain.num_holding
        )
        self.worker.announce(state)
        self._record = replace(self._record, state=state)
        self._discovery.update(self._record)
        self._promise(self.worker.serves)

    def on_stall(self, engine: Engine, is_stalled: bool) -> None:
        if is_stalled:
            if not any(other.serves for other in self.worker.engines if other is not engine):
                self._promise(False)
        elif self.worker.state == "ready":
            self._promise(True)

    def _promise(self, takes_new: bool) -> None:
        """Give credits, or none until this is called again."""
        if takes_new:
            self._service.credit_server.push(self._ledger.resume())
        else:
            self._ledger.stop()

    def _on_engines(self) -> None:
        self._set_credit_policy()
        self._promise(self.worker.serves)
        self._record = replace(self._record, engines=self.worker.engines.records())
        self._discovery.update(self._record)

    async def leave_peers(self) -> None:
        """End all but what the ingress passes on to decode workers."""
        for task in self._polling:
            task.cancel()
        await asyncio.gather(*self._polling, return_exceptions=True)
        await self._drain.close()
        await self._discovery.close()
        self._directory.end_count()
        if self._grpc is not None:
            await self._grpc.stop(GRPC_GRACE_SECONDS)
            await self._service.ended(GRPC_GRACE_SECONDS)
            self._grpc = None

    async def close(self) -> None:
        await self.leave_peers()
        await self._directory.close()
