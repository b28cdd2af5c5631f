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
import numpy as np
import typer
from rich.console import Console

import jaxoff
from models import data, policy_text, summary
from models.checkpoints import Checkpoints, check_disk
from models.compare import Comparison, accelerator_installed, compare
from models.display import Display, make_console
from models.errors import InputError
from models.folder import RunFolder, check_same_run, write_json
from models.history import History
from models.loop import DivergedError, Outcome, Stop, Trainer
from models.options import POLICY, Options, parse_overrides
from models.parallel import ParallelProgram
from models.planning import bytes_by_placement, prediction_of, profile_of
from models.processes import Processes, is_first, wait_for_all
from models.program import Program

BAD_INPUT, DIVERGED, LOST = 2, 3, 4

# The base class of typer's usage errors. Typer bundles click and exports only the derived classes.
_UsageError: Any = typer.BadParameter.__bases__[0]


@dataclasses.dataclass(frozen=True)
class Job:
    """The checked inputs of a run, before anything is written or put on a device.

    Attributes:
      options, folder, resume: the user's options.
      corpus, batches, windows: the data, its batches to train on and its held-out windows (K, B, S + 1).
      program: computations of the run.
      again: command to continue the run.
    """

    options: Options
    folder: RunFolder
    resume: bool
    corpus: data.Corpus
    batches: data.Batches
    windows: np.ndarray
    program: Program
    again: str

    @property
    def run(self) -> dict[str, Any]:
        """The description of the run, JSON-ready; a checkpoint with another "identity" is not resumed."""
        return {
            "identity": self.options.identity(self.corpus),
            "policy": self.options.policy,
            "versions": summary.versions(),
        }

    def check_same(self, where: Path, saved: dict[str, Any]) -> None:
        """Refuses the files of another run."""
        check_same_run(where, saved["identity"], self.run["identity"])


def prepare(
    options: Options,
    out: Path,
    *,
    resume: bool,
    again: str,
    device_gb: float | None = None,
    device: jaxoff.Device | None = None,
) -> Job:
    """Reads the data, checks all inputs, and plans the step if a budget of memory is given.

    Raises:
      InputError: an input is wrong or contradicts another.
    """
    folder = RunFolder(out)
    folder.check(resume=resume)
    if options.config().vocab_size < data.VOCABULARY:
        raise InputError(
            f"A model of bytes needs vocab_size >= {data.VOCABULARY}, got {options.config().vocab_size}."
        )
    corpus = data.load(options.data)
    batches = data.Batches(corpus.train, options.batch, options.seq, options.seed)
    kind = Program if options.layout is None else ParallelProgram
    if device_gb is None:
        program = kind(options, policy_text.parse(options.policy))
    else:
        program = kind(options, None, device_gb * 1e9, device)
        try:
            program.plan  # noqa: B018  # raises where nothing fits
        except ValueError as error:
            raise InputError(f"--device-gb {device_gb:g}: {error}") from None
    windows = program.held_out_windows(corpus.held_out)
    job = Job(options, folder, resume, corpus, batches, windows, program, again)
    if resume:
        job.check_same(folder.run_file, folder.saved_run())
    return job


