"""Estimators by the names of `qos.estimation.estimator`."""

from pdcluster_schema.qos import EstimationSpec
from pdcluster_worker.routing.estimator import Estimator
from pdcluster_worker.routing.waiting_time.load_aware import LoadAware
from pdcluster_worker.routing.waiting_time.presets import Presets
from pdcluster_worker.routing.waiting_time.rwt_estimator import RwtEstimator


def make_estimator(policy: EstimationSpec) -> Estimator | None:
    """None for `ema`, whose averages are in `routing.qos`."""
    milliseconds = policy.preset_token_milliseconds
    presets = Presets(
        None if milliseconds is None else milliseconds / 1000.0, float(policy.preset_output_tokens)
    )
    if policy.estimator == "rwt":
        return RwtEstimator(presets)
    return LoadAware(presets) if policy.estimator == "loadAware" else None
