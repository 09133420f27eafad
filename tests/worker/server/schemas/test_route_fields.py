"""Route fields of a request: a session, and for tests a worker, a policy and weights
[Y9], [Y10].
"""

import pytest

from pdcluster_schema.routing import DecodeScoreSpec, KvAwareSpec
from pdcluster_worker.routing.decode_choice import RouteHints

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def allowing(rig):
    """A policy under which requests may say how they are routed."""
    score = DecodeScoreSpec(
        policy="kvAware", kv_aware=KvAwareSpec(overlap_credit=2.0), allow_request_overrides=True
    )
    rig.policy = rig.policy.model_copy(update={"decode_score": score})
    return score


async def hints_of(rig, http, **fields):
    response = await http.post(CHAT, json=BODY | {"pdcluster": fields})
    assert response.status_code == 200, response.text
    return rig.backend.hints[-1]


async def test_session_is_passed_on_under_any_policy(rig, http):
    assert await hints_of(rig, http, session="chat-7") == RouteHints(session="chat-7")
    assert await hints_of(rig, http, session=None) == RouteHints()
    assert await hints_of(rig, http) == RouteHints()


async def test_route_names_a_worker_a_policy_and_weights(rig, http, allowing):
    route = {
        "worker": "chat-decode-0",
        "policy": "roundRobin",
        "temperature": 1,
        "overlap_credit": 0.5,
        "active_request_weight": 3,
    }
    hints = await hints_of(rig, http, session="s", route=route)
    expected = allowing.model_copy(
        update={
            "policy": "roundRobin",
            "temperature": 1.0,
            "kv_aware": KvAwareSpec(overlap_credit=0.5, active_request_weight=3.0),
        }
    )

    assert hints == RouteHints("s", "chat-decode-0", expected)


async def test_y9_all_four_weights_are_overridable(rig, http, allowing):
    names = ("overlap_credit", "prefill_load_scale", "prefill_decay", "active_request_weight")
    hints = await hints_of(
        rig, http, route={name: number + 5.0 for number, name in enumerate(names)}
    )

    assert hints.decode_score == allowing.model_copy(
        update={"kv_aware": KvAwareSpec(**{name: n + 5.0 for n, name in enumerate(names)})}
    )


async def test_route_with_a_worker_alone_keeps_the_policy(rig, http, allowing):
    assert await hints_of(rig, http, route={"worker": "a"}) == RouteHints(worker="a")
