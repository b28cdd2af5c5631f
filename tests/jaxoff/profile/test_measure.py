"""`measure`: what it times, what it refuses, and, on a GPU, what it says of memory and copies."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoff
from jaxoff._profile import gpu_trace
from jaxoff._profile import measure as measuring
from jaxoff._profile.gpu_trace import read
from jaxoff._profile.measure import Measurement, measure
from tests.recipes import jit_in_order

TRACES = Path(__file__).parents[2] / "data" / "traces"
W, X = np.full((8, 8), 0.1, np.float32), np.ones((4, 8), np.float32)


def on_device():
    return jnp.asarray(W), jnp.asarray(X)


def plain(w, x):
    return jnp.tanh(x @ w)


MAKE = {
    "plain": lambda w, x: plain,
    "jax.jit": lambda w, x: jax.jit(plain),
    "jaxoff.jit": lambda w, x: jaxoff.jit(plain),
    "compiled": lambda w, x: jax.jit(plain).lower(w, x).compile(),
    "bound": lambda w, x: Model(w).bound,
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Model:
    w: jax.Array

    @jax.jit
    def bound(self, w, x):
        return plain(self.w + w, x)


@pytest.mark.parametrize("kind", MAKE)
def test_every_kind_of_function_is_timed(kind):
    w, x = on_device()
    taken = measure(MAKE[kind](w, x), w, x, repeats=4)
    assert len(taken.times_ms) == 4 and min(taken.times_ms) > 0
    # Arguments and results at least, in bytes, on one device.
    assert taken.program_bytes >= 4 * (4 * 8 + 4 * 8) + (kind != "bound") * 4 * 64


def test_it_times_until_the_results_are_there():
    def slow(x):
        def host(x):
            time.sleep(0.03)
            return x

        return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    taken = measure(slow, jnp.ones(4), repeats=3, warmup=1)
    assert min(taken.times_ms) >= 30


def test_it_calls_as_often_as_asked():
    called = []

    def counted(x):
        jax.debug.callback(lambda: called.append(1))
        return x + 1

    measure(jax.jit(counted), jnp.ones(3), repeats=5, warmup=2, traced=0)
    jax.effects_barrier()
    assert len(called) == 7


def test_median_and_spread_are_those_of_the_times():
    taken = Measurement("1 x H", (5.0, 1.0, 2.0, 3.0, 4.0), 1, 0, None, None, ())
    assert (taken.median_ms, taken.spread_ms, taken.exposed_ms) == (3, 2, None)
    assert dataclasses.replace(taken, times_ms=(7.0,)).spread_ms == 0


def test_on_a_cpu_it_says_what_is_missing():
    if jax.default_backend() != "cpu":
        pytest.skip("there is an accelerator")
    taken = measure(plain, *on_device())
    assert (taken.peak_bytes, taken.traced_ms, taken.gpus, taken.exposed_ms) == (None, None, (), None)
    (note,) = taken.notes
    assert "measured on a GPU; this ran on cpu" in note and "jaxoff.verify" in note
    assert "measured on a GPU" in str(taken) and "device peak unknown" in str(taken)


class Watched:
    """A program that counts the arrays of its result's shape that lie around when it is called."""

    def __init__(self, fun, shape):
        self.jitted, self.shape, self.found = jax.jit(fun), shape, []
        self.lower = self.jitted.lower

    def __call__(self, *args):
        self.found.append(sum(array.shape == self.shape for array in jax.live_arrays()))
        return self.jitted(*args)


def test_results_of_one_call_are_gone_before_the_next():
    watched = Watched(lambda x: jnp.outer(x, x), (37, 37))
    measure(watched, jnp.ones(37), repeats=3, warmup=2)
    assert watched.found == [0] * 5


def test_each_call_gets_what_the_one_before_left():
    seen = []

    def next_args(args, results):
        seen.append(results)
        return (results,)

    start = jnp.zeros(())
    measure(jax.jit(lambda x: x + 1), start, repeats=3, warmup=1, traced=0, next_args=next_args)
    assert [float(value) for value in seen] == [1, 2, 3, 4]


def test_donated_arguments_need_those_of_the_next_call():
    step = jax.jit(lambda state, x: ({"w": state["w"] * 0.5}, x), donate_argnums=0)
    w, x = on_device()
    with pytest.raises(ValueError, match=r"args\[0\]\['w'\]. Say what the next call gets.*next_args=lambda"):
        measure(step, {"w": w}, x)
    assert not w.is_deleted()
    with pytest.raises(ValueError, match="donated arguments are gone"):
        measure(step.lower({"w": w}, x).compile(), {"w": w}, x)
    taken = measure(step, {"w": w}, x, repeats=6, next_args=lambda args, results: (results[0], args[1]))
    assert len(taken.times_ms) == 6
    assert w.is_deleted(), "the first call got the array itself, not a copy"


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((3, W), {}, TypeError, "a function or a compiled program; got int"),
        ((plain, W, X), {"repeats": 0}, ValueError, "repeats is a number of calls, 1 or more; got 0"),
        ((plain, W, X), {"warmup": -1}, ValueError, "warmup is a number of calls, 0 or more; got -1"),
        ((plain, W, X), {"traced": -1}, ValueError, "traced is a number of calls, 0 or more; got -1"),
        (
            (plain, W, {"x": jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)}),
            {},
            TypeError,
            r"got ShapeDtypeStruct at args\[1\]\['x'\].*jnp\.zeros\(\(4, 8\), jnp\.bfloat16\)",
        ),
    ],
)
def test_what_cannot_run_is_refused(arguments, options, error, message):
    with pytest.raises(error, match=message):
        measure(*arguments, **options)


