"""Judges the settings of XLA and JAX: whether each helps or harms offload, and by how much.

Percentages are of a training step on H200s, with jaxlib 0.11.2 (bench/LOG.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Literal

from jaxoff._runtime.environment import Environment
from jaxoff._runtime.flags import (
    COMMAND_BUFFER,
    PIPELINED_HOST_COPIES,
    PIPELINING,
    PIPELINING_LEVELS,
    SCHEDULING_MODE,
    is_false,
    is_true,
    parse_captured_commands,
)

Verdict = Literal["helps", "harms", "neutral"]
Source = Literal["XLA_FLAGS", "jax.config", "environment"]
Judgement = tuple[Verdict, str]


@dataclasses.dataclass(frozen=True)
class JudgedSetting:
    """A setting, its value in an environment, and its effect on offload.

    Attributes:
      name: of the flag, option or environment variable.
      source: where a user sets a value.
      value: as given; None where unset.
      verdict: "helps", "harms" or "neutral".
      why: a sentence, with the measured cost where there is a measurement.
    """

    name: str
    source: Source
    value: str | None
    verdict: Verdict
    why: str


def judge(environment: Environment) -> tuple[JudgedSetting, ...]:
    """Judges every setting with an effect on offload."""
    return tuple(_judge_one(environment, *rule) for rule in _RULES)


def _judge_one(environment: Environment, source: Source, names: tuple[str, ...], rule: Rule) -> JudgedSetting:
    """Judges the first of a setting's names with a value."""
    values = {
        "XLA_FLAGS": environment.xla_flags,
        "jax.config": environment.config,
        "environment": environment.variables,
    }[source]
    name = next((n for n in names if n in values), names[0])
    value = values.get(name)
    verdict, why = rule(value, environment)
    return JudgedSetting(name, source, value, verdict, why)


Rule = Callable[[str | None, Environment], Judgement]


def _judge_scheduling_mode(value: str | None, environment: Environment) -> Judgement:
    mode = (value or "LHS").upper()
    captured = parse_captured_commands(environment.xla_flags.get(COMMAND_BUFFER))
    if mode == "CONCURRENT" and not captured:
        return (
            "harms",
            f"CONCURRENT orders CUDA graphs, and {COMMAND_BUFFER} captures none: copies stay in line.",
        )
    if mode == "CONCURRENT" and len(environment.devices) > 1 and "COLLECTIVES" not in captured:
        return "harms", (
            "On several GPUs CONCURRENT without captured collectives cost +17% of a step. Add COLLECTIVES to "
            f"{COMMAND_BUFFER}."
        )
    if mode == "CONCURRENT":
        return "helps", (
            "Copies of scanned layers run beside the kernels (+0% of a step), and a long program reuses less "
            "memory. Leave it unset for jaxoff.jit, which sets it for the programs that it orders."
        )
    if mode == "LHS":
        return "neutral", (
            "Copies captured in a CUDA graph wait in line with the kernels (+23% of a step, scanned layers). "
            "jaxoff.jit in place of jax.jit overlaps them."
        )
    if mode == "CONCURRENT_REGIONS":
        return (
            "harms",
            "Copies did not overlap (+18% of a step), and captured collectives fail with INTERNAL.",
        )
    return "harms", f"Under {mode} the commands of a CUDA graph, copies among them, wait for one another."


def _judge_command_buffer(value: str | None, environment: Environment) -> Judgement:
    captured = parse_captured_commands(value)
    if not captured:
        return "neutral", (
            "Without CUDA graphs copies overlap in part (+12 to 17% of a step with scanned layers; by "
            "default +23%, under jaxoff.jit +0%)."
        )
    if len(environment.devices) > 1 and "COLLECTIVES" not in captured:
        return (
            "neutral",
            "Collectives are not captured: jaxoff.jit captures them where it schedules CONCURRENT.",
        )
    if "COLLECTIVES" in captured:
        return (
            "helps",
            "With collectives captured, CONCURRENT graphs overlap copies on several GPUs (+0.8% on two).",
        )
    return "neutral", f"Captured: {', '.join(sorted(captured))}."


