"""A server with OpenAI's API as a target: what it is sent, and which answers are complete."""

import pytest

from pdcluster_api.errors import IncompleteAnswerError
from pdctl.bench.load import BenchRequest, TokenUsage
from pdctl.bench.openai import CHAT, COMPLETIONS, OpenAIServer, http_session
from tests.operator.pdctl.bench.small_servers import TOKEN, events, serving, usage

ASK = BenchRequest([300, 301], 2)


async def ask(
    body: bytes, *, status: int = 200, piece_bytes: int = 1000, endpoint: str = COMPLETIONS
) -> tuple[TokenUsage, int]:
    """(what was counted, chunks) of an answer."""
    chunks: list[None] = []
    async with (
        serving(lambda _: body, status=status, piece_bytes=piece_bytes) as server,
        http_session() as session,
    ):
        target = OpenAIServer(session, server.base_url, "small", endpoint)
        return await target.send(ASK, lambda: chunks.append(None)), len(chunks)


@pytest.mark.parametrize("piece_bytes", [1, 7, 10_000])
async def test_stream_counts_chunks_and_takes_tokens_from_usage(piece_bytes: int) -> None:
    assert await ask(events(TOKEN, TOKEN, usage(2), b"[DONE]"), piece_bytes=piece_bytes) == (
        TokenUsage(2, 8),
        2,
    )


async def test_stream_with_carriage_returns_is_read_too() -> None:
    body = events(TOKEN, usage(1), b"[DONE]").replace(b"\n", b"\r\n")

    assert await ask(body, piece_bytes=1) == (TokenUsage(1, 8), 1)


async def test_stream_of_a_chat_counts_only_chunks_with_text() -> None:
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    text = {"choices": [{"delta": {"content": "a"}}]}

    assert await ask(events(role, text, text, usage(2), b"[DONE]"), endpoint=CHAT) == (
        TokenUsage(2, 8),
        2,
    )


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (events(TOKEN, usage(2)), "DONE"),
        (events(TOKEN, b"[DONE]"), "usage"),
        (events(TOKEN, {"error": {"message": "the engine died"}}), "the engine died"),
        (events(b"{", b"[DONE]"), "no JSON"),
        (events({"object": "other"}), "without choices"),
        (b"", "DONE"),
    ],
)
async def test_stream_that_is_not_complete_is_an_error(body: bytes, reason: str) -> None:
    with pytest.raises(IncompleteAnswerError, match=reason):
        await ask(body)


async def test_stream_with_another_status_is_an_error_that_shows_it() -> None:
    with pytest.raises(IncompleteAnswerError, match=r"HTTP 503.*queue is full"):
        await ask(b"queue is full", status=503)


async def test_stream_to_a_closed_port_is_an_error() -> None:
    async with serving() as server:
        base_url = server.base_url
    async with http_session() as session:
        with pytest.raises(IncompleteAnswerError, match="connection failed"):
            await OpenAIServer(session, base_url, "small").send(ASK, lambda: None)


async def test_request_has_the_chosen_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    async with http_session() as session:
        assert session.headers["Authorization"] == "Bearer a key"
        body = OpenAIServer(session, "http://x", "small").body(
            BenchRequest([5], 7, temperature=0.5, seed=3)
        )
        chat = OpenAIServer(session, "http://x", "small", CHAT).body(
            BenchRequest("hello", 7, ignore_eos=False)
        )

    wanted = {
        "model": "small",
        "prompt": [5],
        "max_tokens": 7,
        "temperature": 0.5,
        "ignore_eos": True,
        "seed": 3,
    }
    assert body == {**wanted, "stream": True, "stream_options": {"include_usage": True}}
    assert chat["messages"] == [{"role": "user", "content": "hello"}]
    assert "ignore_eos" not in chat
