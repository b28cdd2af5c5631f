"""The device memory of a step, and its first call, in an otherwise idle process.

Child processes compile side by side, and run alone: each child reports its readiness, and waits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from bench.grouped_mlp import describe
from bench.step_models import Workload
from bench.step_variants import VARIANTS, compile_all, step_of

_READY = "ready to run"


def wait_for_turn() -> None:
    """In a child: reports the end of the compilation, and waits for the permission to run."""
    print(_READY, flush=True)
    sys.stdin.readline()


def peak_of(workload: Workload, variant: str) -> dict[str, Any]:
    """Runs two steps in this process, which did nothing else, when its standard input says so."""
    found: dict[str, Any] = {"workload": workload.name, "variant": variant}
    programs = compile_all(
        workload, {variant: step_of(workload, VARIANTS[variant])}, 1, lambda _, result: _keep(found, result)
    )
    wait_for_turn()
    if variant not in programs:
        return found
    try:
        program, arguments = programs[variant], workload.arguments(VARIANTS[variant].form)
        jax.block_until_ready(arguments)
        device = jax.devices()[0]
        before = device.memory_stats() or {}
        for key in ("cold_first_step_s", "cold_second_step_s"):
            start = time.perf_counter()
            jax.block_until_ready(program.call(*arguments))  # results go before the next call
            found[key] = time.perf_counter() - start
        peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
        if peak is not None and peak == before["peak_bytes_in_use"]:
            # The counter cannot be set back.
            raise RuntimeError("the step's peak is below that of compiling or of making the inputs")
        found["peak_bytes"] = peak
    except Exception as error:  # the step does not fit, or fails
        found["error"] = describe(error)
    return found


def _keep(found: dict[str, Any], result: Any) -> None:
    if isinstance(result, dict):
        found |= result
    else:
        found |= {"lower_s": result.lower_s, "compile_s": result.compile_s}


def measure_peaks(
    workload: Workload,
    variants: Iterable[str],
    jobs: int,
    over: Callable[[], bool],
    on_row: Callable[[dict[str, Any]], None],
) -> None:
    """Measures each variant in a process of its own.

    Args:
      workload: the workload to train.
      variants: keys of `VARIANTS`.
      jobs: the number of processes compiling at a time.
      over: whether time is up; then no more processes start.
      on_row: receives each result of `peak_of`.
    """
    running = threading.Lock()

    def measure_peak(variant: str) -> dict[str, Any]:
        if over():
            return {"workload": workload.name, "variant": variant, "error": "not started: time was up"}
        return _child(workload, variant, running)

    with ThreadPoolExecutor(jobs) as pool:
        for found in pool.map(measure_peak, variants):
            on_row(found)


def _child(workload: Workload, variant: str, running: threading.Lock) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.step", "--peak-of", variant, "--workloads", workload.name]
    found = run_child(command + ["--tiny"] * workload.tiny, running)
    return {"workload": workload.name, "variant": variant} | found


def run_child(
    command: list[str], running: threading.Lock, environment: dict[str, str] | None = None
) -> dict[str, Any]:
    """The JSON printed by a process, or an error. After its compilation the process waits for `running`."""
    pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    # Autotuning beside other processes picks slow kernels: timed programs must not reuse these.
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"} | (environment or {})
    with subprocess.Popen(command, text=True, env=environment, **pipes) as child:
        assert child.stdout is not None
        lines = []
        for line in child.stdout:  # ends where the child does
            if line.strip() == _READY:
                break
            lines.append(line)
        with running:  # until the process is gone and the device's memory is free
            rest, _ = child.communicate("\n" if child.poll() is None else None)
    lines += rest.splitlines()
    for line in reversed(lines):
        if line.startswith("{"):
            return json.loads(line)
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return {"error": f"exit status {child.returncode}: {last[:300]}"}
