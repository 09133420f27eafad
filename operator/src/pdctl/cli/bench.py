"""`pdctl bench latency`, `throughput` and `autotune`, on a cluster started for the measurement."""

from collections.abc import Iterator
from typing import Annotated

import typer

from pdctl.bench.autotune import Tuning, autotune, result_text, start_sizes, trial_rows
from pdctl.bench.datasets import DatasetSampling, Lengths, file_requests, random_requests
from pdctl.bench.load import REQUEST_LIMIT_SECONDS, Arrivals, BenchRequest, LoadResult, run_load
from pdctl.bench.measure import batch_latencies, require_complete, started, vocab_size, warm_up
from pdctl.bench.plot import draw_batches, draw_latencies, draw_trials
from pdctl.bench.result import latency_result, throughput_result
from pdctl.bench.tuning import LatencyTargets, SearchResult
from pdctl.cli import bench_common as given
from pdctl.cli.bench_common import check_plot, draw, run, write_result
from pdctl.cli.bench_serve import serve_command
from pdctl.cli.options import File, reported
from pdctl.cli.progress import shown_progress
from pdctl.cli.table import table

app = typer.Typer(
    help="Measure a server, or a cluster that is started for it; find its sizes.",
    no_args_is_help=True,
)
app.command("serve")(serve_command)


@app.command("latency")
def latency_command(
    file: File,
    *,
    input_len: given.InputLen = 32,
    output_len: given.OutputLen = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="requests at once")] = 8,
    num_iters_warmup: Annotated[int, typer.Option(min=0, help="batches before it counts")] = 2,
    num_iters: Annotated[int, typer.Option(min=1, help="batches that count")] = 10,
    temperature: given.Temperature = 0.0,
    seed: given.Seed = 0,
    request_timeout: given.RequestTimeout = REQUEST_LIMIT_SECONDS,
    output_json: given.OutputJson = None,
    plot: given.Plot = None,
    model_path: given.ModelPath = None,
) -> None:
    """Time whole batches on a cluster that is started for it: from the first request sent to the
    last token.
    """
    with reported(file):
        check_plot(plot)
        lengths = Lengths(input_len, output_len)
        local = given.load_measured(file, model_path, lengths).local
        vocab, sampling = vocab_size(local.model), DatasetSampling(temperature)

        num_batches = num_iters_warmup + num_iters

        def batches() -> Iterator[list[BenchRequest]]:
            for number in range(num_batches):  # other prompts in each: no prefix cache answers
                yield random_requests(batch_size, lengths, vocab, f"{seed} {number}", sampling)

        schedule = Arrivals(limit_seconds=request_timeout)

        async def measure() -> list[float]:
            found = []
            with shown_progress() as shown:
                shown.begin("the cluster starts")
                async with started(local) as target:
                    shown.begin("batches", num_batches)
                    async for seconds in batch_latencies(target, batches(), schedule):
                        found.append(seconds)
                        shown.step()
            return found[num_iters_warmup:]

        result = latency_result(run(measure()))
        typer.echo(f"Avg latency: {result['avg_latency']:.4f} seconds")
        for percent, seconds in result["percentiles"].items():
            typer.echo(f"{percent}% percentile latency: {seconds:.4f} seconds")
        write_result(output_json, result)
        title = f"{file.name}: batches of {batch_size}, {input_len} tokens in, {output_len} out"
        draw(plot, lambda path: draw_batches(path, title, result["latencies"]))


