"""The worker's files and identity: every refusal names the file, the field and the reason [V9]."""

from math import inf
from pathlib import Path

import pytest

from pdcluster_worker.config.policy import load_policy
from pdcluster_worker.config.worker import Identity, load_worker_config
from pdcluster_worker.errors import ConfigError
from pdcluster_worker.messages.engine_settings import (
    ChunkSchedule,
    SchedulerSettings,
    SpeculationSettings,
)
from tests.worker.config.engine_files import MINIMUM, write

CHUNKS = "{low: 32, high: 128, stages: 4, maxTokens: 512}"


def test_worker_config_says_how_the_engine_schedules(tmp_path: Path) -> None:
    fields = (
        f"{{scheduler: sarathi, schedulingPolicy: fcfs, tbtSloMilliseconds: 50, chunkSchedule: "
        f"{CHUNKS}}}"
    )
    config = load_worker_config(write(tmp_path, f"{MINIMUM}engine: {fields}\n"))

    chunks = ChunkSchedule(low=32, high=128, stages=4, max_tokens=512)
    own = SchedulerSettings("sarathi", "fcfs", tbt_slo_seconds=0.05, chunk_schedule=chunks)
    assert config.engine.scheduler_settings == own


def test_worker_config_says_how_tokens_are_drafted(tmp_path: Path) -> None:
    fields = (
        "{numTokens: 4, promptLookupMax: 6, promptLookupMin: 2, adaptive: false, "
        "disableAboveRunning: 8}"
    )
    engine = load_worker_config(
        write(tmp_path, f"{MINIMUM}engine: {{maxSequences: 10, speculation: {fields}}}\n")
    ).engine
    assert engine.drafts is not None
    assert engine.drafts == SpeculationSettings(
        num_tokens=4,
        prompt_lookup_max=6,
        prompt_lookup_min=2,
        adaptive=False,
        disable_above_running=8,
    )
    assert engine.max_decode_rows == 50

    off = load_worker_config(
        write(tmp_path, f"{MINIMUM}engine: {{speculation: {{method: 'Off'}}}}\n")
    ).engine
    assert (off.drafts, off.max_decode_rows) == (None, off.max_sequences)


@pytest.mark.parametrize(
    "field",
    [
        *("device: cpu", "kvCacheMemory: 1024", "deviceMemoryShare: 0.5", "numBlocks: 64"),
        *("threads: 2", "transport: nixl", "transferBandwidth: 1000"),
        *("verifyTransfers: true", "fenceTimeoutSeconds: 5", "batchInvariant: true"),
        *("scheduler: sarathi", "schedulingPolicy: fcfs", "longPrefillTokenThreshold: 100"),
        *("chunkedPrefill: false", "tbtSloMilliseconds: 50", f"chunkSchedule: {CHUNKS}"),
        *("admissionWatermark: 0.1", "prefillDelayer: {}", "speculation: {}"),
    ],
)
def test_worker_config_refuses_a_field_of_our_engine_for_a_stock_one(
    field: str, tmp_path: Path
) -> None:
    name = field.partition(":")[0]
    with pytest.raises(
        ConfigError, match=rf"{name} is for engine type pdcluster, not vllm: leave it out"
    ):
        load_worker_config(write(tmp_path, f"{MINIMUM}engine: {{type: vllm, {field}}}\n"))


def test_worker_config_minimum_gets_the_defaults(tmp_path: Path) -> None:
    config = load_worker_config(write(tmp_path, MINIMUM))

    assert (config.engine.block_size, config.listen.http, config.discovery.lease_seconds) == (
        16,
        8000,
        10,
    )


