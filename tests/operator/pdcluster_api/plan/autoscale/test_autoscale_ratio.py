"""The P:D band over weighted capacity: what is grown for its sake, what is held, and what cannot be
had.
"""

from dataclasses import replace

from pdcluster_api.plan.autoscale import rules
from pdcluster_api.plan.autoscale.pools import measured_weights, table_weight, worker_weight
from pdcluster_api.plan.autoscale.values import WorkerSample
from pdcluster_schema.accelerators import accelerators
from pdcluster_schema.engine import EngineSpec
from pdcluster_schema.sections import AcceleratorSpec
from tests.operator.pdcluster_api.plan.autoscale.worlds import (
    CALM,
    IDLE,
    D,
    P,
    agreed,
    facts_of,
    make_spec,
    pool,
    reasons,
    rules_of,
    see,
    step_of,
)

FULL = replace(CALM, kv_cache_usage_ratio=0.9)


def test_capacity_is_counted_in_h100s_by_what_each_role_is_bound_by():
    known = accelerators()
    assert table_weight("prefill", known["H100"]) == table_weight("decode", known["H100"]) == 1.0
    assert table_weight("prefill", known["B300"]) == 2.2750253  # 2.25 over 0.989 PFLOPS of BF16
    assert table_weight("prefill", known["B300"], "fp8") == 2.2738757  # 4.5 over 1.979
    assert table_weight("prefill", known["H200"], "fp4") == 1.0  # neither has a unit for it
    assert table_weight("decode", known["H200"]) == 1.4328358  # 4.8 over 3.35 TB/s
    assert table_weight("decode", known["B200"]) == 2.25  # 180 over 80 GB
    assert table_weight("decode", known["B300"]) == 2.3880597  # 8 over 3.35 TB/s
    assert table_weight("prefill", known["cpu"]) == table_weight("decode", known["cpu"]) == 1.0


def test_a_type_with_the_least_numbers_weighs_little_and_more_than_nothing():
    numbers = {"memoryBytes": 10**9, "bandwidthBytes": 10**9, "bf16Flops": 10**9}
    tiny = AcceleratorSpec.model_validate(numbers)
    spec = make_spec(ratio={"min": 0.5, "max": 1.0}, prefill=[pool(1)], decode=[pool(1)])
    tinied = spec.model_copy(update={"accelerators": {"H100": tiny}})
    for role, declared in tinied.roles.present().items():
        assert 0.0 < worker_weight(tinied, role, declared.pools[0]) < 1e-3
    assert see(tinied, prefill=FULL, decode=FULL).decision.replicas


def test_a_worker_weighs_what_its_engine_and_its_own_type_say():
    """Prefill by FP8 only where the engine computes in it; numbers of the object's own count."""
    own = {"X1": {"bf16Flops": 4 * 989 * 10**12, "bandwidthBytes": 67 * 10**11}}
    spec = make_spec(prefill=[pool(1, gpusPerReplica=2)], decode=[pool(1)])
    defined = {gpu: AcceleratorSpec.model_validate(each) for gpu, each in own.items()}
    x1 = spec.model_copy(update={"accelerators": defined})
    pools = {
        role: declared.pools[0].model_copy(update={"gpu": "X1"})
        for role, declared in spec.roles.present().items()
    }

    assert worker_weight(x1, "prefill", pools["prefill"]) == 8.0
    assert worker_weight(x1, "decode", pools["decode"]) == 2.0
    fp8 = EngineSpec.model_construct(type="vllm", args=("--quantization", "fp8"))
    b200 = pools["prefill"].model_copy(update={"gpu": "B200", "gpus_per_replica": 1})
    quantized = spec.model_copy(update={"engine": fp8})
    assert worker_weight(spec, "prefill", b200) == 2.2750253
    assert worker_weight(quantized, "prefill", b200) == 2.2738757


def test_measured_speeds_say_how_the_pools_of_a_role_compare():
    assert measured_weights([2.0, 1.0], [2000.0, 1500.0], 0.1) == [2.0, 1.5]
    assert measured_weights([2.0, 1.0], [2000.0, 1050.0], 0.1) == [2.0, 1.0]
    assert measured_weights([2.0, 1.0], [2000.0, None], 0.1) == [2.0, 1.0]
    assert measured_weights([2.0], [9.0], 0.1) == [2.0]
    assert measured_weights([2.0, 1.0], [2000.0, 1e9], 0.1) == [2.0, 2.0]
    assert measured_weights([2.0, 1.0], [2000.0, 0.001], 0.1) == [2.0, 0.5]


