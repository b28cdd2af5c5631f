"""The settings of XLA and JAX that matter to offload, and whether they help or harm it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Literal

from jaxoff._runtime.environment import Environment

Verdict = Literal["helps", "harms", "neutral"]
Source = Literal["XLA_FLAGS", "jax.config", "environment"]
Judgement = tuple[Verdict, str]

PIPELINING_LEVELS = ("O1", "O2", "O3")
PIPELINING = (
    "switches on pipelining passes, that of host copies among them, which has a history of wrong results. "
    "Leave it unset and set the passes you want by their own flags."
)
COMMAND_BUFFER = "xla_gpu_enable_command_buffer"
SCHEDULING_MODE = "xla_gpu_command_buffer_scheduling_mode"
DISABLED_PASSES = "xla_disable_hlo_passes"
CAPTURED_BY_DEFAULT = frozenset(
    {"CONDITIONAL", "CUBLAS", "CUBLASLT", "CUDNN", "CUSTOM_CALL", "DYNAMIC_SLICE_FUSION", "FUSION"}
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting, its value here and what it does to offload.

    Attributes:
      name: of the flag, option or environment variable.
      source: where it is set.
      value: as it was given; None where it is not set.
      verdict: "helps", "harms" or "neutral".
      why: one sentence, with what was measured (one H200, jaxlib 0.11.2) where it was.
    """

    name: str
    source: Source
    value: str | None
    verdict: Verdict
    why: str


def judge(environment: Environment) -> tuple[Setting, ...]:
    """Every setting that matters, as it is in an environment."""
    return tuple(_judge_one(environment, *rule) for rule in _RULES)


def _judge_one(environment: Environment, source: Source, names: tuple[str, ...], rule: Rule) -> Setting:
    values = {
        "XLA_FLAGS": environment.xla_flags,
        "jax.config": environment.config,
        "environment": environment.variables,
    }[source]
    name = next((n for n in names if n in values), names[0])
    value = values.get(name)
    verdict, why = rule(value, environment)
    return Setting(name, source, value, verdict, why)


Rule = Callable[[str | None, Environment], Judgement]


def is_true(value: str | None) -> bool:
    return value is not None and value.lower() in ("true", "1", "t", "y", "yes")


def is_false(value: str | None) -> bool:
    return value is not None and value.lower() in ("false", "0", "f", "n", "no")


def captured_commands(value: str | None) -> frozenset[str]:
    """The kinds of command that XLA captures into CUDA graphs; `+X` and `-X` edit the default list."""
    if value is None:
        return CAPTURED_BY_DEFAULT
    words = [word.strip().upper() for word in value.split(",") if word.strip()]
    if not any(word[0] in "+-" for word in words):
        return frozenset(words)
    added = {word.lstrip("+") for word in words if word[0] != "-"}
    return (CAPTURED_BY_DEFAULT | added) - {word[1:] for word in words if word[0] == "-"}


def _scheduling_mode(value: str | None, environment: Environment) -> Judgement:
    mode = (value or "LHS").upper()
    captured = captured_commands(environment.xla_flags.get(COMMAND_BUFFER))
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
            "Copies of scanned layers run beside the kernels (+0% of a step). A long unrolled program gives "
            "up buffer reuse under it: set it per program, jax.jit(..., compiler_options=)."
        )
    if mode == "LHS":
        return "neutral", (
            "Copies captured in a CUDA graph wait in line with the kernels (+23% of a step, scanned layers). "
            f"jax.jit(..., compiler_options={{'{SCHEDULING_MODE}': 'CONCURRENT'}}) overlaps them."
        )
    if mode == "CONCURRENT_REGIONS":
        return (
            "harms",
            "Copies did not overlap (+18% of a step), and captured collectives fail with INTERNAL.",
        )
    return "harms", f"Under {mode} the commands of a CUDA graph, copies among them, wait for one another."


