"""OtherModelsServed: whether the clusters of `service.models` serve those models where requests are
handed on to. Pure. Ready does not follow from it: the cluster's own model is served.
"""

from collections.abc import Iterator, Mapping

from pdcluster_api.plan.observed.state import OtherCluster
from pdcluster_api.plan.status.condition import Condition
from pdcluster_schema import conditions as words
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.service import OtherModelSpec
from pdcluster_schema.text import and_more

_TYPE = words.OTHER_MODELS_SERVED


def other_models_served(cluster: PDCluster, others: Mapping[str, OtherCluster]) -> Condition | None:
    """others: PDClusters of the namespace by name; one that is not there is left out.  None = no
    models of others are asked for.
    """
    models, secret = cluster.spec.service.models, cluster.spec.service.api_key_secret
    if not models:
        return None
    wrong = [found for each in models for found in _wrong(each, others.get(each.cluster), secret)]
    if not wrong:
        text = f"{len(models)} served by their clusters" if len(models) > 1 else "it is served"
        return Condition.true(_TYPE, words.AS_DECLARED, text)
    reason, text = wrong[0]
    return Condition.false(_TYPE, reason, f"{text}{and_more(len(wrong))}")


def _wrong(
    model: OtherModelSpec, other: OtherCluster | None, secret: str | None
) -> Iterator[tuple[str, str]]:
    """Reason, and text; nothing where all is well.  secret: of the API keys here."""
    name = f"model {model.name} of service.models"
    if other is None:
        fix = "make it in this namespace, or correct cluster"
        yield words.CLUSTER_MISSING, f"{name}: there is no PDCluster {model.cluster}; {fix}"
    elif model.name not in other.models:
        serves = ", ".join(other.models)
        text = f"{name}: PDCluster {model.cluster} serves {serves}; correct name or cluster"
        yield words.MODEL_NOT_SERVED, text
    elif model.port != other.port:
        text = f"{name}: the Service {model.cluster} has port {other.port}, not {model.port}"
        yield words.MODEL_NOT_SERVED, f"{text}; set port: {other.port}"
    elif other.api_key_secret not in (None, secret):
        text = f"{name}: PDCluster {model.cluster} takes API keys of Secret {other.api_key_secret}"
        yield words.API_KEYS_DIFFER, f"{text}, and {_answer_there(secret)}"
    elif not other.is_serving:
        text = f"{name}: PDCluster {model.cluster} answers no requests now; its Serving says why"
        yield words.NOT_ANSWERING, text


def _answer_there(secret: str | None) -> str:
    """To the requests that are taken here.  secret: None = they need no key."""
    own = (
        "this one needs none: a request without one"
        if secret is None
        else f"this one those of Secret {secret}: a request with a key of that"
    )
    return f"{own} is answered 401 there; name one Secret in service.apiKeySecret of both"