def test_prefill_follows_decode_to_stay_in_the_band():
    spec = make_spec(prefill=[pool(2)], ratio={"min": 0.5})

    outcome = see(spec, decode=FULL)  # decode grows to 5

    assert outcome.decision.replicas == {P: 3, D: 5}
    assert rules_of(outcome, "prefill") == [rules.RATIO]
    assert reasons(outcome) == []


def test_decode_follows_prefill_to_stay_in_the_band():
    spec = make_spec(ratio={"max": 1.0})

    outcome = see(spec, prefill=replace(CALM, engine_busy_ratio=0.95))

    assert outcome.decision.replicas == {P: 5, D: 5}


def test_the_band_holds_a_role_that_would_shrink_out_of_it():
    spec = make_spec(ratio={"min": 1.0})

    outcome = agreed(spec, prefill=IDLE)

    assert outcome.decision.replicas == {P: 4, D: 4}
    assert rules.RATIO in rules_of(outcome, "prefill")
    assert agreed(spec, prefill=IDLE, decode=IDLE).decision.replicas == {P: 3, D: 3}


def test_weights_of_accelerators_count():
    spec = make_spec(
        prefill=[pool(2, gpu="B200")], decode=[pool(4, gpu="H100")], ratio={"min": 1.0}
    )

    assert see(spec).decision.replicas == {P: 2, D: 4}  # 2 * 2.27 over 4
    assert see(spec, decode=FULL).decision.replicas == {P: 3, D: 5}


def test_measured_speed_counts_between_pools():
    fast = replace(CALM, prefill_token_rate=3000.0, prefill_busy_rate=0.5)
    slow = replace(CALM, prefill_token_rate=1000.0, prefill_busy_rate=0.5)
    spec = make_spec(prefill=[pool(2, "a"), pool(2, "b")], ratio={"min": 1.0})

    outcome = see(spec, prefill_a=fast, prefill_b=slow)

    # 2 + 2 / 2 is not 4; 3 + 2 / 2 is
    assert outcome.decision.replicas == {("prefill", "a"): 3, ("prefill", "b"): 2, D: 4}


def test_how_many_streams_a_decode_worker_has_does_not_move_the_band():
    """One stream on each worker of a pool that has just started, forty on those of the other."""
    spec = make_spec(decode=[pool(1, "new"), pool(3, "old")], ratio={"min": 1.0})
    few, many = (replace(CALM, num_requests_running=number) for number in (1.0, 40.0))

    assert see(spec, decode_new=few, decode_old=many).decision.replicas == {
        P: 4,
        ("decode", "new"): 1,
        ("decode", "old"): 3,
    }


def test_a_band_that_bounds_forbid_is_reported_and_kept_as_nearly_as_can_be():
    spec = make_spec(prefill=[pool(2, maxReplicas=3)], decode=[pool(10)], ratio={"min": 0.5})

    outcome = see(spec)

    assert outcome.decision.replicas == {P: 3, D: 10}
    assert reasons(outcome) == ["RatioConstraintViolated"]


def test_a_role_does_not_grow_out_of_a_band_that_the_other_cannot_follow():
    spec = make_spec(prefill=[pool(2, maxReplicas=2)], ratio={"min": 0.5})

    outcome = see(spec, decode=FULL)

    assert outcome.decision.replicas == {P: 2, D: 4}
    assert reasons(outcome) == ["ScalingLimited"]
    assert (
        step_of(outcome, rules.RATIO, "decode").before,
        step_of(outcome, rules.RATIO, "decode").after,
    ) == (5, 4)


def test_a_band_of_one_value_is_met_by_greater_sizes():
    spec = make_spec(prefill=[pool(1)], decode=[pool(3)], ratio={"min": 0.5, "max": 0.5})

    assert see(spec).decision.replicas == {P: 2, D: 4}


def test_a_band_far_away_is_met_in_several_decisions():
    outcome = see(make_spec(ratio={"min": 1000.0}))

    assert outcome.decision.replicas == {P: 260, D: 4}
    assert reasons(outcome) == ["RatioConstraintViolated"]


def test_a_worker_sample_has_no_say_in_a_role_of_one_pool():
    quick = WorkerSample("", 0, 0, 0, 0, 0.5, 0.6, prefill_token_rate=9e9, prefill_busy_rate=0.1)
    spec = make_spec(ratio={"min": 1.0, "max": 1.0})

    assert see(spec, facts_of(spec), prefill=quick).changed is False