SIZE = "engine: {maxBatchedTokens: 8, maxSequences: 16}"
SHORT = f"engine: {{scheduler: sarathi, maxBatchedTokens: 64, chunkSchedule: {CHUNKS}}}"
REVERSED = "engine: {chunkSchedule: {low: 2, high: 1, stages: 1, maxTokens: 9}}"
RANKS = "engine: {tensorParallelSize: 4, pipelineParallelSize: 3}"
BELOW = "maxBatchedTokens (256) is below the longest request of 300 tokens: raise"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("engine: {blokSize: 16}", "unknown field `blokSize` - at `$.engine`"),
        ("engine: {device: gpu}", "'gpu' - at `$.engine.device`: write one of auto, cpu, cuda"),
        (
            "engine: {kvCacheDtype: fp8}",
            "'fp8' - at `$.engine.kvCacheDtype`: write one of auto, bf16, fp8_e4m3, int8",
        ),
        (
            "engine: {type: vllm, kvCacheDtype: int8}",
            "kvCacheDtype is for engine type pdcluster, not vllm: leave it out",
        ),
        ("engine: {kvTiers: [{type: disk, size: 9}]}", "path is for tiers of type disk and shared"),
        ("engine: {kvTiers: [{type: host, size: 0}]}", "size is for tiers without a url, which n"),
        (
            "engine: {kvTiers: [{type: host, size: 9}, {type: host, size: 9}]}",
            "kvTiers must be host, disk and shared in that order, each once at most, and shared",
        ),
        (
            "engine: {prefixCaching: false, kvTiers: [{type: host, size: 9}]}",
            "kvTiers holds cached prefixes, and prefixCaching is false: leave one of them out",
        ),
        ("engine: {speculation: {method: guess}}", "method`: write one of Off, draft, ngram"),
        ("model: {name: m, path: /m, dtype: float16}", "`$.model.dtype`: write one of auto, bfloa"),
        ("engine: {threads: -1}", "Expected `int` >= 0 - at `$.engine.threads`"),
        ("engine: {threads: 1025}", "Expected `int` <= 1024 - at `$.engine.threads`: lower it"),
        ("engine: {maxBatchedTokens: 16777217}", "`int` <= 16777216 - at `$.engine.maxBatched"),
        ("engine: {maxSequences: 65537}", "Expected `int` <= 65536 - at `$.engine.maxSequences`"),
        ("engine: {blockSize: big}", "Expected `int`, got `str` - at `$.engine.blockSize`"),
        ("engine: {blockSize: 0}", "Expected `int` >= 1 - at `$.engine.blockSize`: raise it"),
        ("discovery: {endpoints: []}", "`array` of length >= 1 - at `$.discovery.endpoints`"),
        (SIZE, "maxBatchedTokens (8) must be at least maxSequences (16)"),
        ("engine: {speculation: {numTokens: 17}}", "<= 16 - at `$.engine.speculation.numTokens`"),
        ("engine: {speculation: {method: draft}}", "draft needs speculation.draftModel: give"),
        ("engine: {speculation: {draftModel: /small}}", "draftModel is for method draft, not ngr"),
        ("engine: {speculation: {promptLookupMin: 6}}", "must be at most promptLookupMax (5): l"),
        ("engine: {scheduler: fastest}", "Invalid enum value 'fastest' - at `$.engine.scheduler`"),
        ("engine: {scheduler: orca, maxModelLen: 300}", BELOW),
        ("engine: {chunkedPrefill: false, maxModelLen: 257}", "computes a prompt in one step"),
        ("engine: {longPrefillTokenThreshold: 65, maxModelLen: 64}", "(65) is above the longest"),
        ("engine: {longPrefillTokenThreshold: 6, chunkedPrefill: false}", "Threshold caps the"),
        ("engine: {chunkedPrefill: false, scheduler: sarathi}", "is for scheduler continuous"),
        ("engine: {tbtSloMilliseconds: 50}", "is for scheduler sarathi, not continuous: leave it"),
        (f"engine: {{chunkSchedule: {CHUNKS}}}", "is for scheduler sarathi, not continuous: leav"),
        (SHORT, "chunkSchedule.high (128) must be at most"),
        (REVERSED, "low (2) must be at most high (1)"),
        ("engine: {tensorParallelSize: 65}", "`int` <= 64 - at `$.engine.tensorParallelSize`"),
        (RANKS, "tensorParallelSize (4) times pipelineParallelSize (3) is 12 ranks, over the 8 of"),
        ("engine: {fenceTimeoutSeconds: 0}", "> 0.0 - at `$.engine.fenceTimeoutSeconds`: raise"),
        ("engine: {admissionWatermark: 1.5}", "<= 1.0 - at `$.engine.admissionWatermark`"),
        ("listen: {http: 70000}", "Expected `int` <= 65535 - at `$.listen.http`"),
        ("tensorParallel: 2", "unknown field `tensorParallel`"),
        ("engine: {transport: rdma}", "Invalid enum value 'rdma' - at `$.engine.transport`"),
        ("[", "not YAML"),
        ("gpu: 2020-13-45", "not YAML: month must be in 1..12"),
        ("gpu: !!bool maybe", "not YAML: 'maybe'"),
        ("gpu: " + "[" * 5000, "not YAML: maximum recursion depth exceeded"),
    ],
)
def test_worker_config_refusal_names_field_and_reason(
    tmp_path: Path, line: str, reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_worker_config(write(tmp_path, f"{MINIMUM}{line}\n"))

    assert str(caught.value).startswith(str(tmp_path / "engine.yaml"))
    assert reason in str(caught.value)


def test_worker_config_missing_file_and_missing_field(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read: No such file"):
        load_worker_config(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="missing required field `cluster`"):
        load_worker_config(write(tmp_path, "role: decode\n"))


def test_policy_empty_file_is_the_default_policy(tmp_path: Path) -> None:
    assert load_policy(write(tmp_path, "")).offload.prefill_length_threshold == 256


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ("credits: {batchesAhead: .nan}", r"\$\.credits\.batchesAhead"),
        ("decodeScore: {weights: [1, .NaN]}", r"\$\.decodeScore\.weights\[1\]"),
    ],
)
def test_what_is_not_a_number_is_named_and_no_bound_of_it(
    tmp_path: Path, document: str, field: str
) -> None:
    """Every bound fails for it, and neither a larger nor a smaller value is the fix."""
    with pytest.raises(
        ConfigError, match=rf"Expected a number, got `\.nan` - at `{field}`: write one$"
    ):
        load_policy(write(tmp_path, document))


