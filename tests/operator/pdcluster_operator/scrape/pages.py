"""Pages as the operator has read them."""

from pdcluster_operator.scrape.page import MetricsPage


def page_of(
    *, created: float | None = 1.0, gpu_utilization_ratio: float | None = None, **numbers: float
) -> MetricsPage:
    """A Page of zeros, but for what is given."""
    names = [
        name
        for name in MetricsPage.__dataclass_fields__
        if name not in ("prompt_tokens_created", "gpu_utilization_ratio", "histograms")
    ]
    return MetricsPage(
        **{**dict.fromkeys(names, 0.0), **numbers},
        prompt_tokens_created=created,
        gpu_utilization_ratio=gpu_utilization_ratio,
    )
