"""The first day, docs/first-day.md: its blocks run in order as they stand there, from the first
PDCluster on, with examples/chat.yaml in the place of a model that the cluster downloads.
"""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

from e2e.harness import NAME, Kubernetes, wait_for_workers
from e2e.rig.paths import REPOSITORY
from tests.ports import free_port
from tests.system.reader import Reader, blocks
from tests.system.waiting import wait_for

ELSEWHERE = ("docker build", "helm install")  # the rig builds; the fixture installs the chart
HERE = {
    "hugging-face.yaml": "chat.yaml",
    "/hub": f"/{NAME}",
    "hub-": f"{NAME}-",
    "pdc hub": f"pdc {NAME}",
}
PATCH = f"kubectl patch pdc {NAME} --type=merge --patch"
SHOWN = {  # block, by how it begins: words that its output has
    "kubectl apply": ("condition met", NAME, "READY"),
    "curl": ("x-pdcluster-prefill: remote", "Paris"),
    "kubectl scale": ("scaled",),
    f'{PATCH} \'{{"spec": {{"engine": {{"kvCacheMemory": "32Mi"': (
        *("patched", "condition met", "ConfigurationRefused"),
        *("engine.maxModelLen=2048 does not fit", "goes on serving"),
    ),
    PATCH: ("patched", "condition met"),
    "pdctl plan": (NAME, "StatefulSet"),
}
FORWARDING = "kubectl port-forward "


def test_every_block_does_what_the_page_says(chat: Kubernetes) -> None:
    reader = Reader(REPOSITORY)
    reader.environment |= {
        "KUBECONFIG": str(chat.kubeconfig),
        "PATH": f"{chat.program.parent}:{reader.environment['PATH']}",
    }
    with ExitStack() as stack:
        for block in blocks((REPOSITORY / "docs" / "first-day.md").read_text()):
            if block.startswith(ELSEWHERE):
                continue
            for name, ours in HERE.items():
                block = block.replace(name, ours)
            if block.startswith(FORWARDING):
                reader.address = stack.enter_context(forwarding(chat, block))
                continue
            words = next((SHOWN[start] for start in SHOWN if block.startswith(start)), None)
            assert words is not None, f"say in SHOWN what a reader should see of\n{block}"
            output = reader.type(block)
            assert all(word in output for word in words), f"{block}\n{output}"
    wait_for_workers(chat, prefill=1, decode=1)


@contextmanager
def forwarding(chat: Kubernetes, block: str) -> Iterator[str]:
    """Run a `kubectl port-forward` to another port of this machine, and the address there."""
    _, _, service, there = block.split()
    here = free_port()
    with chat.start("port-forward", service, f"{here}:{there}") as process:
        try:
            wait_for(lambda: _answers(here), 30.0, f"{service} on port {here}")
            yield f"http://127.0.0.1:{here}"
        finally:
            process.kill()


def _answers(port: int) -> bool:
    with closing(socket.socket()) as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0