def train(job: Job, console: Console, *, comparison: bool | None) -> int:
    """Runs a job from its start, or its last checkpoint, to its summary.

    Args:
      job: job from `prepare`.
      console: console to print on.
      comparison: whether to measure the policy against its twin first; None measures on an accelerator only.

    Returns:
      The exit status.

    Raises:
      InputError: a checkpoint belongs to another run, or the next checkpoints will not fit on the disk.
    """
    compared = measure_twins(job.options, console, wanted=comparison)
    report = introduce(job, console)
    present = sum(p.name.isdigit() for p in job.folder.checkpoints.glob("*"))
    check_disk(job.folder.path, job.program.state_bytes, keep=job.options.keep, present=present)
    wait_for_all("the folder was found free")
    if not job.resume and is_first():
        job.folder.write_run(job.run)
    with Checkpoints(job.folder.checkpoints, keep=max(1, job.options.keep)) as checkpoints:
        try:
            outcome, history, compile_s = run(job, console, checkpoints)
        except DivergedError as error:
            good = "none" if checkpoints.latest is None else checkpoints.path(checkpoints.latest)
            say_error(f"{error}; training stopped; last good checkpoint: {good}")
            return DIVERGED
    if outcome.signum is not None:
        return report_signal(job, console, outcome)
    if not is_first():
        return 0
    finish(job, console, report, outcome, history, compile_s, compared)
    return 0


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
    program, first = job.program, checkpoints.latest or 0
    if checkpoints.latest is None:
        state = program.init()
    else:
        job.check_same(checkpoints.path(first), checkpoints.run(first))
        state = program.from_saved(checkpoints.restore(first, program.saved_shapes))
        console.print(f"resumed  after step {first}")
    with contextlib.ExitStack() as stack:
        losses_file = job.folder.losses_file
        if not is_first():
            losses_file = Path(stack.enter_context(tempfile.TemporaryDirectory()), losses_file.name)
        history = stack.enter_context(History(losses_file, upto=first))
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


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def cli(
    context: typer.Context,
    preset: Annotated[str, typer.Option(help="Model: a preset of models.Config.")] = "tiny",
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
    device: Annotated[
        str | None, typer.Option(help="What to plan for: a shipped profile or the path of one [h200].")
    ] = None,
    paths: Annotated[
        list[str] | None, typer.Option("--data", metavar="FILE_OR_DIR", help="Text [this Python's library].")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder [runs/PRESET].")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out from its last checkpoint.")
    ] = False,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences a step.")] = None,
    seq: Annotated[int | None, typer.Option(help="Bytes a sequence.")] = None,
    accum: Annotated[int | None, typer.Option(help="Microbatches a step.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    warmup: Annotated[int | None, typer.Option(help="Steps to reach it.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Of matrices.")] = None,
    clip: Annotated[float | None, typer.Option(help="Largest global norm of a gradient.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights and input order.")] = None,
    eval_every: Annotated[
        int | None, typer.Option(help="Steps between held-out losses, 0: only the last.")
    ] = None,
    eval_batches: Annotated[int | None, typer.Option(help="Microbatches in a held-out loss.")] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints, 0: only the last.")
    ] = None,
    keep: Annotated[
        int | None, typer.Option(help="How many checkpoints to keep, 0: none is written.")
    ] = None,
    mesh: Annotated[
        str | None, typer.Option(help="Devices an axis, of data, fsdp, expert, pipe: data=2,pipe=2.")
    ] = None,
    virtual: Annotated[int | None, typer.Option(help="Stages of each pipe rank.")] = None,
    capacity: Annotated[
        float | None, typer.Option(help="Room for rows to experts' devices, 1: what an even router sends.")
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
    if device is not None and device_gb is None:
        raise InputError("--device is what --device-gb plans for; give --device-gb, too.")
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
    folder = out or Path("runs", preset)
    profile = None if device is None else profile_of(device)
    job = prepare(options, folder, resume=resume, again=context.obj, device_gb=device_gb, device=profile)
    console = make_console() if is_first() else Console(file=io.StringIO())
    return train(job, console, comparison=False if device_gb is not None else comparison)


def say_error(message: object) -> None:
    """Prints an error as a single line on the standard error."""
    print("error:", " ".join(str(message).split()), file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
      arguments: without the program's name; the process's own by default.

    Returns:
      The exit status: 0, 2 for bad input, 3 for a loss that is not finite, 4 after another process was
      lost, 128 + n after signal n.
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
        say_error(f"{error.format_message()} --help shows all options.")
        return BAD_INPUT
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        say_error(f"a step failed, as it does when another process ends; --resume goes on: {error}")
        sys.stderr.flush()
        os._exit(LOST)  # an orderly exit would wait for the other processes
    except typer.Abort:
        say_error("interrupted; checkpoints written before are whole")
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
