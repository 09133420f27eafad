"""Rules over `service.models`, the model itself and the smaller one of `qos.degradation`."""

from collections.abc import Iterator
from typing import Any

from pdcluster_schema.section import Rule

# not of an optional list, of which the API server knows no greatest length
_EACH = "!has(self.service) || !has(self.service.models) || self.service.models.all"


def other_model_rules() -> Iterator[Rule]:
    yield _names_rule()
    smaller = "self.?qos.?degradation.?smallerModel"
    yield Rule(
        cel=f"{smaller}.?name.orValue('') != self.model.name",
        holds=lambda spec: (
            spec.qos.degradation.smaller_model is None
            or spec.qos.degradation.smaller_model.name != spec.model.name
        ),
        reason="is the model itself",
        fix="name a smaller one, or leave smallerModel out",
        at="qos.degradation.smallerModel.name",
    )
    yield Rule(
        cel="!self.?routing.?racing.?models.orValue(false) || has(self.service) && "
        "has(self.service.models) && size(self.service.models) > 0",
        holds=lambda spec: not spec.routing.racing.models or bool(spec.service.models),
        reason="is for a race on one of service.models, which has none",
        fix="name models there, or leave it out",
        at="routing.racing.models",
    )
    yield Rule(
        cel=f"!{smaller}.?url.hasValue() || {_EACH}(m, "
        "m.name != self.qos.degradation.smallerModel.name)",
        holds=lambda spec: (
            (smaller := spec.qos.degradation.smaller_model) is None
            or smaller.url is None
            or all(model.name != smaller.name for model in spec.service.models)
        ),
        reason="is for a model that is served elsewhere, and service.models has it",
        fix="leave url out, or the model out of service.models",
        at="qos.degradation.smallerModel.url",
    )


def _names_rule() -> Rule:
    def holds(spec: Any) -> bool:
        own = {spec.model.name, *(each.name for each in spec.model.adapters)}
        names = [each.name for each in spec.service.models]
        return len(own.union(names)) == len(own) + len(names)

    return Rule(
        cel=f"{_EACH}(m, m.name != self.model.name && (!has(self.model.adapters) || "
        "self.model.adapters.all(a, a.name != m.name)))",
        holds=holds,
        reason="must each have a name of their own, and not that of the model or an adapter of it",
        fix="rename or remove one of them",
        at="service.models",
    )
