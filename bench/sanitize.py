"""Runs the grouped MLP's kernels under NVIDIA's compute-sanitizer and prints the findings.

    python -m bench.sanitize [--tools memcheck,racecheck,synccheck] [--sanitizer PATH]

Beside the kernels, each tool runs a Pallas kernel with a known fault (a read past an array, a race in shared
memory). A tool without a finding there is blind to such kernels, and its silence is reported as blindness and
not as a pass: racecheck follows loads, stores and barriers of threads; the writes of the copy engine and of
the tensor cores to shared memory behind an mbarrier may be invisible to racecheck, or look like a race.

Exits with 0 where every tool ran and found nothing, 1 after a finding, 2 where a tool could not run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOOLS = ("memcheck", "racecheck", "synccheck")
# The fault that a tool must find before its silence counts.
CONTROLS = {"memcheck": "outside", "racecheck": "race"}
SUMMARY = re.compile(r"=+ (?:ERROR|RACECHECK) SUMMARY: (?P<text>(?P<count>\d+) .*)")
TIMEOUT_S = 500
SHOWN_LINES = 60


@dataclass(frozen=True)
class Finding:
    """The result of a tool's run on a program.

    Attributes:
      count: errors or hazards; None where the tool printed no summary.
      text: the summary, or the end of the output.
      output: the whole output.
    """

    count: int | None
    text: str
    output: str

    @classmethod
    def parse(cls, output: str, returncode: int | None) -> Finding:
        """Reads a tool's output; a program failing by itself has no count, whatever the summary."""
        summaries = list(SUMMARY.finditer(output))
        if not summaries:
            return cls(None, f"no summary, exit status {returncode}: {output.strip()[-300:]}", output)
        last = summaries[-1]
        count = int(last["count"])
        if returncode != 0 and count == 0:
            return cls(None, f"the program failed with status {returncode}: {output.strip()[-300:]}", output)
        return cls(count, last["text"], output)


def verdict(tool: str, control: Finding | None, kernels: Finding) -> tuple[int, str]:
    """The exit status of a tool's findings, and the message."""
    if kernels.count is None:
        return 2, f"{tool}: could not run: {kernels.text}"
    if kernels.count > 0:
        return 1, f"{tool}: FOUND {kernels.text}"
    if control is None:
        return (
            0,
            f"{tool}: nothing found ({kernels.text}); no planted fault proves that it sees these kernels",
        )
    if not control.count:
        return (
            2,
            f"{tool}: BLIND: it found nothing, and did not see a planted fault either ({control.text})",
        )
    return 0, f"{tool}: nothing found ({kernels.text}), and the planted fault was ({control.text})"


def run(sanitizer: str, tool: str, program: str) -> Finding:
    """Runs a program of `PROGRAMS` under a tool, in a process of its own."""
    environment = os.environ | {
        # An allocation for each array: inside of a pool nothing is out of bounds.
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer= "
        "--xla_gpu_autotune_level=0",
    }
    command = [sanitizer, "--tool", tool, "--error-exitcode", "99"]
    command += [sys.executable, "-m", "bench.sanitize", "--program", program]
    try:
        done = subprocess.run(
            command,
            env=environment,
            cwd=Path(__file__).parents[1],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or b""
        text = printed.decode(errors="replace") if isinstance(printed, bytes) else printed
        return Finding(None, f"not done after {TIMEOUT_S} s", text)
    return Finding.parse(done.stdout, done.returncode)


def run_kernels() -> None:
    """Forward and backward with everything on: uneven groups, a tail, probs, biases, both dtypes."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels import grouped_mlp

    rng, sizes, rows, width, hidden = np.random.default_rng(0), [70, 0, 5, 129, 1], 219, 128, 320

    def loss(x, w1, w2, probs, b1, b2, sums):
        y = grouped_mlp(
            x,
            w1,
            w2,
            jnp.array(sizes),
            probs=probs,
            b1=b1,
            b2=b2,
            grad_accumulators=sums,
            implementation="mosaic",
        )
        return y.astype(jnp.float32).sum()

    step = jax.jit(jax.grad(loss, tuple(range(7))))

    def draw(*shape, dtype: Any = jnp.float32):
        return jnp.asarray(0.1 * rng.normal(size=shape), dtype)

    experts = len(sizes)
    for dtype, accumulate in ((jnp.bfloat16, True), (jnp.float16, False)):
        x = draw(rows, width, dtype=dtype)
        weights = draw(experts, width, hidden, dtype=dtype), draw(experts, hidden, width, dtype=dtype)
        rest = draw(rows), draw(experts, hidden), draw(experts, width)
        sums = tuple(w.astype(jnp.float32) for w in weights) if accumulate else None
        jax.block_until_ready(step(x, *weights, *rest, sums))


def run_outside() -> None:
    """Reads a megabyte past the end of an array."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(source, at, out):
        row = plgpu.load(source.at[pl.ds(at[0], 128)], layout=plgpu.Layout.WG_STRIDED((128,), 1))
        out[...] = row

    kernel = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32), grid=(1,), grid_names=("program",)
    )
    jax.block_until_ready(jax.jit(kernel)(jnp.zeros(128), jnp.array([1 << 18])))


def run_race() -> None:
    """Lets two warpgroups write one buffer without a barrier in between."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(out, buffer):
        wg = lax.axis_index("wg")
        buffer[...] = jnp.full((128,), wg, jnp.int32)
        out[...] = buffer[...]

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((128,), jnp.int32),
        grid=(1,),
        grid_names=("program",),
        num_threads=2,
        thread_name="wg",
        scratch_types=[plgpu.SMEM((128,), jnp.int32)],
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    jax.block_until_ready(jax.jit(kernel)())


PROGRAMS = {"kernels": run_kernels, "outside": run_outside, "race": run_race}


def _find(named: str | None) -> str | None:
    """The sanitizer named on the command line, on the PATH, or beside the CUDA toolkit."""
    folders = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    beside = [str(Path(folder) / "bin") for folder in folders if folder]
    return (
        named
        or shutil.which("compute-sanitizer")
        or shutil.which("compute-sanitizer", path=os.pathsep.join(beside))
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--sanitizer", help="path of compute-sanitizer")
    parser.add_argument("--program", choices=PROGRAMS, help="run one program, with no sanitizer")
    options = parser.parse_args()
    if options.program:
        PROGRAMS[options.program]()
        return 0
    tools = options.tools.split(",")
    if wrong := set(tools) - set(TOOLS):
        parser.error(f"--tools must be of {', '.join(TOOLS)}, got {', '.join(sorted(wrong))}")
    sanitizer = _find(options.sanitizer)
    if sanitizer is None:
        print("compute-sanitizer was not found: it comes with the CUDA toolkit; pass --sanitizer PATH")
        return 2
    status = 0
    for tool in tools:
        kernels = run(sanitizer, tool, "kernels")
        control = run(sanitizer, tool, CONTROLS[tool]) if tool in CONTROLS else None
        code, text = verdict(tool, control, kernels)
        if code:
            lines = (line for line in kernels.output.splitlines() if line.startswith("====="))
            print(*list(lines)[:SHOWN_LINES], sep="\n")
        print(text, flush=True)
        status = max(status, code) if 1 not in (status, code) else 1
    return status


if __name__ == "__main__":
    sys.exit(main())
