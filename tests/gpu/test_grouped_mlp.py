"""The grouped MLP's kernels on a Hopper GPU: right, the same from run to run, and offloaded by name.

What is right is told by a loop over experts in float64; how near to it 16 bits come, by the reference.
"""

import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxoff
from pallas_kernels import choose_implementation, grouped_mlp
from tests.pallas_kernels.oracle import Results, dense, float64, largest_error, make, norm_error

pytestmark = pytest.mark.gpu

DETERMINISTIC = {"xla_gpu_deterministic_ops": True}


@pytest.fixture(autouse=True)
def hopper():
    chosen = choose_implementation(jnp.zeros((8, 64), jnp.bfloat16), jnp.zeros((1, 64, 64), jnp.bfloat16))
    if chosen.name != "mosaic":
        pytest.skip(chosen.reason)


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape and several ways to cut its rows into groups."""

    width: int
    hidden: int
    rows: int
    groups: tuple[tuple[int, ...], ...]
    dtype: jnp.dtype = jnp.bfloat16


def zipf(experts, rows, seed=0):
    shares = np.random.default_rng(seed).permutation(1 / np.arange(1, experts + 1))
    return tuple(int(size) for size in shares / shares.sum() * rows)


def one_hot(experts, size):
    return (*(0,) * (experts // 2), size, *(0,) * (experts - experts // 2 - 1))


CASES = {
    "nano": Case(2688, 1856, 1024, (zipf(8, 1024), (100, 0, 7, 500, 1, 0, 333, 64), one_hot(8, 1000))),
    "nano, transposed": Case(1856, 2688, 771, ((300, 1, 470),)),
    "float16": Case(320, 192, 515, (zipf(6, 500), one_hot(6, 515)), jnp.float16),
    "512 experts": Case(64, 128, 3000, (zipf(512, 3000), (1,) * 512)),
    "one row": Case(64, 64, 1, ((1,), (0,))),
    "one expert": Case(256, 512, 2000, ((2000,), (1999,))),
}


def output_and_gradients(implementation):
    def run(group_sizes, *arguments):
        *given, dy = arguments

        def apply(x, w1, w2, probs, b1, b2):
            more = dict(probs=probs, b1=b1, b2=b2, implementation=implementation)
            return grouped_mlp(x, w1, w2, group_sizes, **more)

        y, pullback = jax.vjp(apply, *given)
        return Results(y, *pullback(dy))

    return jax.jit(run)


# Tensor cores add with fewer bits than float32: where the reference rounds nothing to 16 bits (db2), its own
# error is no measure. Both are far below one rounding to bfloat16, 1e-3.
NORM_SLACK, WORST_SLACK = 2e-5, 1e-4


@pytest.mark.parametrize("name", CASES)
def test_error_against_float64_is_that_of_the_reference(name):
    """At most twice in norm, and three times for the worst element: none is wild."""
    case = CASES[name]
    kernels, reference = output_and_gradients("mosaic"), output_and_gradients("reference")
    for seed, sizes in enumerate(case.groups):
        arguments = make(sizes, case.rows, case.dtype, width=case.width, hidden=case.hidden, seed=seed)
        group_sizes = jnp.array(sizes, jnp.int32)
        wanted = dense(sizes, arguments)
        got, other = kernels(group_sizes, *arguments), reference(group_sizes, *arguments)
        errors = {
            field: [(norm_error(v, want), largest_error(v, want)) for v in (value, rival)]
            for field, value, rival, want in zip(Results._fields, got, other, wanted, strict=True)
        }
        for field, ((norm, worst), (rival_norm, rival_worst)) in errors.items():
            assert norm <= 2 * rival_norm + NORM_SLACK, (field, sizes[:8], errors)
            assert worst <= 3 * rival_worst + WORST_SLACK, (field, sizes[:8], errors)
        for value in (got.y, got.dx, got.dprobs):
            assert not float64(value[sum(sizes) :]).any(), "rows of no expert"


ROWS, WIDTH, HIDDEN = 512, 256, 192
SIZES = (1, 7, 64, 65, 128, 3, 200, 33)


def test_every_pattern_of_empty_groups():
    """Against the reference, on the device; rows past the groups are NaN."""
    arguments = make(SIZES, ROWS, jnp.bfloat16, width=WIDTH, hidden=HIDDEN)
    kernels, reference = output_and_gradients("mosaic"), output_and_gradients("reference")

    @jax.jit
    def prepare(sizes, x, dy, probs):
        own = lax.iota(jnp.int32, ROWS) < jnp.sum(sizes)
        x, dy = (jnp.where(own[:, None], jnp.nan_to_num(value), jnp.nan) for value in (x, dy))
        return x, dy, jnp.where(own, jnp.nan_to_num(probs), jnp.nan)

    @jax.jit
    def errors(sizes, got, want):
        def error(got, want):
            got, want = got.astype(jnp.float32), want.astype(jnp.float32)
            size = jnp.linalg.norm(want)
            return jnp.linalg.norm(got - want) / jnp.where(size == 0, 1.0, size)

        empty = sizes == 0
        left = [jnp.where(jnp.expand_dims(empty, range(1, dw.ndim)), dw, 0) for dw in got[2:4]]
        return jax.tree.map(error, got, want), [jnp.any(dw != 0) for dw in left]

    found = []
    for pattern in itertools.product([0, 1], repeat=len(SIZES)):
        sizes = jnp.array(pattern, jnp.int32) * jnp.array(SIZES, jnp.int32)
        x, dy, probs = prepare(sizes, arguments.x, arguments.dy, arguments.probs)
        tried = arguments._replace(x=x, dy=dy, probs=probs)
        found.append(errors(sizes, kernels(sizes, *tried), reference(sizes, *tried)))
    assert len(found) == 256
    for pattern, (error, left) in enumerate(found):
        assert all(float(value) < 5e-3 for value in error), (f"{pattern:08b}", error)
        assert not any(map(bool, left)), f"{pattern:08b}: an empty expert has a gradient"


def bits(tree):
    return [np.asarray(value).tobytes() for value in jax.tree.leaves(tree)]


def test_nan_of_one_expert_stays_with_it():
    arguments = make(SIZES, ROWS, jnp.bfloat16, width=WIDTH, hidden=HIDDEN)
    kernels, sizes = output_and_gradients("mosaic"), jnp.array(SIZES, jnp.int32)
    clean = kernels(sizes, *arguments)
    stops = np.cumsum(SIZES)
    for expert, (first, stop) in enumerate(zip([0, *stops], stops, strict=False)):
        dirty = {name: getattr(arguments, name).at[first:stop].set(jnp.nan) for name in ("x", "dy", "probs")}
        got = kernels(sizes, *arguments._replace(**dirty))
        for name, value, want in zip(Results._fields, got, clean, strict=True):
            others = np.ones(len(value), bool)
            others[slice(first, stop) if len(value) == ROWS else expert] = False
            assert bits(np.asarray(value)[others]) == bits(np.asarray(want)[others]), (expert, name)
            assert np.isnan(float64(value)[~others]).any(), (expert, name)


def test_a_thousand_repeats_give_equal_bits():
    arguments = make(SIZES, ROWS, jnp.bfloat16, width=WIDTH, hidden=HIDDEN)
    kernels, sizes = output_and_gradients("mosaic"), jnp.array(SIZES, jnp.int32)

    @jax.jit
    def differences(first, second):
        def count(a, b):
            unsigned = {2: jnp.uint16, 4: jnp.uint32}[a.dtype.itemsize]
            a, b = (lax.bitcast_convert_type(value, unsigned) for value in (a, b))
            return jnp.sum(a != b)

        return sum(map(count, first, second))

    first = kernels(sizes, *arguments)
    assert int(differences(first, first._replace(y=first.y + 1))) > 0
    assert sum(map(int, [differences(first, kernels(sizes, *arguments)) for _ in range(1000)])) == 0


def test_gradients_are_added_to_the_callers_accumulators_in_place():
    x, w1, w2, probs, _, _, dy = make(SIZES, ROWS, jnp.bfloat16, width=WIDTH, hidden=HIDDEN)
    sizes = jnp.array(SIZES, jnp.int32)

    def loss(sums, w1, w2):
        y = grouped_mlp(x, w1, w2, sizes, probs=probs, grad_accumulators=sums, implementation="mosaic")
        return jnp.sum(jnp.where(jnp.isnan(dy), 0, y.astype(jnp.float32) * dy.astype(jnp.float32)))

    @jax.jit
    def plain(w1, w2):
        wide = w1.astype(jnp.float32), w2.astype(jnp.float32)
        return jax.grad(lambda w: loss(None, *w))(wide)

    keys = jax.random.split(jax.random.key(0))
    sums = jax.random.normal(keys[0], w1.shape), jax.random.normal(keys[1], w2.shape)
    wanted = jax.tree.map(lambda s, dw: float64(s) + 2 * float64(dw), sums, plain(w1, w2))
    step = jax.jit(jax.grad(loss), donate_argnums=0).lower(sums, w1, w2).compile()
    assert step.memory_analysis().alias_size_in_bytes >= sum(s.nbytes for s in sums)
    for _ in range(2):
        sums = step(sums, w1, w2)
    for got, want in zip(sums, wanted, strict=True):
        assert norm_error(got, want) < 1e-6


def test_shard_map_sums_the_weights_gradients():
    """Over as many GPUs as there are; one of them is a sum too."""
    count = jax.device_count()
    mesh = jax.make_mesh((count,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    shards = [make(SIZES, ROWS, jnp.bfloat16, width=WIDTH, hidden=HIDDEN, seed=s) for s in range(count)]
    _, w1, w2, _, b1, b2, _ = shards[0]
    x, probs = (jnp.concatenate([getattr(s, name) for s in shards]) for name in ("x", "probs"))
    sizes = jnp.array([SIZES] * count, jnp.int32)

    def part(x, w1, w2, probs, b1, b2, sizes, implementation):
        more = dict(probs=probs, b1=b1, b2=b2, implementation=implementation)
        return jnp.sum(jnp.sin(grouped_mlp(x, w1, w2, sizes, **more).astype(jnp.float32)))

    def loss(x, w1, w2, probs, b1, b2, sizes):
        return lax.psum(part(x, w1, w2, probs, b1, b2, sizes[0], "mosaic"), "data")

    def unsharded(x, w1, w2, probs, b1, b2):
        own = [slice(ROWS * i, ROWS * (i + 1)) for i in range(count)]
        return sum(part(x[o], w1, w2, probs[o], b1, b2, sizes[0], "reference") for o in own)

    split, whole = jax.P("data"), jax.P()
    specs = (split, whole, whole, split, whole, whole, split)
    sharded = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=whole)
    arguments = x, w1, w2, probs, b1, b2
    got = jax.jit(jax.grad(sharded, tuple(range(6))))(*arguments, sizes)
    want = jax.jit(jax.grad(unsharded, tuple(range(6))))(*arguments)
    for value, wanted in zip(got, want, strict=True):
        assert norm_error(value, float64(wanted)) < 1e-2


def test_offloading_the_activation_moves_its_bytes_and_keeps_its_bits():
    layers, rows, width, hidden = 4, 4096, 512, 1024
    sizes = jnp.array(zipf(16, rows), jnp.int32)
    keys = jax.random.split(jax.random.key(0), 3)
    w1 = jax.random.normal(keys[0], (layers, 16, width, hidden), jnp.bfloat16) * width**-0.5
    w2 = jax.random.normal(keys[1], (layers, 16, hidden, width), jnp.bfloat16) * hidden**-0.5
    x = jax.random.normal(keys[2], (rows, width), jnp.bfloat16)

    def loss(policy):
        def layer(x, w):
            return x + grouped_mlp(jnp.tanh(x), w[0], w[1], sizes, implementation="mosaic"), None

        block = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        return lambda w, x: lax.scan(block, x, w)[0].astype(jnp.float32).mean()

    programs = {}
    for name, policy in {
        "offloaded": jaxoff.policy(offload=["moe.act"], save=["moe.dispatched"]),
        "saved": jaxoff.policy(save=["moe.*"]),
        "recomputed": jaxoff.policy(save=["moe.dispatched"]),
    }.items():
        step = jax.jit(jax.value_and_grad(loss(policy), (0, 1)), compiler_options=DETERMINISTIC)
        programs[name] = step.lower((w1, w2), x).compile()
        if name == "offloaded":
            assert jaxoff.explain(loss(policy), (w1, w2), x).host_bytes == layers * rows * hidden * 2
    host = {name: p.memory_analysis().host_temp_size_in_bytes for name, p in programs.items()}
    assert host == {"offloaded": layers * rows * hidden * 2, "saved": 0, "recomputed": 0}
    assert "S(5)" in programs["offloaded"].as_text()
    offloaded, saved, recomputed = (bits(p((w1, w2), x)) for p in programs.values())
    assert offloaded == saved == recomputed


def test_no_implementation_named_gives_the_kernels_here_and_the_reference_on_a_cpu():
    x, w = jnp.zeros((8, 64), jnp.bfloat16), jnp.zeros((1, 64, 64), jnp.bfloat16)
    text = jax.jit(grouped_mlp).lower(x, w, w, jnp.array([8])).as_text()
    assert "mosaic_gpu" in text and "grouped_mlp_fc1" in text
    code = """
import jax, jax.numpy as jnp, pallas_kernels
x, w = jnp.zeros((8, 64), jnp.bfloat16), jnp.zeros((1, 64, 64), jnp.bfloat16)
print(pallas_kernels.choose_implementation(x, w))
print(pallas_kernels.grouped_mlp(x, w, w, jnp.array([8])).shape)
"""
    told = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert told.stdout.splitlines() == [
        "reference: it needs a GPU of compute capability 9.0 (Hopper), got cpu",
        "(8, 64)",
    ]
