"""`pdctl autoscale replay`: a trace of load through the autoscaler, on a simulated cluster."""

from pathlib import Path
from typing import Annotated

import typer

from pdctl.cli.options import load_file, reported, required_file
from pdctl.cli.simulate import OutFolder, RolloutAt, SimulateOptions, Steps, run_simulation
from pdctl.simulation.speeds import Speeds

autoscale = typer.Typer(help="Try the autoscaler without a cluster.", no_args_is_help=True)


@autoscale.callback()
def _group() -> None:
    """Keeps `replay` a subcommand while it is the only one."""


@autoscale.command("replay")
def replay_command(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE", help="CSV: seconds,requests_per_second,input_tokens,output_tokens"
        ),
    ],
    file: Annotated[Path, required_file("a PDCluster with a section autoscale")],
    *,
    out: OutFolder = None,
    plot: Annotated[
        bool, typer.Option(help="the picture; it needs matplotlib (the extra `plot`)")
    ] = True,
    every_interval: Annotated[
        bool,
        typer.Option("--every-interval", help="repeat none of a steady load, which takes longer"),
    ] = False,
    steps: Steps = None,
    prefill_tokens_per_second: Annotated[
        float, typer.Option(help="of a busy prefill worker, without --steps")
    ] = Speeds.prefill_tokens_per_second,
    step_seconds: Annotated[
        float, typer.Option(help="of a decode step with one stream, without --steps")
    ] = Speeds.step_seconds,
    stream_seconds: Annotated[
        float, typer.Option(help="that each further stream adds to a step, without --steps")
    ] = Speeds.stream_seconds,
    kv_tokens: Annotated[
        int, typer.Option(help="that a worker's KV cache holds, without --steps")
    ] = Speeds.kv_tokens,
    start_seconds: Annotated[float, typer.Option(help="until a new worker is ready")] = 120.0,
    rollout_at: RolloutAt = None,
) -> None:
    """Run a trace of load through the autoscaler of a file, whatever its mode is: `pdctl simulate`
    by a few speeds, with the intervals of a steady load repeated.
    """
    with reported(file, trace):
        speeds = Speeds(prefill_tokens_per_second, step_seconds, stream_seconds, kv_tokens)
        options = SimulateOptions(
            load_file(file),
            trace,
            True,
            start_seconds,
            out,
            plot,
            steps=tuple(steps or ()),
            speeds=speeds,
            repeats=not every_interval,
            rollout_at=rollout_at,
        )
        typer.echo("\n".join(run_simulation(options)))
