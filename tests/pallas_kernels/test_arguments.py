"""Which implementation serves a call, and what wrong arguments are told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import choose_implementation, grouped_mlp
from tests.pallas_kernels.interpreter import interpreting

HALF = jnp.zeros((8, 4), jnp.float16)


def arguments(**changes):
    values = dict(
        x=jnp.zeros((8, 4)), w1=jnp.zeros((2, 4, 6)), w2=jnp.zeros((2, 6, 4)), group_sizes=jnp.array([3, 5])
    )
    return values | changes


def narrow(dtype):
    return {name: jnp.zeros(shape, dtype) for name, shape in {"w1": (2, 4, 6), "w2": (2, 6, 4)}.items()}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(x=jnp.zeros(8)), ValueError, r"x must be \(R, H\), got 1 axes: x \(8,\)"),
        (dict(w2=jnp.zeros((2, 4, 6))), ValueError, r"w2 must be \(E, I, H\) with I = 6, got I = 4"),
        (dict(w1=jnp.zeros((3, 4, 6))), ValueError, r"w2 must be .* with E = 3, got E = 2"),
        (dict(group_sizes=jnp.array([1, 2, 3])), ValueError, r"group_sizes must be \(E\) with E = 2"),
        (dict(probs=jnp.zeros(7)), ValueError, r"probs must be \(R\) with R = 8, got R = 7"),
        (dict(b1=jnp.zeros((2, 4))), ValueError, r"b1 must be \(E, I\) with I = 6"),
        (dict(b2=jnp.zeros((2, 6))), ValueError, r"b2 must be \(E, H\) with H = 4"),
        (dict(x=jnp.zeros((8, 4), jnp.int8)), TypeError, "x must be bfloat16, float16 or float32, got int8"),
        (dict(w1=jnp.zeros((2, 4, 6), jnp.bfloat16)), TypeError, r"w1\.astype\(x\.dtype\)"),
        (dict(x=HALF, w1=jnp.zeros((2, 4, 6), jnp.float16)), TypeError, "w2 must have w1's dtype float16"),
        (dict(probs=jnp.zeros(8, jnp.int32)), TypeError, "probs must be float32"),
        (dict(b1=jnp.zeros((2, 6), jnp.int32)), TypeError, "b1 must be float32"),
        (dict(group_sizes=jnp.array([3.0, 5.0])), TypeError, "group_sizes must be integers, got float32"),
        (dict(group_sizes=jnp.array([9, -1])), ValueError, "not be negative, got -1 for expert 1 of 2"),
        (dict(group_sizes=np.array([3, 6])), ValueError, "sum to at most R = 8, .* got 9 over 2 experts"),
        (dict(implementation="referense"), ValueError, "'mosaic' or 'reference'; did you mean 'reference'"),
        (dict(implementation="xla"), ValueError, "'mosaic' or 'reference'$"),
        (dict(grad_dtype=jnp.bfloat16), TypeError, "must be float32 or x's dtype float32, got bfloat16"),
        (
            dict(x=HALF, grad_dtype=jnp.float32, **narrow(jnp.float16)),
            TypeError,
            "grad_dtype=float32 needs float32 weights, got float16: .* or grad_accumulators",
        ),
        (
            dict(grad_accumulators=[jnp.zeros((2, 4, 6)), jnp.zeros((2, 6, 4))]),
            ValueError,
            "must be a tuple of two arrays",
        ),
        (dict(grad_accumulators=(jnp.zeros((2, 4, 6)),)), ValueError, "must be a tuple of two arrays"),
        (
            dict(grad_accumulators=(jnp.zeros((2, 4, 6)), jnp.zeros((2, 4, 6)))),
            ValueError,
            r"grad_accumulators\[1\] must be \(E, I, H\) with I = 6, got I = 4",
        ),
        (
            dict(grad_accumulators=tuple(narrow(jnp.bfloat16).values())),
            TypeError,
            "grad_accumulators must be float32, got bfloat16",
        ),
        (
            dict(grad_accumulators=tuple(narrow(jnp.float32).values()), grad_dtype=jnp.bfloat16),
            TypeError,
            "grad_dtype must be None or float32, got bfloat16",
        ),
        (
            dict(w1=jnp.zeros((0, 4, 6)), w2=jnp.zeros((0, 6, 4)), group_sizes=jnp.zeros(0, jnp.int32)),
            ValueError,
            "at least one expert",
        ),
    ],
)
def test_wrong_arguments_are_told_at_once(changes, error, message):
    with pytest.raises(error, match=message):
        grouped_mlp(**arguments(**changes))


def test_group_sizes_that_are_traced_are_not_looked_at():
    """They cannot be: too many rows are cut off, and negative ones are the caller's promise."""
    y = jax.jit(grouped_mlp)(**arguments(group_sizes=jnp.array([3, 6])))
    assert y.shape == (8, 4)


