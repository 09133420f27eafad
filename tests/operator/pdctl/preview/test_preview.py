"""Effects of applying a file: fields, the revision, pools, accelerators, refusals."""

from dataclasses import replace
from typing import Any

import pytest

from pdcluster_api.plan.observed.state import Observed, ScalerState
from pdcluster_schema.autoscale import AutoscaleSpec
from pdcluster_schema.load import parse
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import revision_of
from pdctl.cli.plan import render_preview
from pdctl.preview.differences import changed_fields
from pdctl.preview.preview import (
    Accelerators,
    Effect,
    PoolChange,
    Preview,
    effect_of,
    preview,
    preview_of_files,
    steady_state,
)
from tests.operator.pdcluster_api.plan.clusters import NOW, identity, make_cluster, pool, workload
from tests.schema.object_cases import NIGHT, Change, at, both, minimal
from tests.schema.revision_cases import OF_ONE_ROLE, ROLLS, STAYS

B200 = {"gpu": "B200"}
STRATEGY = "spec.rollout.strategy"


def changed(change: Change, before: Change | None = None) -> tuple[PDCluster, PDCluster]:
    old, new = minimal(), minimal()
    for document in (old, new):
        if before is not None:
            before(document)
    change(new)
    return parse(old), parse(new)


def of_files(old: PDCluster, new: PDCluster) -> Preview:
    return preview_of_files(new, old, NOW)


def accelerators(found: Preview) -> dict[str, tuple[int, int, int]]:
    return {each.gpu: (each.now, each.meanwhile, each.after) for each in found.accelerators}


def test_a_default_that_is_written_out_is_no_change():
    old, new = changed(
        both(at("spec.engine.blockSize", 16), at("spec.rollout.gracePeriodSeconds", 300))
    )

    assert changed_fields(old, new) == []


def test_a_roles_own_value_counts_even_if_it_is_the_default():
    old, new = changed(
        at("spec.roles.decode.engine.maxSequences", 64), before=at("spec.engine.maxSequences", 32)
    )

    assert changed_fields(old, new) == [("spec.roles.decode.engine.maxSequences", None, 64)]
    assert list(of_files(old, new).replaced) == ["decode"]


def test_a_value_that_each_role_overrides_does_nothing():
    own = both(
        at("spec.roles.decode.engine.maxSequences", 32),
        at("spec.roles.prefill.engine.maxSequences", 32),
    )
    old, new = changed(at("spec.engine.maxSequences", 99), before=own)

    assert [change.effect for change in of_files(old, new).changes] == [Effect.NONE]


@pytest.mark.parametrize("name", sorted(ROLLS.keys() - OF_ONE_ROLE))
def test_what_makes_a_revision_is_shown_as_such(name: str):
    old, new = changed(ROLLS[name])
    found = of_files(old, new)

    assert found.is_rollout
    assert (found.before, found.after) == (revision_of(old.spec), revision_of(new.spec))
    assert name == "other roles" or Effect.REVISION in {change.effect for change in found.changes}
    assert name == "other roles" or set(found.replaced) == {"prefill", "decode"}


def test_flexible_pools_wait_for_the_autoscaler():
    pools = (at(f"spec.roles.{role}.pools.0.flexible", True) for role in ("prefill", "decode"))
    mode = at("spec.autoscale", {"mode": "On", "budget": {"total": 8}})
    old, new = changed(both(*pools), before=mode)
    found = of_files(old, new)
    assert {change.effect for change in found.changes} == {Effect.AUTOSCALER}
    assert not found.is_rollout


@pytest.mark.parametrize("name", OF_ONE_ROLE)
def test_what_concerns_one_role_replaces_its_workers_alone(name: str):
    old, new = changed(ROLLS[name])
    found = of_files(old, new)
    (change,) = found.changes

    assert not found.is_rollout
    assert (found.replaced, change.effect) == ({OF_ONE_ROLE[name]: change.path}, Effect.ROLE)


