"""A streamed answer of a chat, printed as it comes: nothing in it controls the terminal."""

import re
import time
from dataclasses import dataclass, field
from typing import Any

import typer

from pdcluster_schema.log_lines import ESCAPED

# the rest could set a terminal's title, clear it, or write the clipboard
_CONTROLS = {code: text for code, text in ESCAPED.items() if chr(code) not in "\n\t"}


def plain(text: str) -> str:
    return text.encode(errors="replace").decode().translate(_CONTROLS)


@dataclass
class _Deltas:
    """Joins the halves of a surrogate pair that came in two deltas; one alone becomes U+FFFD."""

    half: str = ""

    def whole(self, delta: str) -> str:
        text = self.half + delta
        self.half = text[-1:] if "\ud800" <= text[-1:] <= "\udbff" else ""
        whole = text.removesuffix(self.half)
        return whole.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


@dataclass
class ChatAnswer:
    """The part of an answer that has come.

    arrivals: time of each event with text.  num_tokens: None until the answer has ended.
    is_cut: by its length, of --max-tokens or of the model's context.
    """

    began: float = field(default_factory=time.monotonic)
    text: str = ""
    arrivals: list[float] = field(default_factory=list)
    num_tokens: int | None = None
    prefill: str = ""
    route: str = ""
    is_cut: bool = False
    content: _Deltas = field(default_factory=_Deltas)
    reasoning: _Deltas = field(default_factory=_Deltas)

    def take(self, event: dict[str, Any]) -> None:
        for choice in event["choices"]:
            self.is_cut |= choice.get("finish_reason") == "length"
            delta = choice.get("delta") or {}
            reasoning = delta.get("reasoning_content") or delta.get("reasoning")
            if reasoning or delta.get("content"):
                self.arrivals.append(time.monotonic())
            if reasoning:
                text = self.reasoning.whole(reasoning)
                typer.secho(text.translate(_CONTROLS), nl=False, dim=True, err=True)
            if delta.get("content"):
                text = self.content.whole(delta["content"])
                self.text += text
                typer.echo(text.translate(_CONTROLS), nl=False)
        if usage := event.get("usage"):
            if not isinstance(usage["completion_tokens"], int):
                raise TypeError(f"usage.completion_tokens is {usage['completion_tokens']!r}")
            self.num_tokens = usage["completion_tokens"]

    def figures(self) -> str:
        """Time to the first token, tokens a second, where it was prefilled and why.

        >>> route = "decode worker=d; offload prefill=remote reason=rule threshold=256"
        >>> ChatAnswer(1.0, "a b", [1.25, 1.75], 6, "remote", f"{route} uncached_tokens=300"
        ...     ).figures()
        '250 ms to the first token, 10.0 tokens/s, prefill remote (rule, 300 uncached tokens)'
        """
        if not self.arrivals:
            return "no token came"
        parts = [f"{1000 * (self.arrivals[0] - self.began):.0f} ms to the first token"]
        seconds = self.arrivals[-1] - self.arrivals[0]
        if self.num_tokens and self.num_tokens > 1 and seconds > 0:
            parts.append(f"{(self.num_tokens - 1) / seconds:.1f} tokens/s")
        if self.prefill:
            parts.append(f"prefill {self.prefill}{self._why()}")
        if self.is_cut:
            parts.append("cut by its length: see --max-tokens")
        return ", ".join(parts)

    def _why(self) -> str:
        offload = re.search(r"\boffload [^;]*", self.route)
        facts = dict(re.findall(r"(\w+)=(\S+)", offload[0])) if offload else {}
        if "reason" not in facts:
            return ""
        reason, uncached = facts["reason"], facts.get("uncached_tokens")
        return f" ({reason}, {uncached} uncached tokens)" if uncached else f" ({reason})"
