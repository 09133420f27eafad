"""Whatever is logged is one line, as text or as JSON."""

import json
import logging

import pytest

from pdcluster_schema.log_lines import FORMATTERS, JsonLines, OneLineText, log_fields

FORGED = "a\n2026-01-01 00:00:00,000 INFO pdcluster_operator.lease leading\r\\n\x1b[2K\x85\u2028é"


def record_of(text: str) -> logging.LogRecord:
    return logging.LogRecord("operator", logging.INFO, "", 0, "key=%s", (text,), None)


@pytest.mark.parametrize("formatter", FORMATTERS.values(), ids=FORMATTERS)
def test_text_from_outside_cannot_forge_a_line(formatter: logging.Formatter) -> None:
    (line,) = formatter.format(record_of(FORGED)).splitlines()

    assert "\x1b" not in line


def test_text_says_which_characters_it_had() -> None:
    assert OneLineText("%(message)s").format(record_of(FORGED)) == (
        r"key=a\n2026-01-01 00:00:00,000 INFO pdcluster_operator.lease leading\r\\n"
        r"\x1b[2K\x85\u2028é"
    )


def test_json_says_what_was_logged() -> None:
    assert json.loads(JsonLines().format(record_of(FORGED)))["message"] == f"key={FORGED}"


def test_fields_are_words_of_the_text_and_keys_of_the_json(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    fields = {"request": "r-1", "label": "a b=c", "tokens": 3, "ttft": 1 / 3}
    log_fields(logging.getLogger("worker"), "ended", fields)
    (record,) = caplog.records
    content = json.loads(JsonLines().format(record))

    assert OneLineText("%(name)s %(message)s").format(record) == (
        "worker ended request=r-1 label='a b=c' tokens=3 ttft=0.3333"
    )
    assert content.items() >= {**fields, "message": "ended"}.items()


def test_a_traceback_follows_the_fields() -> None:
    record = logging.makeLogRecord({"msg": "ended", "fields": {"n": 1}, "exc_text": "boom"})

    assert OneLineText("%(message)s").format(record) == r"ended n=1\nboom"


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_json_has_not_are_null(number: float) -> None:
    record = logging.makeLogRecord({"msg": "ended", "fields": {"ttft": number, "n": 1}})
    refused = json.JSONDecoder(parse_constant=pytest.fail)

    content = refused.decode(JsonLines().format(record))
    assert (content["ttft"], content["n"]) == (None, 1)


def test_json_has_the_stack_of_a_record(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("worker").warning("stalled", stack_info=True)
    content = json.loads(JsonLines().format(caplog.records[0]))

    assert "test_json_has_the_stack_of_a_record" in content["stack"]


def test_fields_cost_nothing_where_the_level_is_off(caplog: pytest.LogCaptureFixture) -> None:
    class Unread:
        def __str__(self) -> str:
            pytest.fail("a text was made that no line shows")

    caplog.set_level("WARNING", logger="worker")
    log_fields(logging.getLogger("worker"), "ended", {"n": Unread()})

    assert caplog.records == []
