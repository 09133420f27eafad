"""vLLM's own load generator, `vllm bench serve`, against any server under test.

It runs in vLLM's environment, on the same machine as the server, as ours does.
What it recorded of each request is read back, so that both generators' figures
go through the same formulas.
"""

import asyncio
import json
import tempfile
import zlib
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from system import Address
from vllm_server import FOLDER, Served
from workload import Workload

from pdcluster_api.errors import StartError
from pdctl.bench.load import LoadResult, RequestResult

LIMIT_SECONDS = 400.0
_LAST_BYTES = 2000


async def run_client(address: Address, workload: Workload, served: Served, seed: str) -> LoadResult:
    """Send the workload.  Raises StartError with its last words when the client fails."""
    with tempfile.TemporaryDirectory(prefix="pdcluster-bench-client-") as folder:
        command = client_command(address, workload, served.model, seed)
        result = Path(folder) / "result.json"
        options = ("--result-dir", folder, "--result-filename", result.name)
        process = await asyncio.create_subprocess_exec(
            *command,
            *options,
            stdout=DEVNULL,
            stderr=PIPE,
            env=served.environment(),
            start_new_session=True,
        )
        try:
            _, said = await asyncio.wait_for(process.communicate(), LIMIT_SECONDS)
        except BaseException as e:
            process.kill()
            await process.wait()
            if isinstance(e, TimeoutError):
                raise StartError(
                    f"`vllm bench serve` took longer than {LIMIT_SECONDS:g} s", exit_code=1
                ) from e
            raise
        if not result.is_file():
            last = said[-_LAST_BYTES:].decode(errors="replace")
            raise StartError(
                f"`vllm bench serve` ended with {process.returncode}:\n{last}", exit_code=1
            )
        return run_of(json.loads(result.read_text()))


def client_command(address: Address, workload: Workload, tokenizer: Path, seed: str) -> list[str]:
    """Its command for a closed loop or Poisson arrivals of random prompts."""
    pace = (
        ("--request-rate", f"{workload.rate:g}")
        if workload.rate
        else ("--max-concurrency", str(workload.concurrency))
    )
    return [
        *(str(FOLDER / "bin" / "vllm"), "bench", "serve", "--backend", "openai", "--disable-tqdm"),
        *("--base-url", address.base_url, "--endpoint", "/v1/completions"),
        *("--model", address.model, "--tokenizer", str(tokenizer), "--dataset-name", "random"),
        *("--random-input-len", str(workload.num_prompt_tokens)),
        *("--random-output-len", str(workload.num_output_tokens), "--ignore-eos"),
        *("--num-prompts", str(workload.num_requests), *pace),
        *("--temperature", f"{workload.temperature:g}", "--seed", str(client_seed(seed))),
        *("--goodput", "ttft:2000", "tpot:100", "--save-result", "--save-detailed"),
    ]


def client_seed(seed: str) -> int:
    """Its seeds are numbers.

    >>> client_seed("a0 1")
    561497913
    """
    return zlib.crc32(seed.encode()) >> 1


def run_of(result: Mapping[str, Any]) -> LoadResult:
    """Records of the client for each request.

    A failed request has an error, or no first token.  It keeps no processor time.
    """
    rows = zip(
        *(
            result[name]
            for name in ("start_times", "ttfts", "itls", "output_lens", "input_lens", "errors")
        ),
        strict=True,
    )
    results = [
        RequestResult(
            scheduled_seconds=start,
            started_seconds=start,
            chunk_seconds=tuple(accumulate(gaps, initial=start + ttft)),
            num_tokens=num_tokens,
            failure=(error.strip().splitlines() or [""])[-1]
            or (None if ttft else "no first token"),
            num_prompt_tokens=num_prompt_tokens,
        )
        for start, ttft, gaps, num_tokens, num_prompt_tokens, error in rows
    ]
    return LoadResult(tuple(results), result["duration"], 0.0)
