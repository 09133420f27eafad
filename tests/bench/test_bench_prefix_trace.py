"""The prefix-heavy trace: shared beginnings, own ends, the same trace for the same seed."""

from collections import Counter

from prefix_trace import PrefixTrace

TRACE = PrefixTrace(
    num_requests=400,
    num_contexts=8,
    system_tokens=4,
    context_tokens=10,
    question_tokens=(2, 5),
    skew=1.0,
)


def test_prompts_share_the_system_prompt_and_one_of_the_contexts() -> None:
    prompts = [ask.prompt for ask in TRACE.needs_ping("0")]
    assert all(isinstance(prompt, list) and 16 <= len(prompt) <= 19 for prompt in prompts)

    assert len({tuple(prompt[:4]) for prompt in prompts}) == 1
    assert len({tuple(prompt[:14]) for prompt in prompts}) == 8
    assert len({tuple(prompt) for prompt in prompts}) == 400


def test_first_context_is_used_most() -> None:
    counts = Counter(tuple(ask.prompt[:14]) for ask in TRACE.needs_ping("0"))
    share = max(counts.values()) / 400

    assert 0.28 < share < 0.46  # 1 / (1 + 1/2 + ... + 1/8) = 0.37


def test_seed_decides_the_trace() -> None:
    assert TRACE.needs_ping("0") == TRACE.needs_ping("0")
    assert TRACE.needs_ping("0") != TRACE.needs_ping("1")


def test_trace_says_its_sizes() -> None:
    assert TRACE.in_words() == (
        "400 requests: 4 tokens of system prompt, one of 8 contexts of 10 (skew 1), 2 to 5 of "
        "their own, 8 out"
    )