def shapes(dtype=jnp.bfloat16, experts=8, width=128, hidden=192):
    return jax.ShapeDtypeStruct((1024, width), dtype), jax.ShapeDtypeStruct((experts, width, hidden), dtype)


def on(kind, platform="cuda"):
    """A device that is told by its name only, as where a program is compiled ahead of time."""
    device = AbstractDevice(device_kind=kind, num_cores=132, platform=platform)
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


@pytest.mark.parametrize(
    "kind",
    [
        "NVIDIA H200",
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H100 PCIe",
        "NVIDIA H800",
        "NVIDIA H20",
        "NVIDIA GH200 480GB",
        "NVIDIA H100-SXM5-80GB",
    ],
)
def test_the_kernels_serve_hopper(kind):
    with on(kind):
        assert str(choose_implementation(*shapes(jnp.float16))) == f"mosaic: the fused kernels run on {kind}"


@pytest.mark.parametrize(
    ("kind", "platform"),
    [
        ("NVIDIA A100-SXM4-40GB", "cuda"),
        ("NVIDIA B200", "cuda"),
        ("NVIDIA GB200", "cuda"),
        ("NVIDIA GeForce RTX 4090", "cuda"),
        ("TPU v5e", "tpu"),
        ("NVIDIA H200", "cpu"),  # a name is no GPU
    ],
)
def test_the_reference_serves_every_other_device_and_says_so(kind, platform):
    with on(kind, platform):
        chosen = choose_implementation(*shapes())
        assert chosen.name == "reference"
        assert chosen.reason == f"it needs a GPU of compute capability 9.0 (Hopper), got {kind}"


LIMITS = {
    "float32": (shapes(jnp.float32), "x must be bfloat16 or float16 for the tensor cores, got float32"),
    "width": (shapes(width=96), "H must be a multiple of 64, got H = 96"),
    "hidden": (shapes(hidden=1000), "I must be a multiple of 64, got I = 1000"),
    "no width": (shapes(width=0), "H must be a multiple of 64, got H = 0"),
    "experts": (shapes(experts=513), "there must be at most 512 experts, got E = 513"),
}


@pytest.mark.parametrize(("case", "reason"), LIMITS.values(), ids=LIMITS)
def test_limits_of_the_kernels_send_to_the_reference_or_raise(case, reason):
    x, w1 = case
    with on("NVIDIA H200"):
        chosen = choose_implementation(x, w1)
        assert (chosen.name, chosen.reason) == ("reference", reason)
        call = jax.eval_shape  # traces, as jit would
        experts, width, hidden = w1.shape
        rest = jax.ShapeDtypeStruct((experts, hidden, width), w1.dtype), jnp.zeros(experts, jnp.int32)
        with pytest.raises(NotImplementedError) as told:
            call(lambda *a: grouped_mlp(*a, implementation="mosaic"), x, w1, *rest)
        assert str(told.value) == (
            f'grouped_mlp: implementation="mosaic" cannot do this case: {reason}; '
            'pass implementation="reference" or None'
        )
        assert call(grouped_mlp, x, w1, *rest).shape == x.shape


def test_widest_case_within_the_limits_is_served():
    with on("NVIDIA H200"):
        assert choose_implementation(*shapes(experts=512, width=64, hidden=64)).name == "mosaic"


def test_without_a_gpu_none_gives_the_reference_and_the_kernels_say_what_they_need():
    if jax.default_backend() != "cpu":
        pytest.skip("tells what happens on a CPU")
    x, w1, w2 = jnp.ones((8, 64), jnp.bfloat16), *(jnp.ones((2, 64, 64), jnp.bfloat16),) * 2
    chosen = choose_implementation(x, w1)
    assert (chosen.name, chosen.reason) == (
        "reference",
        "it needs a GPU of compute capability 9.0 (Hopper), got cpu",
    )
    y = [grouped_mlp(x, w1, w2, jnp.array([3, 4]), implementation=name) for name in (None, "reference")]
    assert np.asarray(y[0]).tobytes() == np.asarray(y[1]).tobytes()
    assert y[0][:7].all()
    with pytest.raises(NotImplementedError, match=r"needs a GPU of compute capability 9\.0 .* got cpu; pass"):
        grouped_mlp(x, w1, w2, jnp.array([3, 4]), implementation="mosaic")


def test_the_interpreter_counts_as_a_device():
    with interpreting():
        assert str(choose_implementation(*shapes())) == "mosaic: the fused kernels run on the interpreter"
        assert choose_implementation(*shapes(jnp.float32)).name == "reference"