def _command_buffer(value: str | None, environment: Environment) -> Judgement:
    captured = captured_commands(value)
    if not captured:
        return "neutral", (
            "Without CUDA graphs copies overlap in part (+12 to 17% of a step with scanned layers; by "
            "default +23%, with CONCURRENT graphs +0%)."
        )
    if len(environment.devices) > 1 and "COLLECTIVES" not in captured:
        return "neutral", "Collectives are not captured: add COLLECTIVES before scheduling CONCURRENT."
    if "COLLECTIVES" in captured:
        return (
            "helps",
            "With collectives captured, CONCURRENT graphs overlap copies on several GPUs (+0.8% on two).",
        )
    return "neutral", f"Captured: {', '.join(sorted(captured))}."


def _pipelined_host_offloading(value: str | None, _: Environment) -> Judgement:
    if is_true(value):
        return (
            "harms",
            "This pass has a history of wrong results, and CONCURRENT graphs are faster (+8% against +1%).",
        )
    return "neutral", "Off: right."


def _optimization_level(value: str | None, _: Environment) -> Judgement:
    if value in PIPELINING_LEVELS:
        return "harms", f"{value} {PIPELINING}"
    return "neutral", "No pipelining passes switched on: right."


def _collective_overlap(value: str | None, _: Environment) -> Judgement:
    if value is not None and value.strip().isdigit() and int(value) > 1:
        return (
            "harms",
            "Above 1, a collective can race a reloaded residual: wrong gradients now and then. Set it to 1.",
        )
    return "neutral", "One collective at a time: right."


def _latency_hiding(value: str | None, _: Environment) -> Judgement:
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


def _memory_fraction(value: str | None, _: Environment) -> Judgement:
    share = "75%" if value is None else value
    return "neutral", f"jax uses {share} of the device's memory; what offload frees can be used within that."


def _preallocate(value: str | None, _: Environment) -> Judgement:
    if is_false(value):
        return (
            "neutral",
            "The pool grows on demand: a step near the limit may not fit because of fragmentation.",
        )
    return "neutral", "The pool is taken at once: nvidia-smi shows the pool, not what a step needs."


def _deterministic(value: str | None, _: Environment) -> Judgement:
    if is_true(value):
        return "neutral", "The same bits in every run, offloaded or saved; some kernels are slower."
    return (
        "neutral",
        "cuDNN attention's gradient differs in the last bits from run to run: set it to compare runs.",
    )


def _excess_precision(value: str | None, _: Environment) -> Judgement:
    if is_false(value):
        return (
            "neutral",
            "On the CPU placements agree bit for bit without names; with names they do on all backends.",
        )
    return (
        "neutral",
        "Placements differ in the last bits of values without a name; jaxoff.name pins its values.",
    )


def _remat_pass(value: str | None, _: Environment) -> Judgement:
    if is_false(value):
        return "neutral", "XLA recomputes nothing on its own: memory is what policies make it."
    return (
        "neutral",
        "Near the memory limit XLA recomputes values on its own, in some programs into more memory; "
        "jaxoff.jit leaves that out, verify finds it (computed-again).",
    )


def _remat3(value: str | None, _: Environment) -> Judgement:
    if is_true(value):
        return (
            "harms",
            "Policies do not see names inside a custom_vjp's forward rule: such values never move.",
        )
    return "neutral", "Policies see the names inside custom_vjp forward rules: right."


_RULES: Iterable[tuple[Source, tuple[str, ...], Rule]] = (
    ("XLA_FLAGS", (SCHEDULING_MODE,), _scheduling_mode),
    ("XLA_FLAGS", (COMMAND_BUFFER,), _command_buffer),
    ("XLA_FLAGS", ("xla_gpu_enable_pipelined_host_offloading",), _pipelined_host_offloading),
    ("XLA_FLAGS", ("xla_gpu_experimental_parallel_collective_overlap_limit",), _collective_overlap),
    ("XLA_FLAGS", ("xla_gpu_enable_latency_hiding_scheduler",), _latency_hiding),
    ("XLA_FLAGS", ("xla_gpu_deterministic_ops",), _deterministic),
    ("XLA_FLAGS", ("xla_allow_excess_precision",), _excess_precision),
    ("jax.config", ("jax_optimization_level",), _optimization_level),
    ("jax.config", ("jax_compiler_enable_remat_pass",), _remat_pass),
    ("jax.config", ("jax_remat3",), _remat3),
    ("environment", ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"), _memory_fraction),
    ("environment", ("XLA_PYTHON_CLIENT_PREALLOCATE",), _preallocate),
)
