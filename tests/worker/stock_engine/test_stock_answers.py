"""Answers that vLLM 0.31.0 and 0.32.0 gave, as our tokens."""

import pytest

from pdcluster_worker.messages.requests import PromptLogprob, RequestSpec, SamplingParams, Token
from pdcluster_worker.stock_engine.responses import (
    KvTransferParams,
    StockEngineError,
    TokenStream,
    decode_handle,
    encode_handle,
    read_error,
    read_prefill,
    read_prompt_logprobs,
)

HEAD = '"request_id":"generate-tokens-r-1"'
REST = '"routed_experts":null,"sampling_mask":null,"weight_versions":null'


def event(text: str) -> bytes:
    return f"data: {text}\n\n".encode()


def chunk(tokens: str, logprobs: str = "null", *, reason: str = "null", by: str = "null") -> bytes:
    choice = (
        f'"index":0,"finish_reason":{reason},"stop_reason":{by},"token_ids":{tokens},{REST},'
        f'"logprobs":{logprobs}'
    )
    return event(f'{{{HEAD},"usage":null,"output_mode":"tokens","choices":[{{{choice}}}]}}')


def usage(cached_tokens: int) -> bytes:
    details = f'"prompt_tokens_details":{{"cached_tokens":{cached_tokens}}}'
    counts = '"prompt_tokens":70,"total_tokens":76,"completion_tokens":6'
    return event(f'{{{HEAD},"usage":{{{counts},{details}}},"output_mode":"tokens","choices":[]}}')


DONE = b"data: [DONE]\n\n"
LENGTH = '"length"'
STOP = '"stop"'
LOGPROBS = (
    '{"content":[{"token_id":162,"logprob":-2.22,"rank":4,"top_logprobs":['
    '{"token_id":162,"logprob":-2.22,"rank":4},{"token_id":8083,"logprob":-1.5,"rank":1},'
    '{"token_id":163,"logprob":-1.7,"rank":2}]}]}'
)
OLDER_LOGPROBS = (
    '{"content":[{"token":"token_id:162","logprob":-2.22,"bytes":null,"top_logprobs":['
    '{"token":"token_id:162","logprob":-2.22,"bytes":null},'
    '{"token":"token_id:8083","logprob":-1.5,"bytes":null},'
    '{"token":"token_id:163","logprob":-1.7,"bytes":null}]}]}'
)
FAILED = event(
    '{"error": {"message": "Internal server error", "type": "InternalServerError", '
    '"param": null, "code": 500}}'
)
TRANSFER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "67688d01-08cf-43c8-a8e8-b5b107512365",
    "remote_request_id": "generate-tokens-r-1-96f94c5b",
    "remote_host": "127.0.0.1",
    "remote_port": 8302,
}
PREFILL = (
    b'{"request_id":"generate-tokens-r-1","model":"smol","usage":{"prompt_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":32}},"prompt_logprobs":[null,'
    b'{"101":{"logprob":-5.0,"rank":9,"decoded_token":null},'
    b'"7":{"logprob":-0.5,"rank":1,"decoded_token":null},'
    b'"8":{"logprob":-0.7,"rank":2,"decoded_token":null}},'
    b'{"7":{"logprob":-0.1,"rank":1,"decoded_token":null},'
    b'"9":{"logprob":-3.0,"rank":2,"decoded_token":null}}],'
    b'"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,'
    b'"remote_block_ids":[[1,2,3]],"remote_engine_id":"67688d01-08cf-43c8-a8e8-b5b107512365",'
    b'"remote_request_id":"generate-tokens-r-1-96f94c5b","remote_host":"127.0.0.1",'
    b'"remote_port":8302},"output_mode":"tokens","choices":[{"index":0,'
    b'"finish_reason":"length","token_ids":[162],"logprobs":null}]}'
)


def spec(**sampling: int | list[int]) -> RequestSpec:
    return RequestSpec("r", [1, 2, 3], SamplingParams(max_tokens=8, seed=0, **sampling))


def read(stream: TokenStream, *parts: bytes) -> list[Token]:
    return [token for part in parts for token in stream.feed(part)]


def test_tokens_come_in_order_and_the_last_with_its_reason_and_usage() -> None:
    stream = TokenStream(spec(), cached_tokens=32)

    tokens = read(stream, chunk("[162,112]"), chunk("[162]", reason=LENGTH), usage(64), DONE)

    assert [token.token_id for token in tokens] == [162, 112, 162]
    assert [token.finish_reason for token in tokens] == [None, None, "length"]
    assert [token.cached_tokens for token in tokens] == [32, 0, 64]
    assert stream.has_ended


