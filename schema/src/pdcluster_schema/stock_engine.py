"""The stock engines in place of our own, vLLM and SGLang: the fields, flags and variables of the
user, and those that PDCluster sets.

The CRD's rules say the same to the API server.
`manifests.vllm` renders what is allowed here.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Final

from pydantic import AfterValidator, Field

from pdcluster_schema.section import Cel, Crd, SpecSection, rule
from pdcluster_schema.text import shortened
from pdcluster_schema.values import VariableName

VLLM: Final = "vllm"
SGLANG: Final = "sglang"

STOCK: Final = {VLLM: "vLLM", SGLANG: "SGLang"}
"""Names of the stock engines, by type."""

STOCK_IMAGES: Final = {VLLM: "vllm/vllm-openai:v0.32.0", SGLANG: "lmsysorg/sglang:v0.5.23"}

STOCK_ONLY = ("image", "command", "args", "env", "kvTransfer", "allowUnknownVersion")
"""Fields of `engine` that only a stock engine has."""

PDCLUSTER_ONLY = (
    "device",
    "kvCacheDtype",
    "quantization",
    "allowMixedPrecision",
    "transport",
    "transferBandwidth",
    "verifyTransfers",
    "fenceTimeoutSeconds",
    "batchInvariant",
    "scheduler",
    "schedulingPolicy",
    "longPrefillTokenThreshold",
    "chunkedPrefill",
    "tbtSloMilliseconds",
    "chunkSchedule",
    "admissionWatermark",
    "kvTiers",
    "prefillDelayer",
    "speculation",
)
"""Those that only our own engine has: they would have no effect on a stock engine."""


SGLANG_FLAGS = {
    "context-length": "maxModelLen",
    "max-running-requests": "maxSequences",
    "chunked-prefill-size": "maxBatchedTokens",
    "page-size": "blockSize",
    "disable-radix-cache": "prefixCaching",
    "max-total-tokens": "numBlocks",
    "mem-fraction-static": "deviceMemoryShare",
    "tp-size": "tensorParallelSize",
    "pp-size": "pipelineParallelSize",
}
"""SGLang's flags likewise, where vLLM has none of that name."""

SGLANG_OWNED = (
    "model-path",
    "device",
    "dist-init-addr",
    "nccl-init-addr",
    "nccl-port",
    "dp-size",
    "attn-dp-size",
    "attention-data-parallel-size",
    "enable-dp-attention",
    "disaggregation-mode",
    "disaggregation-transfer-backend",
    "disaggregation-bootstrap-port",
    "lora-paths",
    "is-embedding",
    "sampling-defaults",
    "preferred-sampling-params",
    "incremental-streaming-output",
    "enable-priority-scheduling",
    "schedule-low-priority-values-first",
    "schedule-policy",
    "abort-on-priority-when-disabled",
    "allow-auto-truncate",
    "admin-api-key",
    "use-ray",
    "smg-grpc-mode",
    "sidecar",
    "enable-http2",
)
"""SGLang's flags that PDCluster sets itself, or that would hide the engine from it or break it.
The API server does not check them, which would cost it too much.
"""

FIELD_OF_FLAG = {
    "max-model-len": "maxModelLen",
    "max-num-seqs": "maxSequences",
    "max-num-batched-tokens": "maxBatchedTokens",
    "block-size": "blockSize",
    "enable-prefix-caching": "prefixCaching",
    "no-enable-prefix-caching": "prefixCaching",
    "kv-cache-memory-bytes": "kvCacheMemory",
    "gpu-memory-utilization": "deviceMemoryShare",
    "num-gpu-blocks-override": "numBlocks",
    "tensor-parallel-size": "tensorParallelSize",
    "tp": "tensorParallelSize",
    "pipeline-parallel-size": "pipelineParallelSize",
    "pp": "pipelineParallelSize",
}
"""vLLM's flags that a field of `engine` is rendered to, without dashes."""

_HARMFUL = {
    "kv-offloading-size": (
        "takes the place of the connector that moves KV between workers, and fails every remote "
        "prefill",
        "set engine.kvTransfer.offload in its place",
    ),
    "kv-offloading-backend": ("is for --kv-offloading-size, which is refused", "remove it"),
    "lora-modules": (
        "names adapters that the server process does not know, so clients could not call them",
        "set model.adapters in its place",
    ),
}
"""Flags that break what PDCluster promises: the reason and the fix of each."""

_OF_RANKS = {
    "enable-fault-tolerance": (
        "needs a balancer outside vLLM, where PDCluster chooses the rank of each request",
        "remove it: a worker that loses a rank is started again",
    ),
    "fault-tolerance-config": ("turns on --enable-fault-tolerance, which is refused", "remove it"),
    "enable-elastic-ep": (
        "changes the number of ranks while they serve, which the server process does not follow",
        "remove it, and set engine.dataParallelSize",
    ),
    "prefill-context-parallel-size": (
        "multiplies the ranks, for which pods ask for no accelerators",
        "set engine.tensorParallelSize in its place",
    ),
    "pcp": ("multiplies the ranks as --prefill-context-parallel-size does", "remove it"),
}
"""Likewise, of which the API server's rules do not know: their cost is bounded."""

