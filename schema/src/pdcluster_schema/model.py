"""`spec.model` and `spec.image`: what the workers load, and the image that they run."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.alias_generators import to_snake

from pdcluster_schema.ports import MAX_ADAPTERS
from pdcluster_schema.quantities import Quantity
from pdcluster_schema.section import Cel, Crd, Many, Rule, SpecSection, spelled
from pdcluster_schema.values import ChatTemplate, HubRevision, ObjectName, Text

FLAG_OF_PARSER = {
    "chatTemplate": "--chat-template",
    "toolParser": "--tool-call-parser",
    "reasoningParser": "--reasoning-parser",
}
"""Fields of our own front end, and the flag of a stock engine that does what each of them does."""


_SEGMENT = "([^/.][^/]*|[.][^/.][^/]*|[.][.][^/]+)?"
"""Name of a path's folder that is neither . nor .., or none at all."""


def _unused(field: str, flag: str) -> Rule:
    """A field that has no effect beside an engine's own front end; the API server sets defaults."""
    name = to_snake(field)
    return Rule(
        cel=f"self.?{field}.orValue('auto') == 'auto' || "
        "self.?frontend.orValue('pdcluster') != 'engine'",
        holds=lambda model: model.frontend != "engine" or getattr(model, name) in (None, "auto"),
        reason="means nothing beside frontend: engine",
        fix=f"give {flag} in engine.args, or leave frontend out",
        at=field,
    )


class PvcSpec(SpecSection):
    """A volume that holds model folders, mounted read-only."""

    claim_name: ObjectName
    """A PersistentVolumeClaim of the PDCluster's namespace."""


class HuggingFaceSpec(SpecSection):
    """A repository of the Hugging Face hub, downloaded before a worker starts."""

    repo: Annotated[
        str,
        Field(max_length=200),
        spelled(
            "[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?",
            "a repository",
            "write it like HuggingFaceTB/SmolLM2-135M-Instruct",
        ),
    ]
    """Owner and name, as in HuggingFaceTB/SmolLM2-135M-Instruct."""
    revision: HubRevision = "main"
    """A commit, tag or branch; only a commit never changes."""
    token_secret: ObjectName | None = None
    """A Secret whose key `HF_TOKEN` or `token` may read the repository; by default it is read
    without one.
    """


class AdapterSpec(SpecSection):
    """A LoRA adapter of the model, which clients call by its name in place of the model's."""

    name: Annotated[
        str,
        Field(max_length=128),
        spelled(
            "[A-Za-z0-9._/:-]+",
            "a name of an adapter",
            "use letters, digits, '.', '_', '/', ':' and '-'",
        ),
    ]
    """Name by which clients call it."""
    path: Annotated[Text, Field(max_length=4096)] | None = None
    """Its folder, with adapter_config.json; an absolute path in the engine's image or on a volume
    of podTemplate, or with pvc a path below the volume's root.
    """
    hugging_face: HuggingFaceSpec | None = None
    """A repository with the adapter, which each worker downloads before it starts."""

    RULES = (
        Rule(
            cel="has(self.path) != has(self.huggingFace)",
            holds=lambda adapter: (adapter.path is None) != (adapter.hugging_face is None),
            reason="needs either path or huggingFace, and not both",
            fix="give the one that the adapter comes from",
        ),
    )


class RuntimeAdaptersSpec(SpecSection):
    """LoRA adapters that clients load while workers run."""

    path: Annotated[
        Text,
        Field(max_length=4096),
        spelled(
            f"{_SEGMENT}(/{_SEGMENT})*",
            "a path without . and ..",
            "write it without them, like /models/lora",
        ),
    ]
    """Folder below which they lie, an absolute path in the image or on a volume of podTemplate, or
    with pvc a path below the volume's root; no other folder is read.
    """
    memory: Quantity
    """Memory of each worker for all of them, counted beside the model's weights, in bytes or as a
    quantity such as 512Mi; one that does not fit is refused.
    """