def test_a_role_that_is_replaced_alone_needs_its_own_accelerators_twice():
    pools = both(
        at("spec.roles.prefill.pools", [{"name": "p", "gpu": "B200", "replicas": 4}]),
        at("spec.roles.decode.pools", [{"name": "d", "gpu": "H200", "replicas": 8}]),
    )
    flag = at("spec.roles.decode.engine.maxSequences", 32)

    def meanwhile(strategy: str) -> dict[str, tuple[int, int, int]]:
        return accelerators(of_files(*changed(flag, both(pools, at(STRATEGY, strategy)))))

    assert meanwhile("BlueGreen") == {"B200": (4, 4, 4), "H200": (8, 16, 8)}
    assert meanwhile("Recreate") == {"B200": (4, 4, 4), "H200": (8, 8, 8)}


@pytest.mark.parametrize("name", STAYS)
def test_what_makes_no_revision_is_shown_as_such(name: str):
    found = of_files(*changed(STAYS[name]))

    assert not found.is_rollout
    assert name == "a default of a role" or not any(
        effect_of(change.path) is Effect.REVISION for change in found.changes
    )


@pytest.mark.parametrize(
    ("path", "value", "effect"),
    [
        ("spec.routing.offload.minOffloadLength", 1, Effect.POLICY),
        ("spec.qos.admission.maxQueuedRequests", 1, Effect.POLICY),
        ("spec.autoscale.mode", "Advise", Effect.MODE),
        ("spec.autoscale.tolerance", 0.2, Effect.ASLEEP),
        ("spec.service.port", 9000, Effect.SERVICE),
        ("spec.service.apiKeySecret", "keys", Effect.REVISION),
        ("spec.networkPolicy.enabled", False, Effect.OBJECTS),
        ("spec.rollout.drainTimeoutSeconds", 60, Effect.LATER),
        ("spec.discovery.etcd.image", "etcd:2", Effect.ETCD),
        ("spec.roles.decode.pools.0.replicas", 3, Effect.POOLS),
        ("spec.roles.decode.pools.0.maxReplicas", 3, Effect.BOUNDS),
        ("metadata.labels.team", "a", Effect.LABELS),
    ],
)
def test_each_field_says_when_it_takes_effect(path: str, value: Any, effect: Effect):
    (found,) = of_files(*changed(at(path, value))).changes

    assert (found.path, found.effect) == (path.replace("pools.0", "pools[cpu]"), effect)


@pytest.mark.parametrize(
    ("strategy", "effect"), [("Rolling", Effect.STEPS), ("BlueGreen", Effect.ASLEEP)]
)
def test_a_budget_without_the_autoscaler_is_for_rolling_alone(strategy: str, effect: Effect):
    budget = at("spec.autoscale.budget.total", 5)
    (found,) = of_files(*changed(budget, before=at(STRATEGY, strategy))).changes

    assert found.effect == effect


ROLLING = both(
    at(STRATEGY, "Rolling"),
    at("spec.roles.prefill.pools", [{"name": "p", "gpu": "B200", "replicas": 1}]),
    at("spec.roles.decode.pools", [{"name": "d", "gpu": "H200", "replicas": 2}]),
)
OTHER_ENGINE = at("spec.engine.blockSize", 32)


def steps_of(change: Change) -> list[str]:
    """Lines of `pdctl plan` from the table of steps on, up to the next block."""
    old, new = changed(change, before=ROLLING)
    blocks = render_preview(new, of_files(old, new)).split("\n\n")
    (found,) = [block.splitlines() for block in blocks if block.startswith("STEP")]
    return [" ".join(line.split()) for line in found]


def test_a_role_that_answers_instead_of_another_comes_by_blue_green():
    old = make_cluster(strategy="Rolling")
    found = of_files(old, make_cluster(mixed=[pool(2)], strategy="Rolling"))

    assert (found.strategy, found.steps) == ("BlueGreen", ())


def test_room_that_a_rolling_roll_out_needs_is_shown_with_how_to_do_without():
    old, new = (make_cluster(strategy="Rolling", engine=number) for number in (64, 65))
    text = " ".join(render_preview(new, of_files(old, new)).split())

    assert "2 cpu more must be free; rollout.maxSurge 0 with maxUnavailable 1 needs none" in text


