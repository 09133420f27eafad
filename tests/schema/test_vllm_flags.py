"""vLLM's arguments of a role over those of the spec."""

from typing import Any

import pytest

from pdcluster_schema.load import parse
from pdcluster_schema.vllm_flags import flags_of, merged_arguments
from tests.schema.object_cases import at, vllm


@pytest.mark.parametrize(
    ("ours", "theirs", "merged"),
    [
        (["--a", "1", "--b"], ["--c"], ["--a", "1", "--b", "--c"]),
        (["--a-b", "1", "--c"], ["--a_b=2"], ["--c", "--a_b=2"]),
        (["--enforce-eager"], ["--no-enforce-eager"], ["--no-enforce-eager"]),
        (["--no-enable-x", "--y"], ["--enable-x"], ["--y", "--enable-x"]),
        (["--seed", "-1", "--y"], ["--seed", "7"], ["--y", "--seed", "7"]),
        (["-q", "fp8"], ["--quantization=modelopt"], ["--quantization=modelopt"]),
        (["-O3"], ["-O.mode", "1"], ["-O.mode", "1"]),
        (["--hf-o.a=1", "--y"], ["--hf-overrides.a=2"], ["--y", "--hf-overrides.a=2"]),
        (["--quantization-config={}"], ["--quant", "fp8"], ["--quantization-config={}", "--quant"]),
        (["-O", "2", "-cc.x", "1"], ["-O3"], ["-cc.x", "1", "-O3"]),
        (["--cc.x", "1", "--cc.y", "2"], ["--cc.y=3"], ["--cc.x", "1", "--cc.y=3"]),
        (['--sc={"method":"mtp"}'], ["--sc.method", "eagle"], ["--sc.method", "eagle"]),
        (["--sc.a", "1", "--sc.b_c", "2"], ["--sc", "{}"], ["--sc", "{}"]),
        (["--lora-modules", "a=b", "c=d", "-v"], ["--lora-modules", "e"], ["-v", "--lora-modules"]),
        (["-v"], ["--middleware", "a", "--middleware", "b"], ["-v", "--middleware", "a"]),
        ([], ["-v"], ["-v"]),
        (["-v"], [], ["-v"]),
    ],
)
def test_flag_goes_over_the_same_flag_and_the_rest_keeps_its_order(
    ours: list[str], theirs: list[str], merged: list[str]
) -> None:
    found = merged_arguments(ours, theirs)

    assert found[: len(merged)] == tuple(merged)
    assert found[len(found) - len(theirs) :] == tuple(theirs)


def test_value_is_what_follows_a_flag() -> None:
    arguments = ["stray", "--a=x=y", "--b", "1", "2", "--no-c", "-q\n", "fp8\n"]

    assert [(flag.name, flag.value) for flag in flags_of(arguments)] == [
        ("", "true"),
        ("a", "x=y"),
        ("b", "1 2"),
        ("c", "false"),
        ("quantization", "fp8"),
    ]


def test_a_role_adds_to_the_arguments_and_variables_of_the_spec(document: dict[str, Any]) -> None:
    variables = [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]
    vllm(args=["--enforce-eager", "--seed", "1"], env=variables)(document)
    own = {"args": ["--seed=2"], "env": [{"name": "A", "value": "3"}, {"name": "C", "value": "4"}]}
    at("spec.roles.decode.engine", own)(document)
    at("spec.roles.prefill.engine", {"args": None, "env": []})(document)
    spec = parse(document).spec

    decode, prefill = spec.engine_of("decode"), spec.engine_of("prefill")
    assert decode.args == ("--enforce-eager", "--seed=2")
    assert [(each.name, each.value) for each in decode.env or ()] == [
        ("A", "3"),
        ("B", "2"),
        ("C", "4"),
    ]
    assert (prefill.args, prefill.env) == (spec.engine.args, spec.engine.env)


def test_a_role_alone_has_its_own(document: dict[str, Any]) -> None:
    vllm()(document)
    at("spec.roles.decode.engine", {"args": ["-v"]})(document)
    spec = parse(document).spec

    assert (spec.engine_of("decode").args, spec.engine_of("prefill").args) == (("-v",), None)
