"""Whole train steps in other people's styles: `jaxoff.jit` takes no more memory than `jax.jit`."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import pytest

import jaxoff
from bench.client_steps import NAMES, PROGRAMS, Sizes, build_decoder, offload, save
from bench.clients import make_shardings
from jaxoff import FindingCode
from tests.aot.programs import QUICK

pytestmark = pytest.mark.aot

SMALL = Sizes(
    layers=4,
    width=512,
    hidden=1024,
    heads=4,
    kv_heads=2,
    head_size=128,
    vocabulary=32768,
    batch=2,
    length=512,
    source_length=512,
    experts=4,
)
# The residuals of the layers take the most memory, unlike in SMALL, where the logits do.
DEEP = Sizes(
    layers=4,
    width=256,
    hidden=512,
    heads=4,
    kv_heads=2,
    head_size=64,
    vocabulary=2048,
    batch=64,
    length=128,
    source_length=128,
    experts=4,
)
# XLA's GPU compiler refuses to offload in a scan inside of a scan; jaxoff.jit merges the two.
REFUSED = {"groups"}
ON_H200 = {"equimo", "haiku", "mamba2"}


def compile_step(target, step, transform):
    """The function of the transform, the first recipe, the facts, and the texts of the warnings."""
    jitted = step.jit(transform)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lowered = target.lower(jitted, step.state, step.batch)
        first = getattr(jitted, "recipe", None)
        compiled = lowered.compile()
    facts = jaxoff.verify(compiled, compiler_options=getattr(jitted, "options", None))
    return jitted, first, facts, [str(warning.message) for warning in caught]


def count_kernels(facts):
    return sum(copy.via == "kernel" for copy in facts.copies)


def test_a_scan_in_a_scan_offloads():
    step = PROGRAMS["groups"].build(SMALL, offloads=True, attention="xla")
    jitted = step.jit(jaxoff.jit, recipe="ordered", compiler_options=QUICK)
    compiled = jaxoff.target("h100").compile(jitted, step.state, step.batch)
    facts = jaxoff.verify(compiled, compiler_options=jitted.options)
    assert facts.d2h_bytes == facts.h2d_bytes > 0
    assert all(copy.overlaps for copy in facts.copies)


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_step_takes_no_more_memory_and_says_what_it_does(name):
    pytest.importorskip(PROGRAMS[name].package)
    target, program = jaxoff.target("h200" if name in ON_H200 else "h100"), PROGRAMS[name]
    offloading, saving = (program.build(DEEP, offloads=moves, attention="xla") for moves in (True, False))
    _, _, twin, _ = compile_step(target, saving, jax.jit)
    if name in REFUSED:
        with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
            compile_step(target, offloading, jax.jit)
        peaks, kernels = [twin.device_peak_bytes], 0
    else:
        _, _, stock, _ = compile_step(target, offloading, jax.jit)
        assert stock.d2h_bytes > 0
        peaks, kernels = [stock.device_peak_bytes, twin.device_peak_bytes], count_kernels(stock)

    jitted, first, facts, texts = compile_step(target, offloading, jaxoff.jit)
    assert facts.device_peak_bytes <= 1.01 * min(peaks)
    replaced = [finding for finding in jitted.findings if finding.code is FindingCode.RECIPE_REPLACED]
    assert len(replaced) == (jitted.recipe not in (first, "concurrent", "early"))
    assert all(repr(jitted.recipe) in finding.message for finding in replaced)
    assert texts == [str(finding) for finding in jitted.findings]
    assert (facts.d2h_bytes > 0) == (jitted.recipe != "saved")
    if name in REFUSED:
        assert jitted.recipe != "saved"
        assert facts.device_peak_bytes < 0.8 * twin.device_peak_bytes
    assert count_kernels(facts) <= kernels


def place(struct, sharding):
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)


@pytest.mark.parametrize("recipe", [None, "ordered"])
def test_copies_that_xla_folds_in_a_python_loop_are_said(recipe):
    def layer(w, x):
        return jnp.tanh(jaxoff.name(jnp.tanh(x @ w), "act") @ w.T) + x

    def loss(w, x):
        block = jax.checkpoint(layer, policy=jaxoff.policy(offload=["act"]))
        return functools.reduce(lambda x, w: block(w, x), w, x).sum()

    step = jaxoff.jit(jax.grad(loss), recipe=recipe)
    w, x = jax.ShapeDtypeStruct((4, 1024, 1024), "float32"), jax.ShapeDtypeStruct((4096, 1024), "float32")
    with pytest.warns(UserWarning, match="offload-vanished: the program offloads 67.11 MB, and the compiled"):
        compiled = jaxoff.target("h200").compile(step, w, x)
    assert jaxoff.verify(compiled).d2h_bytes < 0.9 * 4 * 4096 * 1024 * 4
    assert [finding.code for finding in step.findings] == [FindingCode.OFFLOAD_VANISHED]


def test_layers_of_a_list_offload_though_the_link_is_slower_than_their_kernels():
    """XLA leaves out most of the copies where kernels do not wait for the link, and nothing is won."""

    def layer(w, x):
        up, down = w
        return x + jnp.tanh(jaxoff.name(jnp.tanh(x @ up), "act")) @ down

    def gradients(policy):
        def loss(w, x):
            block = jax.checkpoint(layer, policy=policy)
            return functools.reduce(lambda x, w: block(w, x), w, x).sum()

        return jax.grad(loss)

    target, x = jaxoff.target("h200"), jax.ShapeDtypeStruct((65536, 512), "float32")
    w = [tuple(jax.ShapeDtypeStruct(shape, "float32") for shape in ((512, 2048), (2048, 512)))] * 6
    step = jaxoff.jit(gradients(jaxoff.policy(offload=["act"])))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the last layer stays on the device
        facts = jaxoff.verify(target.compile(step, w, x))
    saved = jaxoff.verify(target.compile(jax.jit(gradients(jaxoff.policy(save=["act"]))), w, x))
    act = 65536 * 2048 * 4
    assert step.recipe == "ordered"
    assert facts.d2h_bytes >= 4 * act
    assert facts.device_peak_bytes < saved.device_peak_bytes - 2.5 * act


@pytest.mark.parametrize(
    ("loop", "devices"),
    [
        ("scan", 1),
        pytest.param("python", 1, marks=pytest.mark.long),
        pytest.param("scan", 2, marks=pytest.mark.long),
    ],
)
def test_a_decoder_never_takes_more_memory(loop, devices):
    target = jaxoff.target("h100", devices=devices)
    sizes = dataclasses.replace(SMALL, batch=SMALL.batch * devices)
    offloading, saving = (
        build_decoder(sizes, policy(*NAMES), loop=loop, attention="xla") for policy in (offload, save)
    )
    state, batch, options = offloading.state, offloading.batch, {"compiler_options": QUICK}
    if devices > 1:
        of_state, of_batch = make_shardings(offloading, target.mesh((devices,), ("fsdp",)), "rows")
        state = jax.tree.map(place, state, of_state)
        batch = place(batch, of_batch)
        options["out_shardings"] = (of_state, None)

    def verify(step, transform):
        jitted = step.jit(transform, **options)
        return jitted, jaxoff.verify(target.compile(jitted, state, batch))

    _, stock = verify(offloading, jax.jit)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours, facts = verify(offloading, jaxoff.jit)
    assert ours.recipe != "concurrent"  # which takes more here
    # The recipe "saved" is the twin: it is compiled once.
    twin = facts if ours.recipe == "saved" else verify(saving, jax.jit)[1]
    assert facts.device_peak_bytes <= 1.01 * min(stock.device_peak_bytes, twin.device_peak_bytes)
    assert [str(warning.message) for warning in caught] == [str(finding) for finding in ours.findings]
    assert len(ours.findings) == (ours.recipe != "early")
    for finding in ours.findings:
        assert finding.code is FindingCode.RECIPE_REPLACED
        assert repr(ours.recipe) in finding.message
    assert (ours.recipe == "saved") == (facts.d2h_bytes == 0)


def test_saved_layers_with_attention_by_xla_take_no_more_memory():
    """Their scores, rounded once for two products, do not stand beside the saved values."""

    def layer(x, w):
        q, k, v = jnp.split((x @ w["qkv"]).reshape(*x.shape[:2], 24, 64), 3, axis=2)
        attended = jaxoff.name(jax.nn.dot_product_attention(q, k, v, is_causal=True), "attn.core")
        x = x + attended.reshape(x.shape) @ w["o"]
        return x + jaxoff.name(jax.nn.gelu(x @ w["up"]), "mlp.act") @ w["down"], None

    def loss(w, x):
        policy = jaxoff.policy(save=["attn.core", "mlp.act"])
        return jaxoff.scan(layer, x, w, policy=policy)[0].astype(jnp.float32).mean()

    shapes = {"qkv": (512, 1536), "o": (512, 512), "up": (512, 2048), "down": (2048, 512)}
    w = {name: jax.ShapeDtypeStruct((4, *shape), "bfloat16") for name, shape in shapes.items()}
    x, target, step = jax.ShapeDtypeStruct((2, 1024, 512), "bfloat16"), jaxoff.target("h200"), jax.grad(loss)
    ours = jaxoff.jit(step, compiler_options=QUICK)
    facts = jaxoff.verify(target.compile(ours, w, x))
    stock = jaxoff.verify(target.compile(jax.jit(step, compiler_options=QUICK), w, x))
    assert facts.device_peak_bytes <= 1.01 * stock.device_peak_bytes
    assert ours.recipe == "ordered"