def test_a_rolling_roll_out_is_shown_step_by_step_with_the_accelerators_of_each():
    assert steps_of(OTHER_ENGINE) == [
        "STEP DECODE PREFILL AT MOST",
        "1 of 2 1 new, 2 old 1 new, 1 old 2 B200, 3 H200",
        "2 of 2 1 new, 1 old 1 new, 1 old 2 B200, 3 H200",
        "2 of 2 2 new, 1 old 1 new, 1 old 2 B200, 3 H200",
        "2 of 2 2 new, 0 old 1 new, 0 old 2 B200, 3 H200",
    ]


def test_the_step_that_the_budget_has_no_room_for_is_shown_with_what_it_lacks():
    *_, step, first, second = steps_of(both(OTHER_ENGINE, at("spec.autoscale.budget.total", 3)))

    assert step == "1 of 2 0 new, 2 old 0 new, 1 old 1 B200, 2 H200"
    assert f"{first} {second}".endswith(
        "needs 1 H200 more than autoscale.budget has: raise that, or rollout.maxUnavailable."
    )


@pytest.mark.parametrize(("gpu", "effect"), [("cpu", Effect.UNUSED), ("H100", Effect.ACCELERATORS)])
def test_a_definition_over_a_known_type_concerns_the_pools_that_name_it(gpu: str, effect: Effect):
    old, new = changed(
        at("spec.accelerators.H100", {"nodeLabels": {"a.b/c": "d"}}),
        before=at("spec.roles.decode.pools.0.gpu", gpu),
    )

    assert [(each.path, each.effect) for each in of_files(old, new).changes] == [
        ("spec.accelerators.H100.nodeLabels.a.b/c", effect)
    ]


def test_numbers_of_a_type_may_change_and_end_no_worker():
    number = "spec.accelerators.MI300.memoryBytes"
    old, new = changed(
        at(number, 2 * 10**9), before=at("spec.accelerators.MI300", {"memoryBytes": 10**9})
    )
    found = of_files(old, new)

    assert [(each.path, each.effect) for each in found.changes] == [(number, Effect.POLICY)]
    assert found.refused == ()


def test_a_worker_counts_with_all_its_accelerators():
    """Eight of a pool's own, or one for each rank, and in the old revision, which grows too, as
    many as it had.
    """
    eight = {"gpu": "B200", "gpusPerReplica": 8}
    old = make_cluster(prefill=[pool(2, **eight)], decode=[pool(1, gpu="B300")])
    new = make_cluster(prefill=[pool(8, **eight)], decode=[pool(1, gpu="B300")])
    ranks = new.spec.engine.model_copy(update={"tensor_parallel_size": 4})
    other = new.model_copy(update={"spec": new.spec.model_copy(update={"engine": ranks})})

    assert of_files(old, new).pools[0] == PoolChange(("prefill", "cpu"), "8 x B200", 2, 8)
    assert accelerators(of_files(old, new)) == {"B200": (16, 64, 64), "B300": (1, 1, 1)}
    assert accelerators(of_files(old, other)) == {"B200": (16, 128, 64), "B300": (1, 5, 4)}


def test_what_a_roll_out_needs_beyond_the_budget_is_shown_before_it_begins():
    eight = [pool(1, gpu="B200", gpusPerReplica=8)]

    def scaled(strategy: str, sequences: int = 64) -> PDCluster:
        cluster = make_cluster(prefill=eight, decode=eight, strategy=strategy, engine=sequences)
        autoscale = AutoscaleSpec.model_validate({"mode": "On", "budget": {"total": 16}})
        spec = cluster.spec.model_copy(update={"autoscale": autoscale})
        return cluster.model_copy(update={"spec": spec})

    for strategy, reasons in (("BlueGreen", ["RolloutOverBudget"]), ("Recreate", [])):
        found = of_files(scaled(strategy), scaled(strategy, 32))
        assert [reason for reason, _ in found.problems] == reasons
    (problem,) = of_files(scaled("BlueGreen"), scaled("BlueGreen", 32)).problems
    assert "needs 32 accelerators, 16 beyond budget.total 16" in problem.message
    assert of_files(scaled("BlueGreen"), scaled("BlueGreen")).problems == ()