_OWNED = (
    "host",
    "port",
    "uds",
    "grpc[a-z-]*",
    "model",
    "model-tag",
    "served-model-name",
    "dtype",
    "generation-config",
    "config",
    "api-key",
    "ssl-[a-z-]+",
    "root-path",
    "headless",
    "api-server-count",
    "asc",
    "nnodes",
    "n[0-9]*",
    "node-rank",
    "r[0-9]*",
    "master-[a-z]+",
    "data-parallel-[a-z-]+",
    "dp[a-z]?",
    "kv-transfer-config",
    "kv-events-config",
    "scheduling-policy",
    "stream-interval",
    "max-logprobs",
    "disable-uvicorn-access-log",
    "tokens-only",
    "enable-scale-out",
    "enable-prompt-tokens-details",
    "disable-log-stats",
    *_HARMFUL,
)

OWNED_FLAGS = f"^--?({'|'.join(_OWNED)})([=.]|$)"
"""A flag that PDCluster sets itself, or that would hide the engine from it or break it."""

DATA_PARALLEL_FLAGS = "^--?(data-parallel-[a-z-]+|dp[a-z]?)([=.]|$)"
"""Those of them for several ranks of one server, whose events and KV have an address each."""

FLAGS_OF_FIELDS = f"^--?({'|'.join(FIELD_OF_FLAG)})([=.]|$)"
"""A flag that a field of `engine` stands for."""

_OF_ONE_DASH = ("asc", "n", "r", "dp", "tp", "pp", "pcp")

_LONG = {
    "n[0-9]*": "n",
    "r[0-9]*": "r",
    "grpc[a-z-]*": "grpc",
    "ssl-[a-z-]+": "ssl-keyfile",
    "master-[a-z]+": "master-addr",
    "data-parallel-[a-z-]+": "data-parallel-size",
    "dp[a-z]?": "dp",
}
"""One flag of each pattern that stands for several."""

LONG_FLAGS = "".join(
    f" {'-' if name in _OF_ONE_DASH else '--'}{name}"
    for name in (*(_LONG.get(pattern, pattern) for pattern in _OWNED), *FIELD_OF_FLAG)
)
"""Both kinds of flags, each after a space.  vLLM takes a flag's beginning for the flag, as
`--stream-int`, where no other one begins so.
"""

_OF_VLLM = (
    *LONG_FLAGS.split(),
    *(f"{'-' if name in _OF_ONE_DASH else '--'}{name}" for name in _OF_RANKS),
)
_OF_SGLANG = tuple(f"--{name}" for name in (*SGLANG_FLAGS, *SGLANG_OWNED))

FLAG_PATTERN = "^--?[^-=.][^=.]*"
"""The name of a flag within an argument."""

FLAG_AND_VALUE = r"^--?[A-Za-z][^=\s]*[ \t]+\S"
"""A flag and its value in one argument, which no parser takes apart."""

OWNED_VARIABLES = (
    "^(POD_IP|VLLM_(NIXL_SIDE_CHANNEL_[A-Z]+|HOST_IP|PORT|API_KEY|DP_[A-Z_]+|CPU_KVCACHE_SPACE))$"
)
"""A variable likewise; of the last one the field is kvCacheMemory."""

SGLANG_VARIABLES = (
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION",
    "SGLANG_RETURN_ORIGINAL_LOGPROB",
    "SGLANG_MAX_NEW_TOKENS_LIMIT",
)
"""SGLang's, of which the API server's rules do not know: a health check that waits for the engine,
log probabilities of another kind, answers that are cut short.
"""

