"""Flexible pools that are wrong: (change, the model's fault, the API server's field)."""

from tests.schema.object_cases import Change, at, both, vllm

PREFILL, DECODE = "spec.roles.prefill.pools.0", "spec.roles.decode.pools.0"
FLEXIBLE = both(
    at(f"{PREFILL}.flexible", True),
    at(f"{DECODE}.flexible", True),
    at("spec.autoscale", {"mode": "On", "budget": {"total": 4}}),
)
ROUTERS = {"pools": [{"name": "r", "replicas": 1, "flexible": True}]}

WRONG_FLEXIBLE: list[tuple[Change, str, str]] = [
    *(
        (
            both(*base, at(f"spec.roles.{role}", ROUTERS)),
            f"spec.roles.{role}.pools: flexible is for prefill and decode workers, which take each "
            "other's role; leave flexible out",
            f"spec.roles.{role}.pools",
        )
        for role, base in (
            ("router", ()),
            ("picker", (at("spec.service.endpointPicker", {}),)),
        )
    ),
    (
        at("spec.roles", {"mixed": ROUTERS}),
        "spec.roles.mixed.pools: flexible is for prefill and decode workers, which take each "
        "other's role; leave flexible out",
        "spec.roles.mixed.pools",
    ),
    (
        both(FLEXIBLE, at(f"{PREFILL}.flexible", False)),
        "spec.roles: a flexible pool of one role needs one of the other, and a role has one at "
        "most; set flexible on one pool of prefill and on one of decode, or leave it out",
        "spec.roles",
    ),
    (
        both(
            FLEXIBLE,
            at(
                "spec.roles.decode.pools",
                [{"name": name, "replicas": 1, "flexible": True} for name in "ab"],
            ),
        ),
        "spec.roles: a flexible pool of one role needs one of the other, and a role has one at "
        "most; set flexible on one pool of prefill and on one of decode, or leave it out",
        "spec.roles",
    ),
    (
        both(FLEXIBLE, at("spec.autoscale.mode", "Advise")),
        "spec.autoscale.mode: must be On with flexible pools, whose workers change their role by "
        "its decisions; set it to On, or leave flexible out",
        "spec.autoscale.mode",
    ),
    (
        both(FLEXIBLE, vllm()),
        "spec.engine.type: must be pdcluster with flexible pools: a stock engine takes another "
        "role only by a restart; set engine.type: pdcluster, or leave flexible out",
        "spec.engine.type",
    ),
    (
        both(FLEXIBLE, at("spec.roles.decode.engine", {"maxSequences": 5})),
        "spec.roles: with flexible pools neither role has an engine of its own, since a worker "
        "keeps its engine in both; give the values in spec.engine, or leave flexible out",
        "spec.roles",
    ),
    (
        both(FLEXIBLE, at(f"{DECODE}.gpu", "H100")),
        "spec.roles: the flexible pools must have one gpu and one gpusPerReplica, since a worker "
        "keeps its accelerators in both roles; make them equal, or leave flexible out",
        "spec.roles",
    ),
    (
        both(
            FLEXIBLE,
            at(f"{DECODE}.gpu", "H100"),
            at(f"{PREFILL}.gpu", "H100"),
            at(f"{DECODE}.gpusPerReplica", 2),
        ),
        "spec.roles: the flexible pools must have one gpu and one gpusPerReplica, since a worker "
        "keeps its accelerators in both roles; make them equal, or leave flexible out",
        "spec.roles",
    ),
    (
        both(
            FLEXIBLE,
            at("spec.engine.dataParallelSize", 2),
            at(f"{DECODE}.podsPerReplica", 2),
        ),
        "spec.roles: a worker of a flexible pool is one pod; leave podsPerReplica and gpusPerPod "
        "out, or leave flexible out",
        "spec.roles",
    ),
]
