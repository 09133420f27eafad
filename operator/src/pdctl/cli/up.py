"""`pdctl up` and `pdctl init`: `up MODEL` is `init MODEL` and then `up FILE`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from pdcluster_api.errors import StartError
from pdcluster_schema.load import parse
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.stock_engine import SGLANG, VLLM
from pdctl.cli.options import cannot_write, load_file, reported
from pdctl.local.machine import free_port
from pdctl.local.model_file import MODEL, ModelOptions, document_of, file_text, is_cluster_file
from pdctl.local.run_directory import (
    LOOPBACK,
    RunDirectory,
    default_state_dir,
    replace_file,
    state_unwritable,
)
from pdctl.local.screen import make_screen
from pdctl.local.up import UpRequest, prepare, read_key, up

StateDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="where runs keep state and logs [default: ~/.local/state/pdcluster]"
    ),
]
Name = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="of a MODEL's cluster; else by the name of the model"),
]
Prefill = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="prefill workers of a MODEL; without all three sizes one prefill and one decode "
        "worker, or one mixed where the machine has a single core, or GPU of the type",
    ),
]
Decode = Annotated[int | None, typer.Option(min=1, metavar="N", help="decode workers of a MODEL")]
Mixed = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="workers of a MODEL that do both, instead")
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16"] | None,
    typer.Option(help="of a MODEL's weights and KV; else auto"),
]
Accelerator = Annotated[
    str | None,
    typer.Option("--gpu", metavar="TYPE", help="GPU of a MODEL's workers, like H200; else cpu"),
]
Engine = Annotated[
    Literal["pdcluster", "vllm", "sglang"] | None,
    typer.Option(help="engine of a MODEL's workers; else pdcluster"),
]
Port = Annotated[
    int | None,
    typer.Option(
        envvar="PDCLUSTER_PORT",
        min=0,
        max=65535,
        help="where to serve, over spec.service.port; 0 = any free port",
    ),
]
Host = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS",
        help="where to serve, an address of this machine; 0.0.0.0 = all. Beyond loopback it "
        "needs a key",
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="PDCLUSTER_API_KEY",
        metavar="KEY",
        help="that clients have to send; else none is asked for. Other users of this machine see "
        "an option in the list of processes: give it as the variable, or by --api-key-file",
    ),
]
ApiKeyFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="that holds the key, over --api-key")
]
ModelPath = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="the folder, or GGUF file, of a file's model; without it spec.model.path where that "
        "is here, else ~/.cache/pdcluster/NAME by spec.model.name, else that of the hub",
    ),
]
VllmProgram = Annotated[
    Path | None,
    typer.Option(
        envvar="PDCLUSTER_VLLM",
        metavar="PROGRAM",
        help="the vllm program of engine.type: vllm, over that of engine.command; without "
        "either vllm on the PATH",
    ),
]
SglangPython = Annotated[
    Path | None,
    typer.Option(
        envvar="PDCLUSTER_SGLANG",
        metavar="PROGRAM",
        help="the Python of SGLang's environment, for engine.type: sglang, over the program of "
        "engine.command; without either python3 on the PATH",
    ),
]
Observe = Annotated[
    bool,
    typer.Option(
        "--observe",
        help="run Prometheus (Debian's package prometheus) beside the workers, with the alerts "
        "of the chart",
    ),
]
Progress = Annotated[
    bool, typer.Option(help="a live table; without it a line for each change, for pipes and CI")
]


def init_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL, show_default=False)],
    *,
    name: Name = None,
    prefill: Prefill = None,
    decode: Decode = None,
    mixed: Mixed = None,
    dtype: Dtype = None,
    gpu: Accelerator = None,
    engine: Engine = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="a new file; else it is printed"),
    ] = None,
) -> None:
    """Write the PDCluster file of a model, the one that `pdctl up MODEL` runs."""
    with reported():
        document = document_of(
            model, ModelOptions(name, prefill, decode, mixed, dtype, gpu, engine)
        )
        parse(document)
        text = file_text(model, document)
        if output is None:
            typer.echo(text, nl=False)
            return
        try:
            with output.open("x") as file:
                file.write(text)
        except FileExistsError as e:
            message = f"{output}: is there already; give another path, or remove it"
            raise StartError(message, exit_code=2) from e
        except OSError as e:
            raise cannot_write(output, e) from e


def up_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help=f"a PDCluster file in YAML, {MODEL}", show_default=False
        ),
    ],
    *,
    name: Name = None,
    prefill: Prefill = None,
    decode: Decode = None,
    mixed: Mixed = None,
    dtype: Dtype = None,
    gpu: Accelerator = None,
    engine: Engine = None,
    port: Port = None,
    host: Host = LOOPBACK,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    model_path: ModelPath = None,
    vllm: VllmProgram = None,
    sglang: SglangPython = None,
    observe: Observe = False,
    progress: Progress = True,
    state_dir: StateDir = None,
) -> None:
    """Run a model, or a PDCluster file, as processes of this machine until Ctrl-C."""
    options = ModelOptions(name, prefill, decode, mixed, dtype, gpu, engine)
    state = state_dir or default_state_dir()
    with reported():
        cluster, text = _cluster(model, options)
        key = read_key(api_key_file) if api_key_file is not None else api_key
    file = Path(model) if text is None else state / cluster.metadata.name / "cluster.yaml"
    given = {VLLM: vllm, SGLANG: sglang}
    request = UpRequest(
        source=file,
        cluster=cluster,
        port=(cluster.spec.service.port if port is None else port) or free_port(),
        state_dir=state,
        host=host,
        api_key=key or None,
        model_path=model_path,
        programs={name: path for name, path in given.items() if path is not None},
        observe=observe,
    )
    # Held already: a running pdctl watches its file, and a download or a conversion can be long.
    taken = RunDirectory.name_taken(state, cluster.metadata.name, request.port)
    with reported(), taken, reported(file):
        if text is not None:
            _write(file, text)
        prepared = prepare(request)
        with make_screen(progress=progress) as screen:
            up(prepared, screen)


def _write(file: Path, text: str) -> None:
    try:
        replace_file(file, text)
    except OSError as e:
        raise state_unwritable(file, e) from e


def _cluster(model: str, options: ModelOptions) -> tuple[PDCluster, str | None]:
    """The object, and the text of the file of a model; None = MODEL is a file.

    Raises StartError, InvalidObjectError.
    """
    if is_cluster_file(model):
        if given := ", ".join(options.given()):
            raise StartError(f"{given}: for a MODEL; edit the file {model} instead", exit_code=2)
        return load_file(Path(model)), None
    document = document_of(model, options)
    return parse(document), file_text(model, document)
