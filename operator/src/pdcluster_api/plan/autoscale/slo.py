"""Latency targets: the workers that keep them, after the correction factors of Dynamo's SLA
planner.

The planner looks up in a profile of the engine what one worker does within a latency.
There is no profile here: what was measured in the window stands for it.  So the
expected time to first token is that of a mean prompt on an idle worker at the
measured speed, and the time per token is taken to grow with the streams that a
worker has, so that one at twice its target wants twice the workers.
"""

from pdcluster_api.plan.autoscale.rules import MAX_GROWTH
from pdcluster_api.plan.autoscale.totals import Totals


def prefill_need(token_rate: float, speed: float, correction: float) -> float:
    """Prefill workers for a demand, as in Dynamo's SLA planner.

    A correction below 1 is the saving of the prefix cache, above 1 it is queueing.

    token_rate: prompt tokens per second; speed: those of one worker
    correction: measured time to first token over the expected one

    >>> prefill_need(10.0 * 3000, 20_000.0, 0.5)
    0.75
    >>> prefill_need(10.0 * 3000, 20_000.0, 3.0)
    1.5
    """
    return token_rate * min(1.0, correction) / speed


def decode_need(workers: int, seconds: float, target: float) -> float:
    """Decode workers that bring the time per token to its target.

    Throughput per worker falls by the planner's correction.

    >>> decode_need(8, 0.060, 0.050)
    9.6
    """
    return workers * min(seconds / target, MAX_GROWTH)


def prefill_demand(own: Totals, ingress: Totals, ttft: float | None) -> float | None:
    """Workers for the prompts that come in now; None = not enough was measured.

    own:     of the prefill workers
    ingress: of the workers that answer HTTP; what they prefill themselves is no demand
    """
    speed, remote = own.prefill_speed, own.prefill_token_rate
    prompts, requests = ingress.prompt_token_rate, ingress.request_rate
    if ttft is None or speed is None or not remote or not prompts or not requests:
        return None
    correction = ttft * speed * requests / prompts
    share = remote / (remote + (ingress.prefill_token_rate or 0.0))
    need = prefill_need(prompts * share, speed, correction)
    return min(need, MAX_GROWTH * (own.reporting + own.missing))
