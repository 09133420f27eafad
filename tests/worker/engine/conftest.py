"""Engines on the exact stand-ins of `tests.worker`; the core itself is the real one."""

import pytest

from pdcluster_worker.engine.core import EngineCore
from pdcluster_worker.messages import engine as m
from pdcluster_worker.messages.engine_settings import EngineSettings
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, TransferTarget
from tests.worker.fake_clock import FakeClock
from tests.worker.fake_network import FakeNetwork, FakeTransport
from tests.worker.fake_runner import FakeRunner
from tests.worker.fake_tiers import FakeTiers


class EngineRig:
    """One core, its surroundings, and everything that it has said."""

    def __init__(
        self,
        network,
        clock,
        name,
        delayer=None,
        depth=1,
        drafter=None,
        tiers=(),
        store=None,
        **sizes,
    ):
        values = {
            "block_size": 4,
            "num_blocks": 16,
            "max_batched_tokens": 32,
            "max_sequences": 4,
            "max_model_len": 100,
        } | sizes
        self.settings = EngineSettings(**values)
        self.network, self.clock = network, clock
        self.runner = FakeRunner(
            self.settings.num_blocks,
            self.settings.block_size,
            window=self.settings.window,
            depth=depth,
        )
        self.transport = FakeTransport(network, self.runner, name, clock, verify=True)
        epochs = (number.to_bytes(16, "big") for number in range(1, 1000))
        self.tiers = FakeTiers(self.runner, tiers, store)
        self.core = EngineCore(
            self.settings,
            self.runner,
            self.transport,
            clock,
            lambda: next(epochs),
            delayer=delayer,
            drafter=drafter,
            tiers=self.tiers,
        )
        self.outputs = []

    def handle(self, *inputs):
        """Give messages to the core and take one step."""
        for message in inputs:
            self.core.handle(message)
        return self.step()

    def step(self):
        """One step, after which the pool must be whole."""
        outputs = self.core.step()
        self.core.check()
        self.core.check_when_idle()
        self.outputs += outputs
        return outputs

    def run(self, limit=200):
        """Step while there is work."""
        for _ in range(limit):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError("the engine never went idle")

    def of(self, kind):
        """All outputs of one kind, in order."""
        return [output for output in self.outputs if isinstance(output, kind)]

    def tokens(self, request_id):
        """All Token structs of one request, in order."""
        return [
            token
            for output in self.of(m.Tokens)
            for token in output.tokens
            if token.request_id == request_id
        ]

    def token_ids(self, request_id):
        """Ids of them."""
        return [token.token_id for token in self.tokens(request_id)]

    def serve(self, request):
        """Run one request to its end."""
        self.handle(m.Submit(request))
        self.run()

    def submit(self, prompts, **options):
        """Give prompts by request id at once, and take one step."""
        return self.handle(*(m.Submit(make_spec(*item, **options)) for item in prompts.items()))

    def check(self, prompts, num_tokens):
        """Each of these requests has so many tokens, the right ones."""
        assert {name: self.token_ids(name) for name in prompts} == {
            name: self.runner.reference(list(prompt), num_tokens)
            for name, prompt in prompts.items()
        }

    @property
    def stats(self):
        """The latest statistics."""
        return self.of(m.EngineStats)[-1]

    @property
    def blocks(self):
        """Blocks by state, zeros left out."""
        return {state: count for state, count in self.core.pool.counts().items() if count}


def make_spec(
    request_id="a", prompt=(1, 2, 3, 4, 5), max_tokens=3, output=(), priority=0, **sampling
):
    return RequestSpec(
        request_id,
        list(prompt),
        SamplingParams(max_tokens=max_tokens, seed=0, **sampling),
        list(output),
        priority,
    )


@pytest.fixture
def spec():
    """Builds a RequestSpec; every value has a default."""
    return make_spec


@pytest.fixture
def engine():
    """Builds an EngineRig of its own; sizes by keyword."""
    return lambda **sizes: EngineRig(FakeNetwork(), FakeClock(), "alone", **sizes)


class Pair:
    """A decode and a prefill engine on one network; what their servers would say by request id."""

    def __init__(self, decode, prefill):
        self.network, self.clock = FakeNetwork(), FakeClock()
        self.decode = EngineRig(self.network, self.clock, "decode", **(decode or {}))
        self.prefill = EngineRig(self.network, self.clock, "prefill", **(prefill or {}))

    def start(self, request, prefill_step=True):
        """Receive on the decode side, Prefill on the other; returns the ReceiveReady."""
        self.decode.handle(m.Receive(request))
        ready = self.decode.of(m.ReceiveReady)[-1]
        target = TransferTarget(
            ready.epoch, "decode", ["nowhere"], ready.cached_tokens, ready.block_ids
        )
        self.prefill.core.handle(m.Prefill(request, target))
        if prefill_step:
            self.prefill.step()
        return ready

    def written(self, request_id="a"):
        """Have the prefill side write everything; the ReceiveDone that its server would send."""
        self.prefill.run()
        self.network.deliver_all()
        self.prefill.step()
        done, epoch = self.prefill.of(m.PrefillDone)[-1], self.decode.of(m.ReceiveReady)[-1].epoch
        first = self.prefill.tokens(request_id)[0]
        return m.ReceiveDone(request_id, epoch, first, done.checksum)

    def finish(self, request_id="a"):
        """Write everything, and decode to the end."""
        self.decode.handle(self.written(request_id))
        self.decode.run()

    def check(self, prompt, num_tokens, request_id="a"):
        """The tokens of both sides are those of one engine."""
        both = self.prefill.token_ids(request_id)[:1] + self.decode.token_ids(request_id)
        assert both == self.decode.runner.reference(list(prompt), num_tokens)


@pytest.fixture
def pair():
    """Builds a pair: pair(decode={...}, prefill={...})."""
    return lambda decode=None, prefill=None: Pair(decode, prefill)