def test_inside_a_transformation_it_is_refused():
    with pytest.raises(TypeError, match="Call it outside of jit and grad"):
        jax.jit(lambda x: measure(plain, W, x))(X)


@pytest.mark.aot
def test_a_program_for_devices_that_are_not_here_is_refused():
    compiled = jaxoff.target("h200").compile(plain, W, X)
    if any("H200" in device.device_kind for device in jax.devices()):
        pytest.skip("the device is here")
    with pytest.raises(ValueError, match=r"compiled for 1 x NVIDIA H200, which this process does not have"):
        measure(compiled, W, X)


def test_the_peak_is_known_only_where_every_mark_rose():
    assert measuring._peak([10, 20], [30, 25]) == (30, ())
    peak, (note,) = measuring._peak([10, 2 * 10**9], [30, 2 * 10**9])
    assert peak is None
    assert "at most 2.00 GB" in note and "process of its own" in note
    peak, (note,) = measuring._peak(None, None)
    assert peak is None and "XLA_PYTHON_CLIENT_ALLOCATOR" in note


def test_a_profile_that_slowed_the_step_or_saw_nothing_is_reported():
    gpus = read(TRACES / "scan_offloaded_conc.xplane.pb").times()
    assert measuring._trace_notes(105.0, 100.0, gpus) == ()
    (slow,) = measuring._trace_notes(150.0, 100.0, gpus)
    assert "took 150.00 ms, not 100.00" in slow
    (blind,) = measuring._trace_notes(100.0, 100.0, ())
    assert "saw nothing on the GPU" in blind


def test_a_measurement_prints_as_a_table_and_converts_to_json():
    gpus = tuple(g.per_call(2) for g in read(TRACES / "scan_offloaded_default.xplane.pb").times())
    taken = Measurement(
        "1 x NVIDIA H200", (207.0, 206.0, 208.0), 10**10, 5 * 10**9, None, 207.5, gpus, ("No.",)
    )
    lines = str(taken).splitlines()
    assert lines[2].split() == ["0", "D2H", "29.09", "29.09", "12", "1.61", "GB", "55.4"]
    assert (
        "step 207.00 ms on 1 x NVIDIA H200 (median of 3, middle half within 1.00 ms, 206.00 to 208.00)"
        in lines
    )
    assert "device peak unknown, program 10.00 GB; host memory 5.00 GB" in lines
    assert lines[-1] == "! No."
    content = json.loads(json.dumps(taken.to_dict()))
    assert content["median_ms"] == 207 and content["gpus"][0]["d2h"]["count"] == 12
    assert content["exposed_ms"] == pytest.approx(58.1, abs=0.1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        taken.peak_bytes = 1


LAYERS, ROWS, WIDTH = 4, 4096, 4096
RESIDUAL = ROWS * WIDTH * 2  # bytes, bf16


def steps():
    """Gradient of scanned layers that offload each one's input: stock, and by jaxoff."""

    def layer(x, w):
        x = jaxoff.name(x, "x_in")
        for _ in range(16):
            x = jnp.tanh(x @ w)
        return x, None

    policy = jaxoff.policy(offload=["x_in"])

    def stock(w, x):
        block = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        return jax.lax.scan(block, x, w)[0].astype(jnp.float32).sum()

    def ours(w, x):
        return jaxoff.scan(layer, x, w, policy=policy)[0].astype(jnp.float32).sum()

    w = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH), jnp.bfloat16) * WIDTH**-0.5
    x = jnp.ones((ROWS, WIDTH), jnp.bfloat16)
    return jax.jit(jax.grad(stock)), jit_in_order(jax.grad(ours)), (w, x)


@pytest.mark.gpu
def test_on_a_gpu_copies_are_counted_and_exposed_by_the_stock_program_only(tmp_path):
    stock, ours, args = steps()
    measured = {
        "stock": measure(stock, *args, trace_dir=tmp_path / "stock"),
        "ours": measure(ours, *args),
    }
    for taken in measured.values():
        (gpu,) = taken.gpus
        for copy in (gpu.d2h, gpu.h2d):
            # Beside the residuals, only scalars may move.
            assert abs(copy.nbytes - LAYERS * RESIDUAL) <= RESIDUAL + 4096, str(taken)
            assert 0 <= copy.exposed_ms <= copy.busy_ms < taken.traced_ms
        assert taken.host_bytes >= (LAYERS - 1) * RESIDUAL
        assert 0 < gpu.kernel_ms <= taken.traced_ms
    exposed = {name: taken.gpus[0].exposed_ms for name, taken in measured.items()}
    assert exposed["ours"] < 0.5 * exposed["stock"]
    kept = gpu_trace.read(tmp_path / "stock")
    assert kept.times()[0].per_call(3) == measured["stock"].gpus[0]


PEAK = """
import json, jax, jax.numpy as jnp
from jaxoff._profile.measure import measure
x = jnp.zeros(2**24, jnp.float32)
step = jax.jit(lambda x: x + 1)
print(json.dumps([measure(step, x, traced=0).to_dict() for _ in range(2)]))
"""


@pytest.mark.gpu
@pytest.mark.usefixtures("card")
def test_on_a_gpu_the_peak_is_known_in_a_process_of_its_own_once():
    here = Path(__file__).parents[3]
    # The rest of the suite may hold most of the memory.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    run = subprocess.run(
        [sys.executable, "-c", PEAK], cwd=here, env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    first, again = json.loads(run.stdout.splitlines()[-1])
    held = 2 * 2**26  # the argument and one result: no second result lies around
    assert first["program_bytes"] == held
    assert held <= first["peak_bytes"] < 1.05 * held
    assert again["peak_bytes"] is None
    assert any("at most" in note for note in again["notes"])
