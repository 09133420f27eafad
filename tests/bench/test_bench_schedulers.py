"""The load and the counts of the schedulers' bench; its engine is the real one and needs the model
[A7].
"""

import pytest
import schedulers as schedulers_module
from schedulers_load import LOAD, Answers, timed_requests

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.messages.engine_settings import SCHEDULER_NAMES
from pdcluster_worker.messages.requests import Token


def test_every_scheduler_is_measured_with_fields_that_the_worker_takes() -> None:
    engines = [
        EngineConfig(max_model_len=2048, **fields) for fields in schedulers_module.VARIANTS.values()
    ]

    assert {engine.scheduler for engine in engines} == set(SCHEDULER_NAMES)


def test_every_third_request_is_long_and_no_prompt_comes_twice() -> None:
    found = timed_requests(LOAD, 6, 2.0, "s")

    assert [len(one.spec.prompt) for one in found] == [128, 128, 1536] * 2
    assert len({tuple(one.spec.prompt) for one in found}) == 6
    assert found[-1].seconds == pytest.approx(3.0)
    assert found == timed_requests(LOAD, 6, 2.0, "s")


def test_answers_count_gaps_first_tokens_and_delays() -> None:
    answers = Answers({"a": 0.0, "b": 1.0})
    answers.take([Token("a", 1, queue_seconds=0.5)], 1.0)
    answers.take([Token("a", 2), Token("b", 3, queue_seconds=0.1)], 1.2)
    answers.take(
        [Token("a", 4, finish_reason="length"), Token("b", 5, finish_reason="length")], 1.3
    )

    assert answers.gaps == pytest.approx([0.2, 0.1, 0.1])
    assert answers.first == pytest.approx([1.0, 0.2])
    assert answers.tokens_per_second == pytest.approx(5 / 1.3)
    assert answers.delays == {"a": 0.5, "b": 0.1}
    assert answers.is_complete(2)
