"""A vLLM's front end in a test's place: it takes and gives what vLLM's endpoints do."""

import asyncio
import json
from hashlib import sha256
from typing import Any

from pdcluster_worker.errors import CONTEXT_LENGTH_EXCEEDED, RequestError
from pdcluster_worker.server.text.tokenizer import Tokenizer

IMAGE = 200
"""Token in the place of an image."""


class PlayedEngine:
    """Reads an answer as REASONING|TEXT, or as REASONING|TEXT@NAME ARGUMENTS for a call.

    form: that its parsers ask for.  delay: seconds of a derender.  error: of each derender.
    longest: prompt in characters.  place: tokens in the place of an image.  features: those that it
    says in place of what it sees.  refuses_images: in its words.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.calls: list[tuple[str, Any]] = []
        self.form: dict[str, Any] | None = None
        self.features: Any = None
        self.place = [IMAGE] * 3
        self.delay, self.longest = 0.0, 4000
        self.refuses_images = ""
        self.error: RequestError | None = None
        self.num_open = self.most_open = 0

    async def ask(self, path: str, body: bytes) -> bytes:
        fields = json.loads(body)
        self.calls.append((path, fields))
        if path == "/v1/embeddings":
            usage = {"prompt_tokens": 5 * len(fields["input"])}
            return json.dumps({"object": "list", "asked": fields, "usage": usage}).encode()
        if path.endswith("/derender"):
            return json.dumps(await self._derender(path, fields)).encode()
        if path == "/detokenize":
            return json.dumps({"prompt": self.tokenizer.decode(fields["tokens"])}).encode()
        if path == "/v1/completions/render":
            return json.dumps([self._rendered(text) for text in fields["prompt"]]).encode()
        contents = [message.get("content") or "" for message in fields["messages"]]
        if any(isinstance(content, list) for content in contents):
            if self.refuses_images:
                raise RequestError(f"the engine refuses the request: {self.refuses_images}")
            return json.dumps(self._seen(contents)).encode()
        text = "".join(contents)
        if text == "refuse":
            raise RequestError("the engine refuses the request: no such role")
        if len(text) > self.longest:
            raise RequestError("it is too long", code=CONTEXT_LENGTH_EXCEEDED)
        return json.dumps(self._rendered(text)).encode()

    def of(self, end: str) -> list[Any]:
        return [fields for path, fields in self.calls if path.endswith(end)]

    def _seen(self, contents: list[Any]) -> dict[str, Any]:
        """The prompt of contents of which one at least is a list of parts."""
        tokens, places, digests = list[int](), list[dict[str, int]](), list[str]()
        listed = ([content] if isinstance(content, str) else content for content in contents)
        for part in (part for parts in listed for part in parts):
            text = part if isinstance(part, str) else part.get("text")
            if text is not None:
                tokens += self.tokenizer.encode([text])[0]
                continue
            places.append({"offset": len(tokens), "length": len(self.place)})
            digests.append(sha256(part["image_url"]["url"].encode()).hexdigest())
            tokens += self.place
        features = {"mm_hashes": {"image": digests}, "mm_placeholders": {"image": places}}
        return {**self._rendered(""), "features": self.features or features, "token_ids": tokens}

    def _rendered(self, text: str) -> dict[str, Any]:
        return {
            "token_ids": self.tokenizer.encode([text])[0],
            "sampling_params": {"temperature": 1.0, "structured_outputs": self.form},
            "features": None,
            "reasoning_ended": False,
            "reasoning_parser_kwargs": {"chat_template_kwargs": {}},
        }

    async def _derender(self, path: str, fields: Any) -> dict[str, Any]:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        await asyncio.sleep(self.delay)
        self.num_open -= 1
        if self.error is not None:
            raise self.error
        if not fields.get("stream"):
            (choice,) = fields["generate_response"]["choices"]
            message = read(self.tokenizer.decode(choice["token_ids"]), "", is_chat=True)
            return {"choices": [{"message": message}]}
        (choice,) = fields["generate_chunk"]["choices"]
        before = (fields["stream_state"] or {"so_far": []})["so_far"]
        made = before + choice["token_ids"]
        texts = [self.tokenizer.decode(ids) for ids in (made, before)]
        is_chat = path.startswith("/v1/chat")
        read_ = read(*texts, is_chat=is_chat)
        shown = {"delta": read_} if is_chat else {"text": texts[0][len(texts[1]) :]}
        return {"chunk": {"choices": [shown]}, "stream_state": {"so_far": made}}


def parts(text: str) -> tuple[str, str, str]:
    """Reasoning, text, and the call of an answer."""
    reasoning, mark, rest = text.partition("|")
    if not mark:
        reasoning, rest = ("", text) if "@" in text or not text.startswith("~") else (text, "")
    content, _, call = rest.partition("@")
    return reasoning, content, call


def read(text: str, before: str, *, is_chat: bool) -> dict[str, Any]:
    """The new part of an answer since `before`."""
    now, then = parts(text), parts(before)
    message: dict[str, Any] = {
        "reasoning": now[0][len(then[0]) :] or None,
        "content": now[1][len(then[1]) :] or None,
    }
    name, space, arguments = now[2].partition(" ")
    if space:
        _, had_name, had = then[2].partition(" ")
        function = {"name": None if had_name else name, "arguments": arguments[len(had) :]}
        message["tool_calls"] = [{"index": 0, "id": None, "function": function}]
    return message