@app.command("throughput")
def throughput_command(
    file: File,
    *,
    input_len: given.InputLen = 256,
    output_len: given.OutputLen = 64,
    num_prompts: given.NumPrompts = 100,
    dataset_name: given.DatasetName = "random",
    dataset_path: given.DatasetPath = None,
    temperature: given.Temperature = 0.0,
    seed: given.Seed = 0,
    request_timeout: given.RequestTimeout = REQUEST_LIMIT_SECONDS,
    output_json: given.OutputJson = None,
    plot: given.Plot = None,
    model_path: given.ModelPath = None,
) -> None:
    """Send all requests at once to a cluster that is started for it, and time the whole."""
    with reported(file, dataset_path or ""):
        check_plot(plot)
        is_random = dataset_name == "random"
        lengths = Lengths(input_len, output_len)
        local = given.load_measured(file, model_path, lengths if is_random else None).local
        vocab = vocab_size(local.model)
        sampling = DatasetSampling(temperature, ignore_eos=is_random)
        if is_random:
            requests = random_requests(num_prompts, lengths, vocab, str(seed), sampling)
        else:
            requests = file_requests(
                given.required(dataset_path), dataset_name, num_prompts, output_len, sampling
            )
        first = random_requests(2, Lengths(16, 4), vocab, f"{seed} warm-up", DatasetSampling())

        async def measure() -> LoadResult:
            with shown_progress() as shown:
                shown.begin("the cluster starts")
                async with started(local) as target:
                    await warm_up(target, first, request_timeout)
                    shown.begin("answers", len(requests))
                    schedule = Arrivals(limit_seconds=request_timeout)
                    return require_complete(await run_load(target, requests, schedule, shown.step))

        whole = run(measure())
        result = throughput_result(whole)
        typer.echo(
            f"Throughput: {result['requests_per_second']:.2f} requests/s, "
            f"{result['tokens_per_second']:.2f} total tokens/s, "
            f"{result['output_tokens_per_second']:.2f} output tokens/s"
        )
        write_result(output_json, result)
        title = f"{file.name}: {num_prompts} requests at once"
        draw(plot, lambda path: draw_latencies(path, title, whole))


@app.command("autotune")
def autotune_command(
    file: File,
    *,
    ttft_p90: Annotated[
        float, typer.Option(min=1.0, metavar="MS", help="most time to first token")
    ],
    itl_p99: Annotated[float, typer.Option(min=1.0, metavar="MS", help="longest gap of tokens")],
    input_len: given.InputLen = 256,
    output_len: given.OutputLen = 64,
    num_prompts: given.NumPrompts = 32,
    request_rate: Annotated[
        float, typer.Option(min=0.05, max=10_000.0, help="of the first trial, a second")
    ] = 1.0,
    max_trials: Annotated[int, typer.Option(min=1, max=200, help="loads, at most")] = 16,
    seed: given.Seed = 0,
    request_timeout: given.RequestTimeout = REQUEST_LIMIT_SECONDS,
    plot: given.Plot = None,
    model_path: given.ModelPath = None,
) -> None:
    """Find maxBatchedTokens, maxSequences and scheduler that hold the highest request rate within
    two limits.

    Each trial is a real cluster of this machine under Poisson arrivals.
    Prints a table of the trials to stderr, and the section to paste; ends with 1 where no trial
    was inside the limits.
    """
    with reported(file):
        check_plot(plot)
        lengths, limits = Lengths(input_len, output_len), LatencyTargets(ttft_p90, itl_p99)
        found_file = given.load_measured(file, model_path, lengths)
        tuning = Tuning(
            found_file.local,
            limits,
            lengths,
            num_prompts,
            request_rate,
            max_trials,
            vocab_size(found_file.local.model),
            str(seed),
            request_timeout,
        )
        sizes = start_sizes(found_file.cluster)
        with shown_progress() as shown:
            shown.begin("answers, at most", max_trials * num_prompts)
            found: SearchResult = run(
                autotune(tuning, sizes, lambda line: typer.echo(line, err=True), shown.step)
            )
        header, *rows = trial_rows(found, limits)
        typer.echo("\n".join(table(header, rows, right=range(4))), err=True)
        typer.echo(result_text(found, limits), err=found.best is None)
        lengths_text = f"{input_len} tokens in, {output_len} out"
        title = f"{file.name}: trials of {num_prompts} requests, {lengths_text}"
        draw(plot, lambda path: draw_trials(path, title, found, limits))
    if found.best is None:
        raise typer.Exit(1)