def test_document_that_holds_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds itself, by an anchor: write it out"):
        load_policy(write(tmp_path, "credits: &a {batchesAhead: *a}"))


def test_policy_of_a_newer_operator_is_taken_but_for_what_is_not_known_here(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, "offload: {prefillQueueMax: 3, newer: 1}\nnewest: {a: {b: 1}}\n")

    assert load_policy(path).offload.prefill_queue_max == 3
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()[-55:]) == (
        "WARNING",
        f"path={path} fields=offload.newer,newest"[-55:],
    )


def test_policy_names_unknown_fields_of_each_tenant_and_of_a_section_that_may_be_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(
        tmp_path,
        "tenants: {alice: {newer: 1}}\ndegradation: {smallerModel: {name: small, newer: 1}}\n",
    )

    assert load_policy(path).tenants.keys() == {"alice"}
    assert set(caplog.records[0].getMessage().rpartition("=")[2].split(",")) == {
        "tenants.alice.newer",
        "degradation.smallerModel.newer",
    }


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("slo: {ttftMilliseconds: 0}", "slo.ttftMilliseconds: must be more than 0, not 0"),
        ("credits: {batchesAhead: 1001}", "credits.batchesAhead: must be at most 1000"),
        ("credits: {batchesAhead: .inf}", "credits.batchesAhead: must be a finite number"),
        ("degradation: {maxTokens: 0}", "degradation.maxTokens: must be at least 1, not 0"),
        (
            "tenants: {alice: {priority: urgent}}",
            "tenants.alice.priority: must be 'high', 'normal' or 'low', not 'urgent'",
        ),
        (
            "offload: {newer: 1, prefillQueueMax: -1}",
            "offload.prefillQueueMax: must be at least 0, not -1; raise it",
        ),
        (
            "offload: {sloFeedback: {minThreshold: 9, maxThreshold: 8}}",
            "offload.sloFeedback.minThreshold: must be at most maxThreshold (8), not 9; lower",
        ),
        ("offload: [1]", "offload: must be a section of fields, not [1]"),
        ("[1]", "must be a section of fields, not [1]"),
        ("offload: null", "offload: is empty; give it a value or remove the key"),
    ],
)
def test_policy_with_a_wrong_value_is_refused_whatever_else_it_has(
    tmp_path: Path, text: str, fault: str
) -> None:
    path = write(tmp_path, text)

    with pytest.raises(ConfigError) as refused:
        load_policy(path)

    assert str(refused.value).startswith(f"{path}: {fault}")


