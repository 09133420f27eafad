"""The end of a container's log -> the one line that says why it ended."""

import json

import pytest

from pdcluster_api.apiserver.container_ends import first_error, termination_message

LATE = "2026-11-21 16:21:59,901 INFO uvicorn.error Finished server process [7]"


def etcd(level: str, message: str, **more: str) -> str:
    return json.dumps(
        {
            "level": level,
            "ts": "2026-11-21T16:21:59.901Z",
            "caller": "etcdmain/etcd.go:180",
            "msg": message,
            **more,
        }
    )


CASES = {
    "nothing": ("", ""),
    "blank lines": ("\n \n", ""),
    "our own mark": (
        f"error: num_blocks: too many; lower it\n{LATE}",
        "num_blocks: too many; lower it",
    ),
    "a logged error": (
        f"2026-11-21 16:21:59,865 ERROR engine ended reason=x\n{LATE}",
        "engine ended reason=x",
    ),
    "a critical one": (f"2026-11-21 16:21:59,865 CRITICAL engine gone\n{LATE}", "engine gone"),
    "the last of several": (
        f"error: first\n2026-11-21 16:21:59,865 ERROR second\nerror: third\n{LATE}",
        "third",
    ),
    "a traceback under a logged error": (
        "2026-11-21 16:21:59,865 ERROR ended\nTraceback\n  at x\nOSError: [Errno 28] full\n",
        "OSError: [Errno 28] full",
    ),
    "a class of a package": (
        "Traceback\n  at x\nzmq.error.ZMQError: Address in use",
        "zmq.error.ZMQError: Address in use",
    ),
    "no error at all": ("starting\nbye", "bye"),
    "nor a time that changes": (
        f"starting\n{LATE}",
        "INFO uvicorn.error Finished server process [7]",
    ),
    "etcd": (
        "\n".join(
            [
                etcd("warn", "slow"),
                etcd("fatal", "discovery failed", error="member exists"),
                etcd("info", "closing"),
            ]
        ),
        "discovery failed: member exists",
    ),
    "etcd without an error": (
        "\n".join([etcd("info", "opening"), etcd("warn", "closing")]),
        "closing",
    ),
    "the end of a cut line": ('{"level":"fatal","msg":"x\n{not json', "{not json"),
    "JSON that is no entry": ('{"a": 1}', '{"a": 1}'),
}


@pytest.mark.parametrize(("left", "said"), CASES.values(), ids=CASES)
def test_last_words_say_why(left: str, said: str):
    assert termination_message(left) == said


def test_last_words_are_the_same_whenever_it_ends():
    early, late = (
        f"2026-11-21 {time} ERROR engine ended\n2026-11-21 {time} INFO bye"
        for time in ("16:21:59,865", "17:00:00,001")
    )
    assert termination_message(early) == termination_message(late)


NO_MEMORY = "ValueError: No available memory for the cache blocks."
FAILED = "RuntimeError: Engine core initialization failed. See root cause above. Failed: {}"
INVALID = "pydantic_core.ValidationError: 2 validation errors for ModelConfig"
FIRST = {
    "the cause, not what it led to": (
        f"EngineCore failed to start.\nTraceback\n  at x\n{NO_MEMORY}\nWorker died unexpectedly",
        NO_MEMORY,
    ),
    "not the error that points elsewhere": (
        f"(EngineCore pid=7) {NO_MEMORY}\n(APIServer pid=1) Traceback\n{FAILED}",
        NO_MEMORY,
    ),
    "the flag that is unknown": (
        "usage: vllm serve\nvllm serve: error: unrecognized arguments: --eager",
        "vllm serve: error: unrecognized arguments: --eager",
    ),
    "nothing but the pointer": (FAILED, FAILED),
    "what is invalid, not only how many": (
        f"(APIServer pid=1) {INVALID}\n"
        "(APIServer pid=1)   Value error, max_model_len (99999) is too great. "
        "[type=value_error, input_value=ArgsKwargs(()), input_type=ArgsKwargs]\n"
        "(APIServer pid=1)     For further information visit a page",
        f"{INVALID}: Value error, max_model_len (99999) is too great.",
    ),
    "a field that is invalid": (
        f"{INVALID}\nseed\n  Input should be a number [type=int, input_value='x']\ndtype\n  No",
        f"{INVALID}: seed: Input should be a number",
    ),
    "a list of what is invalid that was cut": (
        f"{INVALID}\n  Value error, too",
        f"{INVALID}: Value error, too",
    ),
    "nothing": ("", ""),
}


@pytest.mark.parametrize(("left", "said"), FIRST.values(), ids=FIRST)
def test_first_error_is_the_cause_among_several_processes(left: str, said: str) -> None:
    assert first_error(left) == said
