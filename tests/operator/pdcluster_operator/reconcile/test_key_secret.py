"""Report on a Secret with API keys; that it comes and goes on an API server is in
tests/apiserver.
"""

import base64

import pytest

from pdcluster_api.apiserver.errors import ForbiddenError, RefusedError, UnavailableError
from pdcluster_operator.reconcile.observation import key_secret_fault
from pdcluster_schema.conditions import APPLY_FAILED, FORBIDDEN
from pdcluster_schema.conditions import CONFIGURATION_REFUSED as REFUSED
from tests.operator.bodies import Body


class OneSecret:
    """A client that finds one Secret, or fails."""

    def __init__(self, found: Body | Exception | None) -> None:
        self.found = found

    async def find(self, kind: object, namespace: str, name: str) -> Body | None:
        assert (namespace, name) == ("default", "keys")
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def holding(*keys: str) -> Body:
    return {
        "metadata": {},
        "data": {
            f"key-{number}": base64.b64encode(key.encode()).decode()
            for number, key in enumerate(keys)
        },
    }


async def fault(
    found: Body | Exception | None, name: str | None = "keys"
) -> tuple[str, str] | None:
    return await key_secret_fault(OneSecret(found), "default", name)


@pytest.mark.parametrize("found", [holding("sk-alice"), holding("", "sk-bob\n")])
async def test_one_key_is_enough(found: Body):
    assert await fault(found) is None


async def test_no_secret_is_read_where_no_key_is_required():
    assert await fault(AssertionError("not to be read"), None) is None


@pytest.mark.parametrize(
    ("found", "reason", "says"),
    [
        (None, REFUSED, "does not exist: make it with a key in each of its values"),
        ({"metadata": {}}, REFUSED, "holds no key"),
        (
            holding("", " \n"),
            REFUSED,
            "holds no key: give it one word of printable ASCII in each of its values",
        ),
        (holding("two words", "sch\u00fcssel", "a\nb"), REFUSED, "holds no key"),
        (
            {"metadata": {}, "data": {".hidden": base64.b64encode(b"sk-alice").decode()}},
            REFUSED,
            "holds no key",
        ),
        (
            ForbiddenError("no right to get secrets", code=403),
            FORBIDDEN,
            "cannot be read: no right to get secrets; give it to the operator",
        ),
        (RefusedError("no", code=400), APPLY_FAILED, "cannot be read: no"),
    ],
)
async def test_what_is_wrong_is_reported_with_the_secrets_name(
    found: Body | Exception | None, reason: str, says: str
):
    said = await fault(found)
    assert said is not None
    assert said[0] == reason
    assert said[1].startswith("Secret keys of service.apiKeySecret ")
    assert says in said[1]


async def test_an_api_server_that_is_away_is_no_fault_of_the_secret():
    with pytest.raises(UnavailableError):
        await fault(UnavailableError("away", code=503))
