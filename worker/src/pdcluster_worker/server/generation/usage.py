"""Tokens of a request, counted as OpenAI's APIs and those over them state them."""

from typing import Annotated

from pydantic import BaseModel, Field


class PromptTokensDetails(BaseModel):
    """cached_tokens: prompt tokens found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """reasoning_tokens: of the completion, those before the answer itself."""

    reasoning_tokens: int


class Usage(BaseModel):
    """Tokens of the whole request; a prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: Annotated[
        CompletionTokensDetails | None, Field(exclude_if=lambda value: value is None)
    ] = None

    def with_completion(self, num_tokens: int) -> "Usage":
        """The same prompt with so many tokens of an answer, of any kind."""
        return self.model_copy(
            update={
                "completion_tokens": num_tokens,
                "total_tokens": self.prompt_tokens + num_tokens,
                "completion_tokens_details": None,
            }
        )