class ModelSpec(SpecSection):
    """The model, and the source of its Hugging Face folder; path (in the image or on a volume) or
    the hub.
    """

    name: Text
    """Name by which clients call the model."""
    path: Text | None = None
    """Its Hugging Face folder; an absolute path in the image, or with pvc a path below the volume's
    root.
    """
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of weights and KV; auto = bfloat16 where the first worker's CPU or GPU computes it
    natively, else float32; one for all workers.
    """
    chat_template: ChatTemplate | None = None
    """Jinja text in place of the model's own chat template; or chatml-tools, which comes with the
    worker and is for requests with tools.
    """
    tool_parser: Literal[
        "auto", "none", "hermes", "llama3_json", "mistral", "pythonic", "qwen", "qwen3_coder"
    ] = "auto"
    """Parser of the model's tool calls; auto = as its chat template says, none = its answers are
    text alone.
    """
    reasoning_parser: Literal["auto", "none", "deepseek_r1", "qwen3"] = "auto"
    """Parser of the model's reasoning; auto = as its chat template says, none = reasoning stays in
    the text.
    """
    frontend: Literal["pdcluster", "engine"] = "pdcluster"
    """Renders prompts and reads answers: pdcluster = the worker, by the model's tokenizer and chat
    template and the fields above; engine = the stock engine's own front end, for models of which
    the worker has no template or parser. engine is for engine.type: vllm. Default pdcluster.
    """
    pvc: PvcSpec | None = None
    hugging_face: HuggingFaceSpec | None = None
    node_cache: (
        Annotated[
            str,
            Field(max_length=4096),
            spelled(r"/[^\n]+", "an absolute path", "write it like /var/cache/models"),
        ]
        | None
    ) = None
    """Folder of the node that keeps downloads for the next pod there; by default each pod downloads
    for itself.
    """

    adapters: Annotated[
        tuple[AdapterSpec, ...],
        Many,
        Field(max_length=MAX_ADAPTERS),
        Crd(list_type="map", list_map_keys=["name"]),
    ] = ()
    """LoRA adapters that the engine loads with the model; not for engine.type: sglang. By default
    there are none.
    """

    runtime_adapters: RuntimeAdaptersSpec | None = None
    """Allows POST /v1/load_lora_adapter and /v1/unload_lora_adapter at workers of our own engine,
    each with adapters of its own; by default both are refused.
    """

    RULES = (
        Rule(
            cel="!has(self.adapters) || self.adapters.all(a, a.name != self.name)",
            holds=lambda model: (
                len({model.name, *(each.name for each in model.adapters)})
                == len(model.adapters) + 1
            ),
            reason="must each have a name of their own, and not that of the model",
            fix="rename one of them",
            at="adapters",
        ),
        Cel(
            "!has(self.adapters) || has(self.pvc) || "
            "self.adapters.all(a, !has(a.path) || a.path.startsWith('/'))",
            "path must begin with /, since relative paths without pvc are for pdctl alone: write "
            "the folder as the engine's container sees it",
            ".adapters",
        ),
        Cel(
            "!has(self.runtimeAdapters) || has(self.pvc) || "
            "self.runtimeAdapters.path.startsWith('/')",
            "path must begin with /, since relative paths without pvc are for pdctl alone: write "
            "the folder as the engine's container sees it",
            ".runtimeAdapters",
        ),
        Rule(
            cel="has(self.path) != has(self.huggingFace)",
            holds=lambda model: (model.path is None) != (model.hugging_face is None),
            reason="needs either path or huggingFace, and not both",
            fix="give the one that the model comes from",
        ),
        Rule(
            cel="has(self.path) || !has(self.pvc)",
            holds=lambda model: model.path is not None or model.pvc is None,
            reason="needs the model's path in it",
            fix="give path, or leave pvc out",
            at="pvc",
        ),
        Cel(
            "!has(self.path) || has(self.pvc) || self.path.startsWith('/')",
            "path must begin with /, since ~ and relative paths without pvc are for pdctl "
            "alone: write the folder in the image like /models/llm, or give pvc and the "
            "folder's path on it",
            ".path",
        ),
        Rule(
            cel="!has(self.nodeCache) || has(self.huggingFace)",
            holds=lambda model: model.node_cache is None or model.hugging_face is not None,
            reason="keeps downloads, and nothing is downloaded",
            fix="give huggingFace, or leave nodeCache out",
            at="nodeCache",
        ),
        *(_unused(*each) for each in FLAG_OF_PARSER.items()),
    )


class ImageSpec(SpecSection):
    """The worker image."""

    name: Text | None = None
    """Image of the workers; by default the one that the operator was installed with, kept for the
    life of a revision.
    """
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """Time at which nodes pull it."""
    pull_secrets: Annotated[tuple[ObjectName, ...], Many, Crd(maxItems=16, list_type="atomic")] = ()
    """Secrets of the PDCluster's namespace that may pull it."""
