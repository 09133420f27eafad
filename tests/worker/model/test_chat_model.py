"""The real chat model (SmolLM2-135M-Instruct): equality with generate() in float32, and an answer
that makes sense in bf16.
"""

from typing import Any

import pytest
from transformers import AutoTokenizer

from pdcluster_worker.system.native_dtype import read_native_dtype
from tests.equality import assert_same_tokens

pytestmark = pytest.mark.model

QUESTIONS = [
    "What is the capital of France?",
    "Count from one to ten.",
    "Explain in two sentences why the sky is blue. " * 8,
]


@pytest.fixture(scope="module")
def tokenizer(chat_model_folder) -> Any:
    return AutoTokenizer.from_pretrained(chat_model_folder, local_files_only=True)


def prompt_of(tokenizer: Any, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_float32_equals_generate(chat_model_folder, tokenizer, make_driver, reference):
    driver = make_driver(chat_model_folder)
    requests = [driver.request(question, prompt_of(tokenizer, question)) for question in QUESTIONS]
    driver.finish(requests, 16, chunk=48)
    for request in requests:
        prompt = request.tokens[: request.num_prompt_tokens]
        expected, gaps = reference(chat_model_folder).greedy(prompt, 16)
        assert_same_tokens(gaps, expected, driver.output(request))


def test_auto_dtype_knows_the_capital_of_france(chat_model_folder, tokenizer, make_driver):
    driver = make_driver(chat_model_folder, dtype=read_native_dtype(), threads=2)
    request = driver.request("paris", prompt_of(tokenizer, QUESTIONS[0]))
    driver.finish([request], 8)
    answer = driver.output(request)
    assert tokenizer.decode(answer[: answer.index(2)]) == "The capital of France is Paris."
