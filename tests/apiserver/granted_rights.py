"""Rights of a user, as the API server answers `kubectl auth can-i`."""

from collections.abc import Iterable

from tests.apiserver.control_plane import ControlPlane, KubectlError
from tests.system.waiting import wait_for


def granted(control_plane: ControlPlane, user: str, questions: Iterable[str]) -> dict[str, bool]:
    """Ask the API server what `kubectl auth can-i` asks, about a user."""

    def may(question: str) -> bool:
        try:
            return (
                control_plane.kubectl("auth", "can-i", *question.split(), f"--as={user}").strip()
                == "yes"
            )
        except KubectlError:  # "no" is exit code 1
            return False

    return {question: may(question) for question in questions}


def assert_granted(control_plane: ControlPlane, user: str, expected: dict[str, bool]) -> None:
    """Bindings reach the authorizer by a watch, so the answers are asked for until
    they are right.
    """
    wait_for(
        lambda: granted(control_plane, user, expected) == expected,
        30,
        lambda: {
            question: answer
            for question, answer in granted(control_plane, user, expected).items()
            if answer != expected[question]
        },
    )


def operator_of(namespace: str) -> str:
    """The ServiceAccount, as a user, of the operator that is installed there as release `pdc`."""
    return f"system:serviceaccount:{namespace}:pdc-pdcluster"