GROUP_VARIABLES = ("PDCLUSTER_WORKER", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE")
"""Likewise those of a worker of several pods: with another rank each pod would be the leader."""

ARGUMENT_RULES = (
    Cel(
        f"!self.replace('_', '-').matches('{OWNED_FLAGS}')",
        "PDCluster sets this flag, or cannot work with it: remove it, and give "
        "engine.dataParallelSize for --data-parallel-size",
    ),
    Cel(
        f"!self.replace('_', '-').matches('{FLAGS_OF_FIELDS}')",
        "this flag is a field of engine: set maxModelLen, maxSequences, maxBatchedTokens, "
        "blockSize, prefixCaching, kvCacheMemory, deviceMemoryShare, numBlocks, "
        "tensorParallelSize or pipelineParallelSize in its place",
    ),
    Cel(
        f"!self.matches('{FLAG_PATTERN}') || "
        f"!'{LONG_FLAGS}'.contains(' ' + self.replace('_', '-').find('{FLAG_PATTERN}'))",
        "vLLM may take this for a longer flag, which is refused: remove it, or set the field that "
        "stands for it",
    ),
    Cel(
        f"!self.matches(r'{FLAG_AND_VALUE}')",
        "a flag and its value are two entries of the list, or one with = between them",
    ),
)
"""The same for the API server, which cannot name the flag."""

MAX_ARGUMENTS, MAX_ARGUMENT = 64, 2048
MAX_VARIABLES, MAX_VARIABLE = 64, 4096


def check_argument(value: str) -> str:
    """Refuse a flag that is set elsewhere, of either engine; flags may be written with underscores,
    as vLLM reads them.  A line break behind one, as of a YAML block, is ignored.
    """
    flag_text = value.partition("=")[0].partition(".")[0].rstrip().replace("_", "-")
    flag = flag_text if is_set_elsewhere(flag_text) else _long_flag(flag_text, _OF_VLLM)
    if re.search(FLAG_AND_VALUE, value):
        name = value.split()[0]
        raise rule(
            f"{shortened(value, 60)!r} is one entry, which vLLM takes for one word",
            f"write {name} and its value as two entries of the list, or with = between them",
        )
    subject = _subject(flag_text, flag)
    if re.search(DATA_PARALLEL_FLAGS, flag):
        raise rule(f"{subject} is set by PDCluster", "set engine.dataParallelSize in its place")
    name = flag.lstrip("-")
    if (harm := _HARMFUL.get(name) or _OF_RANKS.get(name)) is not None:
        raise rule(f"{subject} {harm[0]}", harm[1])
    if re.search(OWNED_FLAGS, flag):
        raise rule(f"{subject} is set by PDCluster", "remove it")
    if re.search(FLAGS_OF_FIELDS, flag):
        field = FIELD_OF_FLAG[flag.lstrip("-")]
        raise rule(f"{subject} is the field {field} of engine", f"set engine.{field} in its place")
    _check_sglang(flag_text)
    return value


def _check_sglang(flag_text: str) -> None:
    flag = _long_flag(flag_text, _OF_SGLANG)
    if flag not in _OF_SGLANG:
        return
    subject, field = _subject(flag_text, flag), SGLANG_FLAGS.get(flag.lstrip("-"))
    if field is None:
        raise rule(f"{subject} is set by PDCluster", "remove it")
    raise rule(f"{subject} is the field {field} of engine", f"set engine.{field} in its place")


def _long_flag(flag_text: str, flags: Iterable[str]) -> str:
    """The first flag that begins like this one, for which both engines take it; else this one."""
    if re.search(FLAG_PATTERN, flag_text) is None:
        return flag_text
    return next((flag for flag in flags if flag.startswith(flag_text)), flag_text)


def _subject(flag_text: str, flag: str) -> str:
    return flag if flag == flag_text else f"{flag_text} may be short for {flag}, which"


def is_set_elsewhere(flag: str) -> bool:
    """Return whether a flag is one of PDCluster or of a field, by its whole name."""
    return any(re.search(pattern, flag) for pattern in (OWNED_FLAGS, FLAGS_OF_FIELDS))


def check_variable(name: str) -> str:
    """Refuse a variable that is set elsewhere."""
    if name in GROUP_VARIABLES:
        reason = "is set by PDCluster in each pod of a worker, by which its ranks find each other"
        raise rule(f"{name} {reason}", "remove it")
    if re.search(OWNED_VARIABLES, name) is None and name not in SGLANG_VARIABLES:
        return name
    is_field = name == "VLLM_CPU_KVCACHE_SPACE"
    fix = "set engine.kvCacheMemory in its place" if is_field else "remove it"
    raise rule(f"{name} is set by PDCluster", fix)


class EnvSpec(SpecSection):
    """One environment variable of a stock engine."""

    name: Annotated[
        VariableName,
        AfterValidator(check_variable),
        Crd(
            Cel(
                f"!self.matches('{OWNED_VARIABLES}')",
                "PDCluster sets this variable: remove it, and give engine.kvCacheMemory for "
                "VLLM_CPU_KVCACHE_SPACE",
            )
        ),
    ]
    """Name of the variable."""
    value: Annotated[str, Field(max_length=MAX_VARIABLE)]
    """Value of the variable; may be empty."""


def check_variables(variables: tuple[EnvSpec, ...]) -> tuple[EnvSpec, ...]:
    """Refuse a variable that is given twice."""
    repeated = [
        name for name, count in Counter(each.name for each in variables).items() if count > 1
    ]
    if repeated:
        raise rule(f"{repeated[0]} is given twice", "remove one of them")
    return variables


def merged_variables(ours: tuple[EnvSpec, ...], theirs: tuple[EnvSpec, ...]) -> tuple[EnvSpec, ...]:
    """Both, and of one name that of `theirs`."""
    return tuple({each.name: each for each in (*ours, *theirs)}.values())