def test_a_stateful_set_that_is_being_deleted_holds_what_its_pods_hold_and_no_more():
    old = make_cluster(decode=[pool(4)], strategy="Recreate")
    new = make_cluster(decode=[pool(4)], strategy="Recreate", engine=32)
    going = workload(identity(revision_of(old.spec)), 4, current=1, gone=True)

    assert accelerators(preview(new, old, replace(steady_state(old), workloads=[going]), NOW)) == {
        "cpu": (1, 5, 5)
    }


def test_a_scale_stays_where_the_file_says_nothing_new_and_goes_where_it_does():
    old = make_cluster(decode=[pool(2, maxReplicas=9)])
    scaled = [ScalerState("prefill", "cpu", 1, 1), ScalerState("decode", "cpu", 6, 2)]
    revision = revision_of(old.spec)
    there = replace(
        steady_state(old),
        scalers=scaled,
        workloads=[workload(identity(revision, "prefill"), 1), workload(identity(revision), 6)],
    )

    same = preview(make_cluster(decode=[pool(2, maxReplicas=9)], engine=32), old, there, NOW).pools[
        1
    ]
    other = preview(make_cluster(decode=[pool(3, maxReplicas=9)]), old, there, NOW).pools[1]
    bound = preview(make_cluster(decode=[pool(2, maxReplicas=4)]), old, there, NOW).pools[1]

    assert (same.before, same.after) == (6, 6)
    assert same.note == "it was scaled; the file's replicas (2) is not new and asks for nothing"
    assert (other.before, other.after, other.note) == (6, 3, None)
    assert (bound.after, bound.note) == (4, "pool cpu: 6 workers are asked for, maxReplicas is 4")


def test_with_the_autoscaler_on_its_decision_counts():
    document = minimal()
    at("spec.autoscale", {"mode": "On", "budget": {"total": 20}})(document)
    old = parse(document)
    sizes = [
        {"role": "prefill", "pool": "cpu", "replicas": 1},
        {"role": "decode", "pool": "cpu", "replicas": 5},
    ]
    there = replace(steady_state(old), status={"autoscaling": {"mode": "On", "replicas": sizes}})
    at("spec.roles.decode.pools.0.replicas", 2)(document)
    decode = preview(parse(document), old, there, NOW).pools[1]

    assert (decode.after, decode.note) == (5, "the autoscaler decides, not the file's replicas (2)")


def autoscaled(decode: dict[str, Any], **autoscale: Any) -> PDCluster:
    """The minimal object with the autoscaler on; decode: fields of its decode pool."""
    document = minimal()
    at("spec.autoscale", {"mode": "On", **autoscale})(document)
    document["spec"]["roles"]["prefill"]["pools"][0].update(maxReplicas=9)
    document["spec"]["roles"]["decode"]["pools"][0].update({"maxReplicas": 9, **decode})
    return parse(document)


def decided_to(cluster: PDCluster, prefill: int, decode: int) -> Observed:
    """State after the autoscaler decided on these sizes, and all followed."""
    numbers, revision = {"prefill": prefill, "decode": decode}, revision_of(cluster.spec)
    record = {
        "mode": "On",
        "replicas": [
            {"role": role, "pool": "cpu", "replicas": number} for role, number in numbers.items()
        ],
    }
    return replace(
        steady_state(cluster),
        status={"autoscaling": record},
        scalers=[ScalerState(role, "cpu", number, 1) for role, number in numbers.items()],
        workloads=[workload(identity(revision, role), number) for role, number in numbers.items()],
    )


@pytest.mark.parametrize(
    ("decode", "autoscale", "after", "note"),
    [
        ({"maxReplicas": 4}, {}, 4, "bounds: 1 to 4 by minReplicas and maxReplicas"),
        (
            {"replicas": 8, "minReplicas": 8, "maxReplicas": 9},
            {},
            8,
            "bounds: 8 to 9 by minReplicas and maxReplicas",
        ),
        (
            {},
            {
                "schedules": [
                    {**NIGHT, "minReplicas": 7, "maxReplicas": 9, "start": "03:00", "end": "04:00"}
                ]
            },
            7,
            "bounds: 7 to 9 by schedule night",
        ),
        ({}, {"budget": {"total": 5}}, 4, "budget: "),
    ],
    ids=["lower max", "higher min", "schedule", "budget"],
)
def test_with_the_autoscaler_on_new_limits_move_its_decision_at_once(
    decode: dict[str, Any], autoscale: dict[str, Any], after: int, note: str
):
    bounds = {"minReplicas": 1, "maxReplicas": 9}
    old = autoscaled(bounds)
    found = preview(autoscaled({**bounds, **decode}, **autoscale), old, decided_to(old, 1, 6), NOW)

    assert (found.pools[1].before, found.pools[1].after) == (6, after)
    assert str(found.pools[1].note).startswith(note)
    assert accelerators(found) == {"cpu": (7, max(7, after + 1), after + 1)}
    assert found.mode == ("On", "On")


