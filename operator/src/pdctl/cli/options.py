"""Options, input files and errors (on stderr, with exit codes) that commands share."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from pdcluster_api.errors import InvalidTraceError, StartError
from pdcluster_schema.faults import Fault, InvalidObjectError
from pdcluster_schema.load import load
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.text import one_line
from pdctl.local.model_memory import check_memory, local_folder

LoadedT = TypeVar("LoadedT")


def load_file(file: Path) -> PDCluster:
    """Exits with 2 and a line for each fault where the file is not valid."""
    with reported(file):
        return load(file)


def load_files(
    files: Iterable[Path], load: Callable[[Path], LoadedT]
) -> Iterator[tuple[Path, LoadedT]]:
    """The valid ones as they are read.  Exits with 2 after the last where one is not valid."""
    faulty = None
    for file in files:
        try:
            with reported(file):
                cluster = load(file)
        except typer.Exit as e:
            faulty = e
        else:
            yield file, cluster
    if faulty is not None:
        raise faulty


def fitting(cluster: PDCluster, file: Path) -> PDCluster:
    """The object, and what the model's folder says of memory where it is on this machine: a fault
    of the file, or a warning on stderr.
    """
    for warning in check_memory(cluster, local_folder(cluster, file)):
        typer.echo(f"warning: {file}: {warning}", err=True)
    return cluster


@contextmanager
def reported(file: Path | str = "", trace: Path | str = "") -> Iterator[None]:
    """Print errors and exit with their code.

    file, trace: what faults of an object, and of a trace, are found in
    """
    try:
        yield
    except InvalidObjectError as e:
        raise refused(file, e.faults) from e
    except InvalidTraceError as e:
        raise refused(trace, e.faults) from e
    except StartError as e:
        typer.echo(f"error: {e}", err=True)
        raise typer.Exit(e.exit_code) from e
    except OSError as e:
        if e.filename is None:  # no path that a user gave
            raise
        fix = "correct the path, or give this user the right to it"
        typer.echo(f"error: {one_line(e.filename)}: {e.strerror}; {fix}", err=True)
        raise typer.Exit(2) from e


def cannot_write(path: Path, error: OSError, fix: str = "give another path") -> StartError:
    return StartError(f"{path}: cannot be written: {error.strerror or error}; {fix}", exit_code=1)


def refused(file: Path | str, faults: Iterable[Fault]) -> typer.Exit:
    for fault in faults:
        line = "" if fault.line is None else f"{fault.line}:"
        typer.echo(f"error: {f'{file}:{line} ' if file else ''}{fault}", err=True)
    return typer.Exit(2)


File = Annotated[
    Path, typer.Argument(metavar="FILE", help="a PDCluster object in YAML", show_default=False)
]
Files = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE",
        help="a PDCluster object in YAML each; - is stdin",
        show_default=False,
    ),
]
Namespace = Annotated[
    str | None,
    typer.Option(
        "--namespace", "-n", metavar="NAMESPACE", help="of the cluster; else that of the context"
    ),
]
Context = Annotated[
    str | None, typer.Option(metavar="CONTEXT", help="of the kubeconfig; else its current one")
]
Kubeconfig = Annotated[
    Path | None, typer.Option(metavar="FILE", help="else KUBECONFIG, or ~/.kube/config")
]
StateDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="where runs of pdctl up keep state")
]


def named_namespace(cluster: PDCluster, option: str | None) -> str | None:
    """Namespace of the file or the option.  Raises StartError (exit code 2) where they differ."""
    named = cluster.metadata.model_fields_set
    given = cluster.metadata.namespace if "namespace" in named else None
    if given is not None and option not in (None, given):
        message = (
            f"the file's metadata.namespace is {given}, and --namespace is {option}; leave one "
            "out, or make them equal"
        )
        raise StartError(message, exit_code=2)
    return option or given


def required_file(help_text: str) -> Any:
    """The option --file of a command that needs one."""
    return typer.Option("--file", "-f", metavar="FILE", help=help_text, show_default=False)


STDIN = Path("-")


def read_text(path: Path) -> str:
    """Raises StartError (exit code 2) when it cannot be read."""
    try:
        return sys.stdin.read() if path == STDIN else path.read_text(encoding="utf-8")
    except OSError as e:
        raise StartError(
            f"{path}: cannot be read: {e.strerror or e}; give the path of a file, or - for stdin",
            exit_code=2,
        ) from e
    except UnicodeDecodeError as e:
        raise StartError(f"{path}: is not UTF-8 text; save it as UTF-8", exit_code=2) from e
