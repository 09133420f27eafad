"""check_stop [V11]: order and gates."""

import pytest

from pdcluster_worker.engine.request import EngineRequest, Finish, check_stop, ends_by_length
from pdcluster_worker.messages.requests import Constraint, RequestSpec, SamplingParams


def request(output, max_tokens=10, **sampling):
    spec = RequestSpec(
        "a", [1, 2, 3], SamplingParams(max_tokens=max_tokens, seed=0, **sampling), list(output)
    )
    return EngineRequest.from_spec(spec, now=0.0)


@pytest.mark.parametrize(
    ("output", "sampling", "expected"),
    [
        ([5], {}, None),
        ([7], {"eos_token_ids": [7]}, Finish("stop")),
        ([7], {"eos_token_ids": [7], "stop_token_ids": [7]}, Finish("stop")),
        ([7], {"eos_token_ids": [7], "ignore_eos": True}, None),
        (
            [7],
            {"eos_token_ids": [7], "stop_token_ids": [7], "ignore_eos": True},
            Finish("stop", stop_reason=7),
        ),
        ([8], {"stop_token_ids": [8]}, Finish("stop", stop_reason=8)),
        ([8, 5], {"stop_token_ids": [8]}, None),
        ([7], {"eos_token_ids": [7], "min_tokens": 2}, None),
        ([8], {"stop_token_ids": [8], "min_tokens": 2}, None),
        ([5, 7], {"eos_token_ids": [7], "min_tokens": 2}, Finish("stop")),
        ([5, 5], {"max_tokens": 2}, Finish("length")),
        ([5, 7], {"max_tokens": 2, "eos_token_ids": [7]}, Finish("stop")),
        ([5, 7], {"max_tokens": 2, "eos_token_ids": [7], "min_tokens": 3}, Finish("length")),
        ([5] * 7, {}, Finish("length")),  # 3 + 7 tokens reach max_model_len
    ],
)
def test_check_stop(output, sampling, expected):
    assert check_stop(request(output, **sampling), max_model_len=10) == expected


@pytest.mark.parametrize(("num_more", "expected"), [(0, False), (1, True)])
def test_ends_by_length_looks_ahead(num_more, expected):
    assert (
        ends_by_length(request([], max_tokens=1), max_model_len=10, num_more=num_more) is expected
    )
    assert ends_by_length(request([]), max_model_len=4, num_more=num_more) is expected


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 9}])
def test_an_end_token_under_a_constraint_ends_whatever_it_was_to_wait_for(options):
    """It is sampled then only where the grammar has ended, and nothing can follow."""
    ended = request([6, 2], eos_token_ids=[2], constraint=Constraint("regex", "a"), **options)

    assert check_stop(ended, 100) == Finish("stop")
