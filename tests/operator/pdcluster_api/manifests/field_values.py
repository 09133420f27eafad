"""A value of every engine field that is another than its default."""

from typing import Any

ENGINE_VALUES: dict[str, Any] = {
    "device": "cpu",
    "blockSize": 32,
    "maxBatchedTokens": 300,
    "maxSequences": 7,
    "maxModelLen": 99,
    "prefixCaching": False,
    "kvCacheDtype": "int8",
    "quantization": "int8",
    "allowMixedPrecision": True,
    "kvCacheMemory": "2Gi",
    "deviceMemoryShare": 0.9,
    "numBlocks": 9,
    "threads": 3,
    "dataParallelSize": 2,
    "transport": "nixl",
    "transferBandwidth": 5,
    "verifyTransfers": True,
    "fenceTimeoutSeconds": 3.5,
    "batchInvariant": True,
    "schedulingPolicy": "fcfs",
    "admissionWatermark": 0.05,
    "tensorParallelSize": 2,
    "pipelineParallelSize": 2,
    # On a decode worker it must be off.
    "prefillDelayer": {
        "enabled": False,
        "maxDelayPasses": 3,
        "maxDelayMilliseconds": 9,
        "tokenUsageLowWatermark": 0.5,
        "queueMinRatio": 0.25,
    },
    # On a prefill worker likewise.
    "speculation": {
        "method": "Off",
        "draftModel": "/small",
        "numTokens": 2,
        "promptLookupMax": 7,
        "promptLookupMin": 2,
        "adaptive": False,
        "disableAboveRunning": 8,
    },
}


SCHEDULING_VALUES: list[dict[str, Any]] = [  # no two of them on one engine
    {
        "longPrefillTokenThreshold": 50,
        "prefixCaching": True,
        "kvTiers": [{"type": "disk", "size": 1, "path": "/kv"}],
    },
    {"chunkedPrefill": False},
    {
        "scheduler": "sarathi",
        "tbtSloMilliseconds": 50,
        "chunkSchedule": {"low": 32, "high": 128, "stages": 4, "maxTokens": 512},
    },
]
