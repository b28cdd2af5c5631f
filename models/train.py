"""Trains a mixture-of-experts language model on the bytes of real text: `python -m models.train`."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console

import jaxoff
from models import data, summary
from models.checkpoints import Checkpoints, check_disk, list_finished, silence_writers
from models.compare import Comparison, accelerator_installed, compare
from models.config import PRESETS
from models.display import Display, make_console
from models.errors import InputError, SaveError
from models.folder import write_json
from models.history import History
from models.job import Job, prepare
from models.loop import DivergedError, Outcome, Stop, Trainer
from models.options import POLICY, Options, parse_overrides
from models.planning import bytes_by_placement, prediction_of, profile_of
from models.processes import Processes, is_first, wait_for_all

BAD_INPUT, DIVERGED, LOST, NOT_WRITTEN = 2, 3, 4, 5

# The base class of typer's usage errors. Typer bundles click and exports only the derived classes.
_UsageError: Any = typer.BadParameter.__bases__[0]


def train(job: Job, console: Console, *, comparison: bool | None) -> int:
    """Runs a job from its start, or its last checkpoint, to its summary.

    Args:
      job: job from `prepare`.
      console: console to print on.
      comparison: whether to measure the policy against its twin first; None measures on an accelerator only.

    Returns:
      The exit status.

    Raises:
      InputError: a checkpoint belongs to another run, all checkpoints are damaged, another run uses the
        folder, or the next checkpoints will not fit on the disk.
    """
    compared = measure_twins(job.options, console, wanted=comparison)
    report = introduce(job, console)
    present = len(list_finished(job.folder.checkpoints))
    check_disk(job.folder.path, job.program.state_bytes, keep=job.options.keep, present=present)
    wait_for_all("the folder was found free")
    with job.folder.lock() if is_first() else contextlib.nullcontext():
        return _train_in_folder(job, console, report, compared)


def _train_in_folder(job: Job, console: Console, report: jaxoff.Report, compared: Comparison | None) -> int:
    """Runs a job in a folder that no other run uses. Returns the exit status."""
    try:
        if is_first():
            job.start_folder()
        with Checkpoints(job.folder.checkpoints, keep=max(1, job.options.keep)) as checkpoints:
            outcome, history, compile_s = run(job, console, checkpoints)
        if outcome.signum is not None:
            return report_signal(job, console, outcome)
        if is_first():
            finish(job, console, report, outcome, history, compile_s, compared)
    except DivergedError as error:
        say_error(f"{error}; training stopped; last good checkpoint: {_describe_newest(job)}")
        return DIVERGED
    except OSError as error:
        where = error.filename or job.folder.path
        why = error if isinstance(error, SaveError) else f"{where} cannot be written: {error.strerror}"
        say_error(
            f"{why}; training stopped; last good checkpoint: {_describe_newest(job)}. Once it can be "
            f"written, go on with: {job.again}"
        )
        return NOT_WRITTEN
    return 0


def _describe_newest(job: Job) -> str:
    newest = job.newest_step
    return "none" if newest is None else str(job.folder.checkpoints.resolve() / str(newest))


def measure_twins(options: Options, console: Console, *, wanted: bool | None) -> Comparison | None:
    if wanted and options.mesh:
        raise InputError("--compare measures one device, got --mesh. Use python -m bench.parallel.")
    if wanted is False or options.mesh or (wanted is None and not accelerator_installed()):
        return None
    console.print(
        "measuring a few steps with the policy and with all on the device, a process each; "
        "--no-compare leaves this out"
    )
    return compare(options, accelerator_only=wanted is None)


def introduce(job: Job, console: Console) -> jaxoff.Report:
    """Prints the model, data, options and the report of residuals, which it returns."""
    o, corpus, program = job.options, job.corpus, job.program
    counts = program.config.param_counts()
    console.print(f"model    {o.preset}: {counts.total:,} parameters, {counts.active:,} active a token")
    console.print(str(counts), markup=False)
    console.print(f"devices  {summary.environment()}")
    if program.experts is not None:
        console.print(f"experts  {program.experts}", markup=False)
    cut = ", cut there" if corpus.truncated else ""
    held = f"{len(corpus.held_out):,} held out, {job.windows[..., 1:].size:,} of them measured"
    console.print(f"data     {corpus.nbytes:,} bytes of {corpus.num_files} files{cut}, {held}")
    for note in corpus.notes:
        say_warning(f"--data: {note}")
    if jax.default_backend() == "cpu":
        console.print("memory   on a CPU nothing moves: the placements below are those of a GPU")
    size = f"{o.batch} x {o.seq} bytes in {o.accum} microbatch{'es' * (o.accum > 1)}"
    console.print(f"run      {o.steps} steps of {size}, into {job.folder.path}", soft_wrap=True, markup=False)
    if program.plan is None:
        console.print(f"policy   {o.policy}\n", markup=False)
    else:
        console.print(f"plan\n{program.plan}\n", markup=False)
    report = program.explain()
    if program.plan is None:
        console.print(report)
        console.print()
    return report


def run(job: Job, console: Console, checkpoints: Checkpoints) -> tuple[Outcome, History, float | None]:
    """Takes the remaining steps. Returns the outcome, the losses, and the seconds of compilation."""
    program = job.program
    restored = checkpoints.restore_newest(program.saved_shapes, job.check_same)
    if restored is None:
        first, state = 0, program.init()
    else:
        first, state = restored.step, program.from_saved(restored.state)
        if restored.damaged:
            found = "; ".join(f"{damage}, now {path}" for path, damage in restored.damaged.items())
            say_warning(f"damaged checkpoints, newest first: {found}; step {first} is sound and is used")
        console.print(f"resumed  after step {first}")
        if is_first() and (before := job.update_folder()) is not None:
            steps = job.options.steps
            console.print(
                f"further  from {before} to {steps} steps, by the learning rates of a run of {steps}"
            )
    with contextlib.ExitStack() as stack:
        losses_file = job.folder.losses_file
        if not is_first():
            losses_file = Path(stack.enter_context(tempfile.TemporaryDirectory()), losses_file.name)
        history = stack.enter_context(History(losses_file, upto=first))
        if history.num_unreadable:
            say_warning(f"lines without losses in {losses_file}, left out: {history.num_unreadable}")
        if first == job.options.steps:
            return Outcome(state, first, None, []), history, None
        start = time.perf_counter()
        step, held_out = program.compiled_step, program.compile_held_out(job.windows)
        compile_s = time.perf_counter() - start
        with Stop() as stop, Display(console, job.options, first, program.work) as display:
            trainer = Trainer(
                options=job.options,
                take_step=lambda state, tokens: step(state, program.microbatches(tokens)),
                held_out=held_out,
                batches=job.batches,
                windows=job.windows,
                checkpoints=checkpoints,
                history=history,
                run=job.run,
                watcher=display,
                stop=stop,
                saved_form=program.saved_form,
            )
            return trainer.train(state, first), history, compile_s


def report_signal(job: Job, console: Console, outcome: Outcome) -> int:
    """Prints the command to continue after a signal; returns the exit status."""
    name = signal.Signals(outcome.signum or 0).name
    said = f"stopped by {name} after step {outcome.step} of {job.options.steps}"
    if job.options.keep:
        console.print(f"{said}; to go on:", markup=False)
        console.print(f"  {job.again}", soft_wrap=True, markup=False)
    else:
        console.print(f"{said}; with --keep 0 nothing was saved to go on from", markup=False)
    return 128 + (outcome.signum or 0)


def finish(
    job: Job,
    console: Console,
    report: jaxoff.Report,
    outcome: Outcome,
    history: History,
    compile_s: float | None,
    compared: Comparison | None,
) -> None:
    """Writes and prints the summary."""
    result = summary.Summary(
        train=history.of("ce"),
        held_out=history.of("held_out"),
        byte_frequency=data.byte_frequency_loss(job.windows),
        **bytes_by_placement(job.program.plan, report),
        work=job.program.work,
        step_ms=outcome.median_step_ms,
        compile_s=compile_s,
        peak_bytes=(jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        comparison=compared,
        predicted=prediction_of(job.program.plan),
    )
    title = (
        f"{job.options.preset}: {job.program.config.param_counts().total:,} parameters, {job.options.policy}"
    )
    summary.draw(job.folder.picture_file, result.train, result.held_out, result.byte_frequency, title)
    devices = {"platform": jax.default_backend(), "kinds": [d.device_kind for d in jax.devices()]}
    content = job.run | {
        "options": dataclasses.asdict(job.options),
        "devices": devices,
        "experts": None if job.program.experts is None else dataclasses.asdict(job.program.experts),
        "settings": summary.settings(),
        "summary": result.to_dict(),
        "report": report.to_dict(),
    }
    write_json(job.folder.summary_file, content)
    console.print()
    result.show(console)
    console.print(f"written  {job.folder.summary_file}, {job.folder.picture_file}", soft_wrap=True)


def _option(field: str, meaning: str) -> Any:
    """An option of the command line. Its help ends with the default, or with those of "tiny" and others."""
    tiny, others = (getattr(Options.of(preset), field) for preset in ("tiny", "nano"))
    return typer.Option(help=f"{meaning} [{tiny if tiny == others else f'tiny: {tiny}, others: {others}'}].")


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def cli(
    context: typer.Context,
    preset: Annotated[str, typer.Option(help=f"Model: one of {', '.join(PRESETS)}.")] = "tiny",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a field of the preset.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help=f"Where residuals live: a preset of jaxoff, or text as in the default [{POLICY}]."),
    ] = None,
    device_gb: Annotated[
        float | None, typer.Option(help="Plan where residuals live, in so many GB of device memory.")
    ] = None,
    host_gb: Annotated[
        float | None, typer.Option(help="And in so many GB of host memory at most [any].")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="What to plan for: a shipped profile or the path of one [h200].")
    ] = None,
    paths: Annotated[
        list[str] | None, typer.Option("--data", metavar="FILE_OR_DIR", help="Text [this Python's library].")
    ] = None,
    out: Annotated[str | None, typer.Option(metavar="FOLDER", help="The run's folder [runs/PRESET].")] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the run in --out from its last checkpoint, a finished run to more --steps.",
        ),
    ] = False,
    steps: Annotated[int | None, _option("steps", "Optimizer steps")] = None,
    batch: Annotated[int | None, _option("batch", "Sequences a step")] = None,
    seq: Annotated[int | None, _option("seq", "Bytes a sequence")] = None,
    accum: Annotated[int | None, _option("accum", "Microbatches a step")] = None,
    lr: Annotated[float | None, _option("lr", "Peak learning rate")] = None,
    warmup: Annotated[int | None, _option("warmup", "Steps to reach it, at most a tenth of --steps")] = None,
    weight_decay: Annotated[float | None, _option("weight_decay", "Of matrices")] = None,
    clip: Annotated[float | None, _option("clip", "Largest global norm of a gradient")] = None,
    seed: Annotated[int | None, _option("seed", "Of weights and input order")] = None,
    eval_every: Annotated[
        int | None,
        _option("eval_every", "Steps between held-out losses, 0: only the last"),
    ] = None,
    eval_batches: Annotated[int | None, _option("eval_batches", "Microbatches in a held-out loss")] = None,
    checkpoint_every: Annotated[
        int | None,
        _option("checkpoint_every", "Steps between checkpoints, 0: only the last"),
    ] = None,
    keep: Annotated[int | None, _option("keep", "How many checkpoints to keep, 0: none is written")] = None,
    mesh: Annotated[
        str | None, typer.Option(help="Devices an axis, of data, fsdp, context, expert, pipe: data=2,pipe=2.")
    ] = None,
    virtual: Annotated[int | None, _option("virtual", "Stages of each pipe rank")] = None,
    capacity: Annotated[
        float | None,
        _option("capacity", "Room for rows to experts' devices, 1: what an even router sends"),
    ] = None,
    coordinator: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Of the first of several processes.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="How many; SLURM and Open MPI tell by themselves.")
    ] = None,
    process: Annotated[int | None, typer.Option(help="Which one this is, from 0.")] = None,
    comparison: Annotated[
        bool | None,
        typer.Option(
            "--compare/--no-compare", help="Measure the policy against its twin on the device [on a GPU]."
        ),
    ] = None,
) -> int:
    """Train a mixture-of-experts language model on bytes of text, with chosen activations in host memory."""
    if policy is not None and device_gb is not None:
        raise InputError("--device-gb plans where residuals live, so it takes no --policy; give one of them.")
    for name, given in (("--device", device), ("--host-gb", host_gb)):
        if given is not None and device_gb is None:
            raise InputError(f"{name} goes with --device-gb; give --device-gb, too.")
    if comparison and device_gb is not None:
        raise InputError(
            "--compare measures before the device is in use, which --device-gb compiles on; leave one out."
        )
    options = Options.of(
        preset,
        overrides=parse_overrides(overrides or []),
        policy=policy,
        data=tuple(paths or ()),
        steps=steps,
        batch=batch,
        seq=seq,
        accum=accum,
        lr=lr,
        warmup=warmup,
        weight_decay=weight_decay,
        clip=clip,
        seed=seed,
        eval_every=eval_every,
        eval_batches=eval_batches,
        checkpoint_every=checkpoint_every,
        keep=keep,
        mesh=mesh,
        virtual=virtual,
        capacity=capacity,
    )
    Processes(coordinator, processes, process).start(os.environ)
    if out == "":
        raise InputError("--out takes a folder, got ''. Leave it out for runs/PRESET.")
    folder = Path("runs", preset) if out is None else Path(out)
    profile = None if device is None else profile_of(device)
    budget: dict[str, Any] = {"device_gb": device_gb, "host_gb": host_gb, "device": profile}
    job = prepare(options, folder, resume=resume, again=context.obj, **budget)
    console = make_console() if is_first() else Console(file=io.StringIO())
    return train(job, console, comparison=False if device_gb is not None else comparison)


def say_error(message: object) -> None:
    """Prints an error as a single line on the standard error."""
    with contextlib.suppress(OSError):
        print("error:", " ".join(str(message).split()), file=sys.stderr)


def say_warning(message: object) -> None:
    """Prints a warning as a single line on the standard error, once in all processes."""
    if is_first():
        print("warning:", " ".join(str(message).split()), file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
      arguments: without the program's name; the process's own by default.

    Returns:
      The exit status: 0, 2 for bad input, 3 for a loss that is not finite, 4 after another process was
      lost, 5 for files that cannot be written, 128 + n after signal n.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    again = shlex.join(
        ["python", "-m", "models.train", *(a for a in arguments if a != "--resume"), "--resume"]
    )
    try:
        return app(args=arguments, prog_name="python -m models.train", standalone_mode=False, obj=again)
    except InputError as error:
        say_error(error)
        return BAD_INPUT
    except _UsageError as error:
        say_error(f"{error.format_message().rstrip('.')}. --help shows all options.")
        return BAD_INPUT
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        say_error(f"a step failed, as it does when another process ends; --resume goes on: {error}")
        sys.stderr.flush()
        os._exit(LOST)  # an orderly exit would wait for the other processes
    except OSError as error:  # such as the log, on a full disk
        say_error(f"{error.filename or 'the output'} cannot be read or written: {error.strerror}")
        return NOT_WRITTEN
    except typer.Abort:
        say_error("interrupted; checkpoints written before are whole")
        return 128 + signal.SIGINT


if __name__ == "__main__":
    silence_writers()
    sys.exit(main())
