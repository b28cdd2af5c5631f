"""The command line: `jaxoff COMMAND`, which is `python -m jaxoff COMMAND`, too."""

import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

try:
    import typer
except ModuleNotFoundError as error:
    if error.name != "typer":
        raise
    sys.exit(
        "error: the command jaxoff needs typer, which is not installed. pip install 'jaxoff[cli]' adds it."
    )

app = typer.Typer(
    help="Activation offload in JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        import jaxoff

        print(f"jaxoff {jaxoff.__version__}")
        raise typer.Exit


@app.callback()
def jaxoff_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Activation offload in JAX."""


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    link: Annotated[bool, typer.Option(help="Measure the link to host memory, on a GPU.")] = True,
) -> None:
    """Print versions, devices, memory, link speed, and the flags with an effect on offload.

    Exit status 1, with the reasons, where offload would be wrong or useless.
    """
    from jaxoff._runtime.doctor import diagnose
    from jaxoff._runtime.environment import collect
    from jaxoff._runtime.table import print_diagnosis

    diagnosis = diagnose(collect(link=link))
    if as_json:
        print(json.dumps(diagnosis.to_dict(), indent=2))
    else:
        print_diagnosis(diagnosis)
    raise typer.Exit(diagnosis.exit_status)


_Function = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FUNCTION",
        help="Called without arguments, returns (train step or loss, *its arguments). Or FILE.py:FUNCTION.",
    ),
]
_Device = Annotated[
    str | None, typer.Option(help="A shipped profile or the path of a profile [the GPU at hand, or h200].")
]


@app.command()
def explain(
    function: _Function,
    device: _Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the values that the backward pass of a loss keeps, where each stays, and problems.

    Exit status 1 with findings, 2 where the function cannot be explained.
    """
    import jaxoff
    from jaxoff._cli.user_errors import report_errors
    from jaxoff._cli.user_function import load_user_function

    with report_errors():
        fun, *arguments = load_user_function(function)
        profile = None if device is None else jaxoff.Device.of(device)
        report = jaxoff.explain(fun, *arguments, device=profile)
        print(json.dumps(report.to_dict(), indent=1) if as_json else report)
    raise typer.Exit(1 if report.findings else 0)


@app.command()
def plan(
    function: _Function,
    device_gb: Annotated[float, typer.Option(help="Budget of device memory, GB (10^9 bytes).")],
    host_gb: Annotated[float | None, typer.Option(help="Budget of pinned host memory, GB.")] = None,
    device: _Device = None,
    compiled: Annotated[
        bool | None,
        typer.Option(
            "--compiled/--estimated", help="Memory by the compiler [where there is one], or estimated."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    picture: Annotated[
        str | None, typer.Option("--frontier", help="Draw time against memory into this file.")
    ] = None,
) -> None:
    """Plan where the values of a train step wait for the backward pass, within a budget of device memory.

    Exit status 2, with the reason, where there is no plan.
    """
    import jaxoff
    from jaxoff._cli.user_errors import report_errors
    from jaxoff._cli.user_function import load_user_function
    from jaxoff._report.standard_output import to_standard_error

    with report_errors():
        fun, *arguments = load_user_function(function)
        given: dict[str, Any] = {"host_bytes": None if host_gb is None else host_gb * 1e9, "device": device}
        with to_standard_error() if as_json else contextlib.nullcontext():
            planned = jaxoff.plan(fun, *arguments, device_bytes=device_gb * 1e9, compiled=compiled, **given)
        print(planned.to_json() if as_json else planned)
        if picture is not None:
            jaxoff.frontier(fun, *arguments, **given).draw(picture)
            print(f"written {picture}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script `jaxoff`; arguments without the program's name, by default the process's own."""
    app(args=None if arguments is None else list(arguments), prog_name="jaxoff")


if __name__ == "__main__":
    main()
