"""The command line: `python -m jaxoff COMMAND`."""

import json
import sys
from typing import Annotated, Any

try:
    import typer
except ModuleNotFoundError as error:
    if error.name != "typer":
        raise
    sys.exit(
        "error: python -m jaxoff needs typer, which is not installed. pip install 'jaxoff[cli]' adds it."
    )

app = typer.Typer(
    help="Activation offload in JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def main() -> None:
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


@app.command()
def plan(
    function: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION", help="Called without arguments, returns (train step, *its arguments)."
        ),
    ],
    device_gb: Annotated[float, typer.Option(help="Budget of device memory, GB (10^9 bytes).")],
    host_gb: Annotated[float | None, typer.Option(help="Budget of pinned host memory, GB.")] = None,
    device: Annotated[str, typer.Option(help="A shipped profile or the path of a profile.")] = "h200",
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
    from jaxoff._cli.user_function import load_user_function

    try:
        fun, *arguments = load_user_function(function)
        given: dict[str, Any] = {"host_bytes": None if host_gb is None else host_gb * 1e9, "device": device}
        planned = jaxoff.plan(fun, *arguments, device_bytes=device_gb * 1e9, compiled=compiled, **given)
        print(planned.to_json() if as_json else planned)
        if picture is not None:
            jaxoff.frontier(fun, *arguments, **given).draw(picture)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    app()
