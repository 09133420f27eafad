"""Remote prefills: their outcomes, races, and the peers that they go to."""

from pdcluster_worker.metrics.registering import Registering


class DisaggregationMetrics(Registering):
    """Remote prefills at both sides, and the prefill queue."""

    def __init__(self) -> None:
        super().__init__()
        self.remote_prefill = self._counter(
            "remote_prefill",
            "remote prefills by outcome, at the decode side",
            "outcome",
            first=("ok", "failed", "stalled", "cancelled"),
        )
        self.remote_prefill_phase_seconds = self._histogram(
            "remote_prefill_phase_seconds",
            "remote prefills at the prefill worker: queue and prefill, both with messages "
            "(first_token), and transfer",
            "phase",
        )
        self.long_prompts = self._counter(
            "long_prompts",
            "prompts worth a remote prefill, by where it ran, at the decode side",
            "prefill",
            first=("remote", "local"),
        )
        self.prefill_queue_requests = self._gauge(
            "prefill_queue_requests", "this worker's part of the prefill queue"
        )
        self.prefill_queue_tokens = self._gauge(
            "prefill_queue_tokens", "this worker's part of the prefill queue, in tokens"
        )
        self.races = self._counter(
            "races", "requests raced on two workers, by the winner of the first token", "winner"
        )
        self.race_wasted_tokens = self._counter(
            "race_wasted_tokens",
            "prompt tokens of the losers of races, of which some were never computed",
        )
        self.peers = self._gauge("peers", "known peers by role and state", "role", "state")
        self.peer_refused = self._counter(
            "peer_refused",
            "pairs refused by the handshake",
            "reason",
            first=("kv_geometry", "weights", "revision", "tensor_parallel", "operations"),
        )