def _judge_pipelined_host_copies(value: str | None, _: Environment) -> Judgement:
    if is_true(value):
        return (
            "harms",
            "This pass has a history of wrong results, and CONCURRENT graphs are faster (+8% against +1%).",
        )
    return "neutral", "Off: right."


def _judge_optimization_level(value: str | None, _: Environment) -> Judgement:
    if value in PIPELINING_LEVELS:
        return "harms", f"{value} {PIPELINING}"
    return "neutral", "No pipelining passes switched on: right."


def _judge_collective_overlap(value: str | None, _: Environment) -> Judgement:
    if value is not None and value.strip().isdigit() and int(value) > 1:
        return (
            "harms",
            "Above 1, a collective can race a reloaded residual: wrong gradients now and then. Set it to 1.",
        )
    return "neutral", "One collective at a time: right."


def _judge_latency_hiding(value: str | None, _: Environment) -> Judgement:
    if is_true(value):
        return (
            "helps",
            "Copies are scheduled early, also in programs that XLA would not choose this scheduler for.",
        )
    state = "Off" if is_false(value) else "Automatic"
    return (
        "neutral",
        f"{state}: with a ragged all-to-all or host compute, copies are scheduled without hiding.",
    )


def _judge_memory_fraction(value: str | None, _: Environment) -> Judgement:
    share = "75%" if value is None else value
    return "neutral", f"jax uses {share} of the device's memory; what offload frees can be used within that."


def _judge_preallocate(value: str | None, _: Environment) -> Judgement:
    if is_false(value):
        return (
            "neutral",
            "The pool grows on demand: a step near the limit may not fit because of fragmentation.",
        )
    return "neutral", "The pool is taken at once: nvidia-smi shows the pool, not what a step needs."


def _judge_deterministic(value: str | None, _: Environment) -> Judgement:
    if is_true(value):
        return "neutral", "The same bits in every run, offloaded or saved; some kernels are slower."
    return (
        "neutral",
        "cuDNN attention's gradient differs in the last bits from run to run: set it to compare runs.",
    )


def _judge_excess_precision(value: str | None, _: Environment) -> Judgement:
    if is_false(value):
        return (
            "neutral",
            "On the CPU placements agree bit for bit without names; with names they do on all backends.",
        )
    return (
        "neutral",
        "Placements differ in the last bits of values without a name; jaxoff.name pins its values.",
    )


def _judge_remat_pass(value: str | None, _: Environment) -> Judgement:
    if is_false(value):
        return "neutral", "XLA recomputes nothing on its own: memory is what policies make it."
    return (
        "neutral",
        "Near the memory limit XLA recomputes values on its own, in some programs into more memory; "
        "jaxoff.jit leaves that out, verify finds it (computed-again).",
    )


def _judge_remat3(value: str | None, _: Environment) -> Judgement:
    if is_true(value):
        return (
            "harms",
            "Policies do not see names inside a custom_vjp's forward rule: such values never move.",
        )
    return "neutral", "Policies see the names inside custom_vjp forward rules: right."


_RULES: Iterable[tuple[Source, tuple[str, ...], Rule]] = (
    ("XLA_FLAGS", (SCHEDULING_MODE,), _judge_scheduling_mode),
    ("XLA_FLAGS", (COMMAND_BUFFER,), _judge_command_buffer),
    ("XLA_FLAGS", (PIPELINED_HOST_COPIES,), _judge_pipelined_host_copies),
    ("XLA_FLAGS", ("xla_gpu_experimental_parallel_collective_overlap_limit",), _judge_collective_overlap),
    ("XLA_FLAGS", ("xla_gpu_enable_latency_hiding_scheduler",), _judge_latency_hiding),
    ("XLA_FLAGS", ("xla_gpu_deterministic_ops",), _judge_deterministic),
    ("XLA_FLAGS", ("xla_allow_excess_precision",), _judge_excess_precision),
    ("jax.config", ("jax_optimization_level",), _judge_optimization_level),
    ("jax.config", ("jax_compiler_enable_remat_pass",), _judge_remat_pass),
    ("jax.config", ("jax_remat3",), _judge_remat3),
    ("environment", ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"), _judge_memory_fraction),
    ("environment", ("XLA_PYTHON_CLIENT_PREALLOCATE",), _judge_preallocate),
)
