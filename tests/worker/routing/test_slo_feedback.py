"""The length threshold that follows what is measured: which way, how far, and when it rests."""

import pytest

from pdcluster_schema.routing import SloFeedbackSpec
from pdcluster_worker.routing.ttft import (
    ADJUST_SECONDS,
    MIN_SAMPLES,
    PROBE_SECONDS,
    STEP,
    SloFeedback,
)

POLICY = SloFeedbackSpec()
START = 256


class World:
    """A cluster where a prompt takes `base + per_token * length` seconds on each side; time is
    passed in.
    """

    def __init__(self, local: tuple[float, float], remote: tuple[float, float]) -> None:
        self.feedback = SloFeedback()
        self.cost = {"local": local, "remote": remote}
        self.now = 100.0

    def first_tokens(self, local: list[int], remote: list[int]) -> None:
        for tokens in local:
            base, per_token = self.cost["local"]
            self.feedback.first_token("local", tokens, base + per_token * tokens, self.now)
        for tokens in remote:
            base, per_token = self.cost["remote"]
            self.feedback.first_token("remote", tokens, base + per_token * tokens, self.now)

    def threshold(self, policy: SloFeedbackSpec = POLICY) -> int:
        return self.feedback.threshold(policy, START, self.now)

    def settle(self, seconds: int = 60, policy: SloFeedbackSpec = POLICY) -> int:
        """Serve prompts around the threshold, each where it belongs, for so many seconds."""
        for _ in range(seconds):
            self.now += ADJUST_SECONDS
            current = self.threshold(policy)
            self.first_tokens(
                [current // 4, current // 2, current - 1], [current, current * 2, current * 3]
            )
        return self.threshold(policy)


def test_threshold_settles_where_both_sides_are_equal() -> None:
    """Here 1 ms a token; there .2 ms a token after 400 ms: equal at 500 tokens, give or take the
    margin and one step.
    """
    world = World(local=(0.0, 0.001), remote=(0.4, 0.0002))
    settled = world.settle()

    assert 500 / (STEP * 1.25) <= settled <= 500 * STEP * 1.25


@pytest.mark.parametrize(
    ("local", "remote", "expected"),
    [
        pytest.param(
            (0.0, 0.001), (0.01, 0.0001), POLICY.min_threshold, id="always better elsewhere"
        ),
        pytest.param((0.0, 0.0001), (0.5, 0.0011), POLICY.max_threshold, id="always better here"),
    ],
)
def test_threshold_stays_within_its_bounds(
    local: tuple[float, float], remote: tuple[float, float], expected: int
) -> None:
    assert World(local, remote).settle() == expected


def test_threshold_rests_while_both_are_about_equal() -> None:
    world = World(local=(0.0, 0.001), remote=(0.0, 0.0011))

    assert world.settle() == START


def test_threshold_waits_for_a_few_samples_and_between_steps() -> None:
    world = World(local=(0.0, 0.001), remote=(0.0, 0.0001))
    world.first_tokens([100] * (MIN_SAMPLES - 1), [300] * MIN_SAMPLES)
    assert world.threshold() == START

    world.first_tokens([100], [])
    assert world.threshold() == START  # a moment after the last look
    world.now += ADJUST_SECONDS
    assert world.threshold() == round(START / STEP)
    assert world.threshold() == round(START / STEP)


def test_slow_decodes_lower_the_threshold_while_elsewhere_is_good_enough() -> None:
    """Both take the same time to a first token, and the pace of 60 ms misses its 50: prefills here
    are what can give way.
    """
    world = World(local=(0.1, 0.001), remote=(0.1, 0.001))
    world.first_tokens([100, 200] * MIN_SAMPLES, [300, 400] * MIN_SAMPLES)
    world.feedback.finished(0.060, world.now)

    assert world.threshold() == round(START / STEP)


@pytest.mark.parametrize("pace", [0.050, 0.057])
def test_decodes_about_at_their_objective_change_nothing(pace: float) -> None:
    world = World(local=(0.1, 0.001), remote=(0.1, 0.001))
    world.first_tokens([100, 200] * MIN_SAMPLES, [300, 400] * MIN_SAMPLES)
    world.feedback.finished(pace, world.now)

    assert world.threshold() == START


def test_slow_decodes_do_not_send_prompts_where_they_take_far_too_long() -> None:
    """Remote 3 s against an objective of .5: the threshold goes up, not down."""
    world = World(local=(0.1, 0.001), remote=(3.0, 0.001))
    world.first_tokens([100, 200] * MIN_SAMPLES, [300, 400] * MIN_SAMPLES)
    world.feedback.finished(0.060, world.now)

    assert world.threshold() == START * STEP


def places(world: World, seconds: int, length: int = 300) -> list[str]:
    """Place of a prompt a second of that length."""
    found = []
    for _ in range(seconds):
        world.now += 1.0
        threshold = world.feedback.threshold_for(length, POLICY, START, world.now)
        found.append("remote" if length >= threshold else "local")
        world.first_tokens(
            [length] if found[-1] == "local" else [], [length] if found[-1] == "remote" else []
        )
    return found


def test_a_side_not_seen_for_long_gets_one_prompt_as_a_probe() -> None:
    world = World(local=(0.0, 0.0001), remote=(0.5, 0.001))
    assert world.settle() == POLICY.max_threshold
    found = places(world, 3 * int(PROBE_SECONDS))

    assert found.count("remote") in (2, 3)
    assert world.threshold() == POLICY.max_threshold


def test_a_side_that_has_become_better_is_found_out() -> None:
    world = World(local=(0.0, 0.001), remote=(5.0, 0.001))
    assert world.settle() == POLICY.max_threshold
    world.cost["remote"] = (0.0, 0.0001)
    found = places(world, 20 * int(PROBE_SECONDS))

    assert found[-20:].count("remote") >= 19  # but for a probe of the other side


def test_the_local_side_is_probed_too_and_short_prompts_probe_nothing() -> None:
    world = World(local=(0.5, 0.001), remote=(0.0, 0.0001))
    assert world.settle() == POLICY.min_threshold

    assert places(world, 3 * int(PROBE_SECONDS)).count("local") in (2, 3)
    assert set(places(world, int(PROBE_SECONDS), length=POLICY.min_threshold - 1)) == {"local"}


def test_a_side_with_too_few_samples_is_probed_sooner() -> None:
    world = World(local=(0.0, 0.001), remote=(5.0, 0.001))
    # below the threshold: nothing would go
    found = places(world, 2 * int(PROBE_SECONDS), length=100)

    assert MIN_SAMPLES <= found.count("remote") <= MIN_SAMPLES + 2


def test_prompts_of_one_length_on_a_side_borrow_the_others_slope() -> None:
    """Local .3 s at 100 tokens by the fixed part alone; remote 1 ms a token: equal at 256 with .456
    s, as it is.
    """
    world = World(local=(0.2, 0.001), remote=(0.2, 0.001))
    world.first_tokens([100] * MIN_SAMPLES, [300, 400] * MIN_SAMPLES)

    assert world.threshold() == START


def test_new_bounds_hold_at_once() -> None:
    world = World(local=(0.0, 0.0001), remote=(0.5, 0.001))
    assert world.settle() == POLICY.max_threshold

    assert world.threshold(SloFeedbackSpec(max_threshold=1000)) == 1000
    assert World((0, 0), (0, 0)).threshold(SloFeedbackSpec(min_threshold=500)) == 500
