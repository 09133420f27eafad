"""Settings of speculative decoding (`engine.speculation`)."""

from typing import Annotated, Literal

import msgspec

from pdcluster_worker.config.section import Positive, Section
from pdcluster_worker.messages.engine_settings import SpeculationSettings

MOST_DRAFTS = 16  # of one request; each is a row of the step

DraftTokens = Annotated[int, msgspec.Meta(ge=1, le=MOST_DRAFTS)]


class SpeculationConfig(Section, frozen=True):
    method: Literal["Off", "ngram", "draft"] = "ngram"  # ngram = the request's own tokens
    draft_model: str | None = None  # folder of a model with the same tokens
    num_tokens: DraftTokens = 3
    prompt_lookup_max: Positive = 5  # suffix to match
    prompt_lookup_min: Positive = 3
    adaptive: bool = True  # skip requests whose drafts do not pay
    disable_above_running: Positive | None = None

    def __post_init__(self) -> None:
        if self.method == "draft" and not self.draft_model:
            raise ValueError(
                "speculation.method: draft needs speculation.draftModel: give the folder of a "
                "smaller model"
            )
        if self.method == "ngram" and self.draft_model is not None:
            raise ValueError(
                "speculation.draftModel is for method draft, not ngram: leave it out, or set "
                "method: draft"
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"speculation.promptLookupMin ({self.prompt_lookup_min}) must be at most "
                f"promptLookupMax ({self.prompt_lookup_max}): "
                "lower the one or raise the other"
            )

    @property
    def settings(self) -> SpeculationSettings:
        return SpeculationSettings(
            num_tokens=self.num_tokens,
            lookup_max=self.prompt_lookup_max,
            lookup_min=self.prompt_lookup_min,
            adaptive=self.adaptive,
            disable_above_running=self.disable_above_running,
        )