def test_what_would_stand_in_the_autoscalers_way_is_foreseen():
    old = autoscaled({})
    found = preview(
        autoscaled({"maxReplicas": 2}, ratio={"min": 2}), old, decided_to(old, 1, 6), NOW
    )

    assert [reason for reason, _ in found.problems] == []  # prefill has room, and follows
    assert found.pools[0].after == 4
    document = autoscaled({"maxReplicas": 2}, ratio={"min": 9}, budget={"total": 4})
    assert [
        reason for reason, _ in preview(document, old, decided_to(old, 1, 6), NOW).problems
    ] == ["RatioConstraintViolated"]


def test_a_schedule_that_will_exclude_a_bound_is_reported_before_it_begins():
    night = {
        **NIGHT,
        "days": ["Sat"],
        "timeZone": "Europe/Berlin",
        "maxReplicas": None,
        "minReplicas": 7,
    }
    old, new = autoscaled({"maxReplicas": 4}), autoscaled({"maxReplicas": 4}, schedules=[night])
    fine = autoscaled(
        {"maxReplicas": 4},
        schedules=[night, {**night, "name": "more", "minReplicas": None, "maxReplicas": 9}],
    )

    assert preview(new, old, decided_to(old, 1, 3), NOW).problems == (
        (
            "BoundsConflict",
            "when schedule night begins, Sat 22:00 Europe/Berlin: decode/cpu: minReplicas is 7 and "
            "maxReplicas is 4: 4 counts; "
            "lower minReplicas or raise maxReplicas",
        ),
    )
    assert preview(fine, old, decided_to(old, 1, 3), NOW).problems == ()


def test_replicas_of_a_file_are_overruled_only_where_the_autoscaler_knows_the_pool():
    old = autoscaled({})
    document = minimal()
    at("spec.autoscale", {"mode": "On", "budget": {"total": 20}})(document)
    document["spec"]["roles"]["decode"]["pools"] = [
        {"name": "cpu", "replicas": 3},
        {"name": "new", "replicas": 2},
    ]
    found = preview(parse(document), old, decided_to(old, 1, 6), NOW)
    effects = {change.path: change.effect for change in found.changes}

    assert effects["spec.roles.decode.pools[cpu].replicas"] is Effect.OVERRULED
    assert effects["spec.roles.decode.pools[new].replicas"] is Effect.POOLS
    assert [(each.key[1], each.after) for each in found.pools[1:]] == [("cpu", 6), ("new", 2)]


def test_without_an_object_everything_comes():
    found = preview(make_cluster(), None, None, NOW)

    assert (found.before, found.changes, found.is_rollout) == (None, (), False)
    assert [(each.before, each.after) for each in found.pools] == [(None, 1), (None, 2)]
    assert found.accelerators == (Accelerators("cpu", 0, 3, 3),)


def test_an_object_that_cannot_be_read_is_judged_by_what_serves():
    old = make_cluster()
    found = preview(make_cluster(engine=32), None, steady_state(old), NOW)

    assert (found.before, found.is_rollout, found.changes) == (revision_of(old.spec), True, ())


def test_lists_without_names_are_compared_as_a_whole():
    def tolerations(*values: str) -> Any:
        return at(
            "spec.podTemplate", {"spec": {"tolerations": [{"key": value} for value in values]}}
        )

    (found,) = changed_fields(*changed(tolerations("a", "b"), before=tolerations("a")))
    assert found == (
        "spec.podTemplate.spec.tolerations",
        [{"key": "a"}],
        [{"key": "a"}, {"key": "b"}],
    )
