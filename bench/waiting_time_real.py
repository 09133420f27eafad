"""The real engine behind `bench/waiting_time.py`: the sample model in this process, without server
and client.

Lengths are scaled down so that a run takes a minute; steps take their real
time.  Presets come from a profile at the start, of a full batch: what an
operator would measure and write down.
"""

import os
import random
import time
from collections.abc import Sequence
from math import inf
from pathlib import Path

from waiting_time_engine import Server
from waiting_time_load import PAPER, PRESETS, Group, Job, jobs
from waiting_time_runs import Deciding, Forecasts, Outcome, forecasters, forecasting

from pdcluster_worker.routing.waiting_time.rates import Presets

MODEL = Path("~/.cache/pdcluster/smollm2-135m-instruct")
SEATS, CONTEXT, NUM_BLOCKS, VOCABULARY = 4, 1024, 1024, 40_000
PROMPT_TOKENS = 64
SCALE = 1 / 40
"""The factor of all lengths in tokens: answers of 3 to 8000 become 2 to 200, about 60 on the
average.
"""

PROFILED = 3
"""Full batches of the profile, of which the first does not count."""

EVERY_SECONDS = 0.5

UNITS = (("I", 15, 650, 60), ("B1", 46, 2200, 110), ("B2", 24, 2600, 230))
"""Groups of the second experiment: requests, deadline in profiled times of a token, tokens of an
answer.
"""

OUTPUT_TOKENS = 110
"""The preset of the second experiment: right for B1, too high for I, too low for B2."""


class RealServer(Server):
    """An engine core that gets a job when it is started; `advance` makes steps."""

    def __init__(self) -> None:
        super().__init__()
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # read when torch is imported
        from schedulers import idle_transport, settings_of

        from pdcluster_worker.config.engine import EngineConfig
        from pdcluster_worker.config.worker import ModelConfig
        from pdcluster_worker.engine.core import EngineCore
        from pdcluster_worker.model.runner_loader import open_runner

        engine = EngineConfig(
            max_sequences=SEATS, max_model_len=CONTEXT, num_blocks=NUM_BLOCKS, threads=2
        )
        runner, _, info = open_runner(
            ModelConfig(name="m", path=str(MODEL), dtype="bfloat16"), engine
        )
        settings = settings_of(engine, NUM_BLOCKS, CONTEXT)
        self.dtype = info.dtype
        self._clock = time.perf_counter
        self._core = EngineCore(settings, runner, idle_transport(self._clock), self._clock)
        self._jobs: dict[str, Job] = {}
        self._last = self._clock()

    def start(self, job: Job) -> None:
        """Submit it; after an eviction under another id, with the tokens that it has."""
        from pdcluster_worker.messages.engine import Submit
        from pdcluster_worker.messages.requests import RequestSpec, SamplingParams

        self._pass()
        super().start(job)
        source = random.Random(job.name)
        prompt = [source.randrange(VOCABULARY) for _ in range(job.prompt_tokens)]
        sampling = SamplingParams(
            max_tokens=job.output_tokens, seed=0, temperature=0.0, ignore_eos=True
        )
        self._jobs[_id(job)] = job
        self._core.handle(Submit(RequestSpec(_id(job), prompt, sampling, output=list(job.tokens))))

    def evict(self, job: Job) -> None:
        """Abort it."""
        from pdcluster_worker.messages.engine import Abort

        self._core.handle(Abort(_id(job)))
        del self._jobs[_id(job)]
        super().evict(job)

    def advance(self, until: float) -> list[Job]:
        """Step until a job ends or the time has come."""
        from pdcluster_worker.messages.engine import RequestFailed, Tokens

        ended: list[Job] = []
        while not ended and self.now < until:
            outputs = self._core.step()
            self._pass()
            for output in outputs:
                if isinstance(output, RequestFailed):
                    raise RuntimeError(f"{output.request_id}: {output.message}")
                for token in output.tokens if isinstance(output, Tokens) else ():
                    job = self._jobs[token.request_id]
                    job.tokens.append(token.token_id)
                    job.flight.num_tokens += 1
                    job.prefill_seconds += token.prefill_seconds or 0.0
                    self.token(job)
                    if token.finish_reason is not None:
                        ended.append(self._jobs.pop(token.request_id))
        return self.end(ended)

    def _pass(self) -> None:
        now = self._clock()
        self.passed(now - self._last)
        self.now += now - self._last
        self._last = now


def _id(job: Job) -> str:
    return f"{job.name} {job.num_evicted}"


def profile(server: Server) -> float:
    """Seconds of a token in a full batch."""
    seconds = []
    for number in range(PROFILED):
        batch = jobs(
            [Group("p", SEATS, 1.0, 64, is_bimodal=False)],
            f"profile {number}",
            prompt_tokens=PROMPT_TOKENS,
        )
        for job in batch:
            server.start(job)
        while server.running:
            server.advance(inf)
        seconds += [(job.ended - job.first) / job.output_tokens for job in batch if number]
    return sum(seconds) / len(seconds)


def forecast_rounds(server: Server, token_seconds: float) -> dict[str, list[Forecasts]]:
    """The first experiment twice: from presets, and once more with what was learned."""
    presets = Presets(
        token_seconds, PRESETS.output_tokens * SCALE, round(PRESETS.max_output_tokens * SCALE), None
    )
    columns, found = forecasters(presets, SEATS), {}
    for title in ("estimators begin from presets", "after a round of the same groups"):
        requests = jobs(PAPER, f"real {title}", SCALE, PROMPT_TOKENS)
        found[title] = forecasting(server, requests, columns, SEATS, EVERY_SECONDS)
    return found


def real_groups(token_seconds: float) -> list[Group]:
    """Those of the second experiment, with deadlines in seconds."""
    return [
        Group(name, count, units * token_seconds, tokens, is_bimodal=False)
        for name, count, units, tokens in UNITS
    ]


def decide(server: Server, token_seconds: float, name: str) -> Outcome:
    """The second experiment in the order that one estimator asks for."""
    most = round(PRESETS.max_output_tokens * OUTPUT_TOKENS / PRESETS.output_tokens)
    column = forecasters(Presets(token_seconds, OUTPUT_TOKENS, most, None), SEATS)[name]
    groups = real_groups(token_seconds)
    warm = _limited(
        jobs(
            [Group(g.name, 6, 1.0, g.mean_output, is_bimodal=False) for g in groups],
            "warm",
            1.0,
            PROMPT_TOKENS,
        ),
        most,
    )
    return Deciding(server, column, SEATS, None).run(
        groups, _limited(jobs(groups, "real", 1.0, PROMPT_TOKENS), most), warm
    )


def _limited(requests: Sequence[Job], most: int) -> list[Job]:
    for job in requests:
        job.flight.max_tokens = most
    return list(requests)
