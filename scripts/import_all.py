"""Import every module that a start of `pdctl up` may import, so that their bytecode is written."""

import importlib
import pkgutil
from contextlib import suppress

LEFT_OUT = ("__main__", "triton", "cuda", "nixl", "ucx")
"""Parts of the names of modules that run at once, or are for a GPU."""

ALSO = (
    "transformers.modeling_gguf_pytorch_utils",
    "transformers.models.llama.modeling_llama",
    "torch._dynamo",
)
"""Imported late: by the conversion of the sample model, and by torch."""


def main() -> None:
    """Import them."""
    for name in ("pdcluster_schema", "pdcluster_api", "pdctl", "pdcluster_worker"):
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            if not any(part in module.name for part in LEFT_OUT):
                with suppress(ModuleNotFoundError):  # of an extra
                    importlib.import_module(module.name)
    for name in ALSO:
        importlib.import_module(name)


if __name__ == "__main__":
    main()
