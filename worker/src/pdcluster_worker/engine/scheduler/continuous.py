"""Continuous batching, as in vLLM V1: one rule for prefill and decode."""

# A request's work is its known tokens less the computed ones.  Running requests go first (decodes,
# then unfinished prefills), then waiting ones unless something was preempted.
#
#     budget 8; a decodes, b has 12 prompt tokens, c 3:
#     step 1  a 1, b 7        step 2  a 1, b 5, c 2        step 3  a 1, b 1, c 1

from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.engine.scheduler.base import Schedule, Scheduler, by_kind


class Continuous(Scheduler):
    def schedule(self, *, admit: bool = True) -> Schedule:
        step = Schedule(self.settings.max_batched_tokens)
        self.start_ready(step)
        decodes, prefills = by_kind(self.computing)
        self.decode_or_preempt(decodes, step)
        admits = admit and not step.preempted
        limit = self._limit(prefills, step, admits=admits)
        self.schedule_chunks(prefills, step, limit)
        if admits:
            self.admit(step, whole=not self.settings.scheduler.chunked_prefill, limit=limit)
        return step

    def _limit(self, prefills: list[EngineRequest], step: Schedule, *, admits: bool) -> int | None:
        threshold = self.settings.scheduler.long_prefill_token_threshold
        if threshold == 0:
            return None
        num_slots = self.settings.max_sequences - len(self.running)
        num_waiting = min(len(self.waiting), num_slots) if admits else 0
        return max(threshold, step.budget // max(1, len(prefills) + num_waiting))