def test_parts_of_any_size_give_the_same_tokens() -> None:
    body = chunk("[5]") + b": keep-alive\n\n" + chunk("[6]", reason=LENGTH) + usage(0) + DONE

    whole = read(TokenStream(spec()), body)
    bytewise = read(TokenStream(spec()), *(body[i : i + 1] for i in range(len(body))))

    assert whole == bytewise
    assert [token.token_id for token in whole] == [5, 6]


def test_a_stop_token_of_the_request_is_named_and_the_models_own_is_not() -> None:
    def ended(by: str) -> Token:
        stream = TokenStream(spec(stop_token_ids=[7], eos_token_ids=[2]))
        return read(stream, chunk(f"[{by}]", reason=STOP, by=by), usage(0), DONE)[-1]

    assert (ended("7").finish_reason, ended("7").stop_reason) == ("stop", 7)
    assert (ended("2").finish_reason, ended("2").stop_reason) == ("stop", None)


@pytest.mark.parametrize("logprobs", [LOGPROBS, OLDER_LOGPROBS])
def test_top_logprobs_are_the_most_likely_ones_whatever_was_sampled(logprobs: str) -> None:
    (token,) = read(TokenStream(spec(logprobs=2)), chunk("[162]", logprobs))

    assert token.logprob == -2.22
    assert token.top_logprobs == [(8083, -1.5), (163, -1.7)]


def test_only_the_sampled_tokens_logprob_where_no_top_was_asked_for() -> None:
    (token,) = read(TokenStream(spec(logprobs=0)), chunk("[162]", LOGPROBS))

    assert (token.logprob, token.top_logprobs) == (-2.22, [])


def test_a_fetched_prompt_has_the_prefill_engines_cached_tokens() -> None:
    stream = TokenStream(spec(), handle=KvTransferParams(TRANSFER, cached_tokens=16))

    tokens = read(stream, chunk("[5]"), chunk("[6]", reason=LENGTH), usage(70), DONE)

    assert [token.cached_tokens for token in tokens] == [16, 16]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([FAILED], "Internal server error"),
        ([chunk("[5]"), DONE], "ended before its last token"),
        ([chunk("[5]", reason='"abort"')], "ended the request: abort"),
        ([chunk("[]", reason='"abort"')], "ended the request: abort"),
        ([event("{")], "cannot be read"),
        ([event('{"choices":[{"token_ids":["a"]}]}')], "cannot be read"),
        ([chunk("[5]", '{"content":[{"token":"five","logprob":-1}]}')], "cannot be read"),
    ],
)
def test_an_error_inside_a_200_fails_the_request(parts: list[bytes], message: str) -> None:
    with pytest.raises(StockEngineError, match=message):
        read(TokenStream(spec()), *parts)


def test_a_refusal_inside_a_stream_is_one() -> None:
    with pytest.raises(StockEngineError, match="bad grammar") as raised:
        read(TokenStream(spec()), event('{"error":{"message":"bad grammar","code":400}}'))

    assert raised.value.is_refusal


def test_a_prefills_answer_is_a_handle_that_travels() -> None:
    handle = read_prefill(PREFILL, spec(prompt_logprobs=1))

    assert handle == KvTransferParams(
        TRANSFER,
        cached_tokens=32,
        prompt_logprobs=[PromptLogprob(-5.0, 9, [(7, -0.5)]), PromptLogprob(-0.1, 1, [(7, -0.1)])],
    )
    assert decode_handle(encode_handle(handle)) == handle
    assert read_prompt_logprobs(PREFILL, spec(prompt_logprobs=0)) == [
        PromptLogprob(-5.0, 9),
        PromptLogprob(-0.1, 1),
    ]


def test_an_engine_that_keeps_no_kv_is_no_prefill_engine() -> None:
    with pytest.raises(StockEngineError, match="kv-transfer-config"):
        read_prefill(b'{"kv_transfer_params":null,"choices":[]}', spec())


@pytest.mark.parametrize(
    ("status", "body", "message", "is_refusal", "param"),
    [
        (
            400,
            b'{"error":{"message":"max_tokens must be at least 1","type":"BadRequestError",'
            b'"param":"max_tokens","code":400}}',
            "max_tokens must be at least 1",
            True,
            "max_tokens",
        ),
        (404, b'{"error":{"message":"The model `o` does not exist."}}', "not exist", False, None),
        (500, b"Internal Server Error", "Internal Server Error", False, None),
        (503, b"", "answered 503", False, None),
    ],
)
def test_a_refusal_of_the_engine_is_the_requests(
    status: int, body: bytes, message: str, is_refusal: bool, param: str | None
) -> None:
    error = read_error(status, body)

    assert message in str(error)
    assert (error.is_refusal, error.param) == (is_refusal, param)
