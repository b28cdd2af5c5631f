"""The command line: `python -m jaxoff COMMAND`."""

import json
from typing import Annotated

import typer

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
    """Print what offload finds here: versions, devices, memory, link speed, flags that help or harm it.

    Exit status 1, with the reasons, where offload would be wrong or useless.
    """
    from jaxoff._doctor_table import print_diagnosis
    from jaxoff._environment import collect
    from jaxoff.doctor import diagnose

    diagnosis = diagnose(collect(link=link))
    if as_json:
        print(json.dumps(diagnosis.to_dict(), indent=2))
    else:
        print_diagnosis(diagnosis)
    raise typer.Exit(diagnosis.exit_status)


if __name__ == "__main__":
    app()