@pytest.mark.parametrize(
    ("address", "host", "listens"),
    [
        ("10.1.2.3", "0.0.0.0", "0.0.0.0"),
        ("fd00::7", "0.0.0.0", "::"),
        ("fd00::7", "127.0.0.1", "127.0.0.1"),
        ("", "0.0.0.0", "0.0.0.0"),
    ],
)
def test_worker_listens_on_addresses_of_its_own_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, host: str, listens: str
) -> None:
    monkeypatch.setenv("POD_IP", address)
    config = load_worker_config(write(tmp_path, f"{MINIMUM}listen: {{host: {host}, http: 1}}\n"))

    assert (config.listen.host, config.listen.http) == (listens, 1)


def test_identity_names_the_missing_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_NAME", "chat-0")
    monkeypatch.setenv("POD_NAMESPACE", "default")
    monkeypatch.delenv("POD_IP", raising=False)
    with pytest.raises(ConfigError, match="environment variable POD_IP is not set"):
        Identity.from_env()


@pytest.mark.parametrize("given", ["", "soon", "-3", "2.5"])
def test_identity_names_a_wrong_grace_period(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    for name in ("POD_NAME", "POD_NAMESPACE", "POD_IP"):
        monkeypatch.setenv(name, "x")
    assert Identity.from_env().grace_seconds == inf
    monkeypatch.setenv("PDCLUSTER_GRACE_SECONDS", "115")
    assert Identity.from_env().grace_seconds == 115
    monkeypatch.setenv("PDCLUSTER_GRACE_SECONDS", given)
    with pytest.raises(ConfigError, match=r"PDCLUSTER_GRACE_SECONDS is .*: set it to the whole"):
        Identity.from_env()


def test_the_front_end_of_an_engine_is_a_stock_engine_s(tmp_path: Path) -> None:
    own = MINIMUM.replace("path: /models/m", "path: /models/m, frontend: engine")
    router = own.replace("role: decode", "role: router")  # of which no file names the type
    assert load_worker_config(write(tmp_path, router)).model.frontend == "engine"

    with pytest.raises(ConfigError, match=r"model\.frontend: engine is for engine\.type: vllm"):
        load_worker_config(write(tmp_path, own))


@pytest.mark.parametrize(
    ("role", "fields", "reason"),
    [
        ("decode", "adapters: [sql, fr], adapterPaths: {sql: /sql}", "has sql, and .*, fr, sql: "),
        ("decode", "adapterPaths: {sql: /sql}", "has sql, and needs .*, none: give these alone"),
        ("router", "adapters: [sql], adapterPaths: {sql: /sql}", "has sql, and needs .*, none: "),
    ],
)
def test_an_engine_of_ours_needs_the_folder_of_each_adapter(
    tmp_path: Path, role: str, fields: str, reason: str
) -> None:
    text = MINIMUM.replace("path: /models/m", f"path: /models/m, {fields}")
    with pytest.raises(ConfigError, match=rf"model\.adapterPaths {reason}"):
        load_worker_config(write(tmp_path, text.replace("role: decode", f"role: {role}")))


@pytest.mark.parametrize(
    ("role", "engine"),
    [
        ("router", "engine: {}"),
        ("decode", "engine: {tensorParallelSize: 2}"),
        ("decode", "engine: {pipelineParallelSize: 2}"),
        ("decode", "engine: {dataParallelSize: 2}"),
        ("decode", "engine: {type: vllm}"),
    ],
)
def test_adapters_at_run_time_are_for_one_engine_of_one_rank(
    tmp_path: Path, role: str, engine: str
) -> None:
    fields = "runtimeAdapters: {path: /lora, memory: 1000}"
    text = MINIMUM.replace("path: /models/m", f"path: /models/m, {fields}")
    allowed = load_worker_config(write(tmp_path, text)).model.runtime_adapters
    assert allowed is not None
    assert (allowed.path, allowed.memory) == ("/lora", 1000)
    wrong = text.replace("role: decode", f"role: {role}") + f"\n{engine}\n"
    with pytest.raises(ConfigError, match=r"model\.runtimeAdapters is for workers with one"):
        load_worker_config(write(tmp_path, wrong))


@pytest.mark.parametrize("name", ["m", "sql"])
def test_each_adapter_has_a_name_of_its_own(tmp_path: Path, name: str) -> None:
    folders = ", ".join(f"{each}: /lora/{each}" for each in sorted({"sql", name}))
    fields = f"adapters: [sql, {name}], adapterPaths: {{{folders}}}"
    text = MINIMUM.replace("path: /models/m", f"path: /models/m, {fields}")
    reason = rf"model\.adapters has sql, {name}, and .* from model\.name, m: rename one of them"
    with pytest.raises(ConfigError, match=reason):
        load_worker_config(write(tmp_path, text))


DELAYER, DRAFTS = "engine: {prefillDelayer: {}}", "engine: {speculation: {}}"


@pytest.mark.parametrize(
    ("role", "line", "reason"),
    [
        ("router", "gpu: h100", "gpu: h100 is not for a router, which has no engine: remove it"),
        ("router", DELAYER, "engine.prefillDelayer is for prefill and mixed workers, not for rou"),
        ("decode", DELAYER, "engine.prefillDelayer is for prefill and mixed workers, not for dec"),
        ("router", DRAFTS, "engine.speculation is for decode and mixed workers, not for router"),
        ("prefill", DRAFTS, "engine.speculation is for decode and mixed workers, not for prefil"),
    ],
)
def test_worker_config_refuses_what_is_not_for_its_role(
    tmp_path: Path, role: str, line: str, reason: str
) -> None:
    own = MINIMUM.replace("role: decode", f"role: {role}")
    assert load_worker_config(write(tmp_path, own)).role == role

    with pytest.raises(ConfigError) as caught:
        load_worker_config(write(tmp_path, f"{own}{line}\n"))
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("ports", "message"),
    [
        ("port: 8103", r"vllm.kvEventsPort \(8101\) and vllm.port \(8103\) both take 8103"),
        (
            "sideChannelPort: 8098",
            r"vllm.sideChannelPort \(8098\) and vllm.port \(8100\) both take 8100",
        ),
        (
            "sideChannelPort: 8104",
            r"vllm.sideChannelPort \(8104\) and vllm.kvEventsPort \(8101\) both take 8104",
        ),
    ],
)
def test_ports_of_ranks_that_overlap_are_refused(tmp_path: Path, ports: str, message: str) -> None:
    def load(size: int) -> None:
        engine = f"{{type: vllm, dataParallelSize: {size}, vllm: {{{ports}}}}}"
        load_worker_config(write(tmp_path, f"{MINIMUM}engine: {engine}\n"))

    load(1)
    with pytest.raises(ConfigError, match=f"{message}, since each of 4 ranks .*: move them apart"):
        load(4)
