"""`pdctl bench serve`: load for any server with OpenAI's API, with vLLM's flags."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from pdcluster_api.errors import StartError
from pdctl.bench.datasets import DatasetSampling, Lengths, Name, file_requests, random_requests
from pdctl.bench.load import (
    REQUEST_LIMIT_SECONDS,
    Arrivals,
    BenchRequest,
    LoadResult,
    poisson_arrivals,
    run_load,
)
from pdctl.bench.measure import Server, connected, warm_up
from pdctl.bench.openai import CHAT, COMPLETIONS
from pdctl.bench.plot import draw_latencies
from pdctl.bench.result import Reporting, serve_result, serve_text
from pdctl.cli import bench_common as given
from pdctl.cli.bench_common import check_plot, draw, run, write_result
from pdctl.cli.options import reported
from pdctl.cli.progress import shown_progress

Rate = Annotated[float, typer.Option(help="Poisson arrivals a second; inf = all at once")]
Prefix = Annotated[int, typer.Option(min=0, help="tokens that all random prompts share, first")]
Ratio = Annotated[float, typer.Option(min=0.0, max=0.99, help="lengths vary by so much of them")]
Vocabulary = Annotated[int, typer.Option(min=513, help="random token ids are below it")]
Concurrency = Annotated[int | None, typer.Option(min=1, help="so many at a time")]
Warmups = Annotated[int, typer.Option(min=0, help="requests before it counts")]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="answers of just --output-len tokens")
]
Model = Annotated[str | None, typer.Option(help="as clients call it [default: the first]")]
BaseUrl = Annotated[str, typer.Option(metavar="URL", help="of the server, without the endpoint")]
Goodput = Annotated[list[str] | None, typer.Option(metavar="NAME:MS", help="ttft, tpot or e2el")]
Metrics = Annotated[str, typer.Option(help="of ttft, tpot, itl, e2el")]
Percentiles = Annotated[str, typer.Option(help="beside mean and median")]
Save = Annotated[bool, typer.Option("--save-result", help="write JSON")]
Detailed = Annotated[bool, typer.Option("--save-detailed", help="with values of each request")]
Folder = Annotated[Path, typer.Option(metavar="FOLDER", help="of the JSON")]
FileName = Annotated[str | None, typer.Option(help="of the JSON; else of date and model")]


@dataclass(frozen=True)
class Requests:
    dataset: Name
    path: Path | None
    lengths: Lengths
    vocab_size: int
    sampling: DatasetSampling
    seed: int

    def bench_requests(self, count: int, endpoint: str) -> list[BenchRequest]:
        """Raises StartError, InvalidTraceError."""
        if self.dataset != "random":
            path, output_len = given.required(self.path), self.lengths.output_len
            return file_requests(path, self.dataset, count, output_len, self.sampling)
        if endpoint == CHAT:
            fix = f"use --dataset-name custom or sharegpt, or --endpoint {COMPLETIONS}"
            message = f"--endpoint {CHAT}: takes no token ids, which random prompts are; {fix}"
            raise StartError(message, exit_code=2)
        return random_requests(count, self.lengths, self.vocab_size, str(self.seed), self.sampling)


def serve_command(
    *,
    base_url: BaseUrl = "http://127.0.0.1:8000",
    endpoint: Annotated[str, typer.Option(help=f"{COMPLETIONS} or {CHAT}")] = COMPLETIONS,
    model: Model = None,
    dataset_name: given.DatasetName = "random",
    dataset_path: given.DatasetPath = None,
    input_len: given.InputLen = 1024,
    output_len: given.OutputLen = 128,
    random_prefix_len: Prefix = 0,
    random_range_ratio: Ratio = 0.0,
    vocab_size: Vocabulary = 30_000,
    num_prompts: given.NumPrompts = 100,
    request_rate: Rate = math.inf,
    max_concurrency: Concurrency = None,
    ignore_eos: IgnoreEos = False,
    temperature: given.Temperature = 0.0,
    seed: given.Seed = 0,
    goodput: Goodput = None,
    percentile_metrics: Metrics = "ttft,tpot,itl",
    metric_percentiles: Percentiles = "99",
    num_warmups: Warmups = 1,
    request_timeout: given.RequestTimeout = REQUEST_LIMIT_SECONDS,
    save_result: Save = False,
    save_detailed: Detailed = False,
    result_dir: Folder = Path(),
    result_filename: FileName = None,
    plot: given.Plot = None,
) -> None:
    """Send a load to a server that runs, and print what its clients saw.

    Sends OPENAI_API_KEY where it is set.  Ends with 1 when a request failed.
    """
    with reported(trace=dataset_path or ""):
        lengths = Lengths(input_len, output_len, random_prefix_len, random_range_ratio)
        sampling = DatasetSampling(temperature, ignore_eos)
        requests = Requests(dataset_name, dataset_path, lengths, vocab_size, sampling, seed)
        _check_endpoint(endpoint)
        check_plot(plot)
        # No prompt is sent twice: a prefix cache would answer.
        bench_requests = requests.bench_requests(num_warmups + num_prompts, endpoint)
        names, percents = (
            given.metrics_of(percentile_metrics),
            given.percentiles_of(metric_percentiles),
        )
        reporting = Reporting(names, percents, given.slo_of(goodput or []), save_detailed)
        arrivals = _arrivals(request_rate, num_prompts, seed)
        schedule = Arrivals(arrivals, max_concurrency, request_timeout)
        server = Server(base_url, model, endpoint)
        measured, name = run(
            _measure(server, bench_requests[:num_warmups], bench_requests[num_warmups:], schedule)
        )
        setting = _setting(endpoint, name, num_prompts, request_rate, max_concurrency)
        result = serve_result(measured, setting, reporting)
        typer.echo(serve_text(result, measured.failures))
        if save_result or save_detailed:
            write_result(result_dir / (result_filename or _file_name(result)), result)
        draw(plot, lambda path: draw_latencies(path, _title(setting), measured, reporting.slo))
    if measured.failures:
        raise typer.Exit(1)


async def _measure(
    server: Server,
    first: list[BenchRequest],
    bench_requests: list[BenchRequest],
    schedule: Arrivals,
) -> tuple[LoadResult, str]:
    with shown_progress() as shown:
        shown.begin("warm-up")
        async with connected(server) as target:
            await warm_up(target, first, schedule.limit_seconds)
            shown.begin("answers", len(bench_requests))
            return await run_load(target, bench_requests, schedule, shown.step), target.model


def _check_endpoint(endpoint: str) -> None:
    if endpoint not in (COMPLETIONS, CHAT):
        message = f"--endpoint: is {endpoint}; give {COMPLETIONS} or {CHAT}"
        raise StartError(message, exit_code=2)


def _arrivals(rate: float, count: int, seed: int) -> list[float] | None:
    if math.isnan(rate) or rate <= 0:
        message = f"--request-rate: is {rate:g}; give requests a second above 0, or inf"
        raise StartError(message, exit_code=2)
    return None if math.isinf(rate) else poisson_arrivals(rate, count, str(seed))


def _setting(
    endpoint: str, model: str, count: int, rate: float, most: int | None
) -> dict[str, Any]:
    return {
        "endpoint_type": "openai-chat" if endpoint == CHAT else "openai",
        "backend": "openai",
        "model_id": model,
        "tokenizer_id": None,
        "num_prompts": count,
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": 1.0,
        "max_concurrency": most,
    }


def _title(setting: dict[str, Any]) -> str:
    """
    >>> _title({"model_id": "small", "num_prompts": 9, "request_rate": "inf"})
    'small: 9 requests, at once'
    >>> _title({"model_id": "small", "num_prompts": 9, "request_rate": 2.5})
    'small: 9 requests, 2.5 a second'
    """
    rate = setting["request_rate"]
    when = "at once" if rate == "inf" else f"{rate:g} a second"
    return f"{setting['model_id']}: {setting['num_prompts']} requests, {when}"


def _file_name(result: dict[str, Any]) -> str:
    """As vLLM names its files.

    >>> load = {"backend": "openai", "request_rate": "inf", "max_concurrency": 4}
    >>> _file_name(load | {"model_id": "a/small", "date": "20260101-000000"})
    'openai-infqps-concurrency4-small-20260101-000000.json'
    """
    most = f"-concurrency{result['max_concurrency']}" if result["max_concurrency"] else ""
    model = str(result["model_id"]).rpartition("/")[2]
    return f"{result['backend']}-{result['request_rate']}qps{most}-{model}-{result['date']}.json"
