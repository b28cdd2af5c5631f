"""`residuals` and `explain`: exact bytes, counts, rules and source lines, and how a report reads."""

import json
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxoff

W = jnp.ones((5, 16, 16))
X = jnp.ones((8, 16))


def layer(x, w):
    h = jaxoff.name(x, "x_in") @ w
    h = jaxoff.mark_offload(jnp.square(h))
    return jaxoff.name(jnp.square(h) @ w, "out"), None


def stack(policy, layer=layer):
    block = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    return lambda w, x: lax.scan(block, x, w)[0].sum()


def test_rows_of_a_scanned_stack():
    rows = jaxoff.residuals(stack(jaxoff.policy(offload=["x_in"], recompute=["out"])), W, X)
    line = layer.__code__.co_firstlineno
    got = [(r.name, r.mark, r.shape, r.dtype, r.count, r.nbytes, r.placement, r.rule) for r in rows]
    assert got == [
        ("x_in", None, (8, 16), "float32", 5, 5 * 512, "offload", "offload='x_in'"),
        (None, "offload", (8, 16), "float32", 5, 5 * 512, "offload", "mark_offload"),
    ]
    for row, offset in zip(rows, (1, 2), strict=True):
        assert row.source.endswith(f"test_residuals.py:{line + offset} (layer)")


@pytest.mark.parametrize(
    ("policy", "name", "placement", "rule"),
    [
        (jaxoff.policy(offload=["x*"]), "x_in", "offload", "offload='x*'"),
        (jaxoff.policy(save=["x_in"]), "x_in", "save", "save='x_in'"),
        (jaxoff.policy(recompute=["x_in"]), "x_in", "recompute", "recompute='x_in'"),
        (jaxoff.policy(), "x_in", "recompute", "unmarked='recompute'"),
        (jaxoff.policy("te_v1"), "x_in", "save", "unmarked='save'"),
        (jaxoff.policy("te_v2", min_bytes=512), "x_in", "offload", "unmarked='offload'"),
        (jaxoff.policy("te_v2", min_bytes=513), "x_in", "save", "unmarked='offload', 512 < min_bytes=513"),
        (jaxoff.policy(offload=["x_in"]).on_device(), "x_in", "save", "offload='x_in', kept on the device"),
        (jaxoff.policy() | jaxoff.policy(offload=["x_in"]), "x_in", "offload", "offload='x_in'"),
        (None, "x_in", "recompute", "jax.checkpoint without a policy"),
    ],
)
def test_the_rule_that_decided(policy, name, placement, rule):
    (row,) = [r for r in jaxoff.residuals(stack(policy), W, X) if r.name == name]
    assert (row.placement, row.rule) == (placement, rule)


def test_stock_policies_are_named():
    stock = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["x_in"],
        names_which_can_be_offloaded=["out"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    (row,) = [r for r in jaxoff.residuals(stack(stock), W, X) if r.name == "x_in"]
    assert row.placement == "save" and ("SaveAndOffload" in row.rule or "policy" in row.rule)


def test_without_a_checkpoint_autograd_decides():
    def loss(w, x):
        h = jaxoff.name(x @ w, "a")
        return (h * h).sum()

    rows = jaxoff.residuals(loss, W[0], X)
    assert [(r.name, r.placement, r.rule) for r in rows] == [
        ("a", "save", "outside jax.checkpoint: autograd saves it")
    ]


def test_complex_values_may_be_offloaded_and_recomputed():
    w, x = W[0].astype(complex), X.astype(complex)

    def loss(w, x):
        x = jaxoff.name(x * 2, "a")
        return jnp.abs(jnp.sin(jaxoff.name(x @ w, "b")) * jnp.cos(x)).sum()

    rows = jaxoff.residuals(jax.checkpoint(loss, policy=jaxoff.policy(offload=["a"])), w, x)
    assert [(r.name, r.placement, r.dtype) for r in rows] == [
        ("a", "offload", "complex64"),
        ("b", "recompute", "complex64"),
    ]
    report = jaxoff.explain(jax.checkpoint(loss, policy=jaxoff.policy(offload=["a"])), w, x)
    assert (report.host_bytes, report.findings) == (x.nbytes, ())
    with pytest.raises(TypeError, match=r"cannot save complex values.*Offload or recompute"):
        jaxoff.explain(jax.checkpoint(loss, policy=jaxoff.policy(save=["a"])), w, x)


def test_the_functions_inputs_and_constants_are_not_residuals():
    constant = jnp.ones((8, 16))
    (row,) = jaxoff.residuals(lambda w, x: (jnp.sin(constant) * (x @ w)).sum(), W[0], X)
    assert row.made_by == "sin"
    assert jaxoff.residuals(lambda w, x: (constant * (x @ w)).sum(), W[0], X) == ()


def test_un_named_inputs_of_a_scanned_body_are_listed():
    (row,) = jaxoff.residuals(stack(None, lambda x, w: (jnp.square(x) @ w, None)), W, X)
    assert (row.name, row.made_by, row.count, row.nbytes, row.placement) == (
        None,
        "carry",
        5,
        5 * 512,
        "save",
    )
    assert "name it inside to move it" in row.rule


def host_bytes_in(fun, *args):
    """Bytes of the host-space arrays in a differentiated jaxpr after dead-code elimination."""
    from jax.interpreters.partial_eval import dce_jaxpr

    def of(jaxpr, times):
        total = 0
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "device_put":
                total += times * sum(
                    v.aval.size * v.aval.dtype.itemsize
                    for v in eqn.outvars
                    if v.aval.memory_space == jax.memory.Space.Host
                )
            trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            for value in jax.tree.leaves(
                list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")
            ):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    total += of(inner, times * trips)
        return total

    closed = jax.make_jaxpr(lambda *args: jax.value_and_grad(fun, tuple(range(len(args))))(*args))(*args)
    return of(dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))[0], 1)


def nested(w, x):
    inner = jax.checkpoint(layer, policy=jaxoff.policy(offload=["x_in", "out"]), prevent_cse=False)

    def group(x, w):
        return lax.scan(inner, x, w)

    return jnp.sin(lax.scan(group, x, jnp.stack([w, w]))[0]).sum()


def unrolled(w, x):
    block = jax.checkpoint(layer, policy=jaxoff.policy("te_v2", min_bytes=64))
    for i in range(3):
        x, _ = block(x, w[i])
    return x.sum()


@pytest.mark.parametrize(
    "fun",
    [
        *(
            stack(p)
            for p in (
                jaxoff.policy(offload=["*"]),
                jaxoff.policy("te_v1"),
                jaxoff.policy("te_v2", min_bytes=1),
                jaxoff.policy(save=["*"]),
            )
        ),
        nested,
        unrolled,
        jax.jit(stack(jaxoff.policy(offload=["x_in"]))),
        lambda w, x: jax.vmap(stack(jaxoff.policy(offload=["*"])), in_axes=(None, 0))(
            w, jnp.stack([x, x])
        ).sum(),
    ],
    ids=["lists", "te_v1", "te_v2", "saved", "nested scans", "unrolled", "jit", "vmap"],
)
def test_host_bytes_are_those_of_the_differentiated_program(fun):
    report = jaxoff.explain(fun, W, X)
    assert report.host_bytes == host_bytes_in(fun, W, X)
    assert report.host_bytes == sum(r.nbytes for r in report.residuals if r.placement == "offload")
    assert all(
        r.nbytes == r.count * int(np.prod(r.shape)) * np.dtype(r.dtype).itemsize for r in report.residuals
    )


def test_branches_of_a_cond_share_their_buffers():
    def body(x, w):
        return lax.cond(
            x.sum() > 0, lambda x: layer(x, w)[0], lambda x: jnp.square(jaxoff.name(x, "x_in")), x
        ), None

    rows = [
        r
        for r in jaxoff.residuals(stack(jaxoff.policy(offload=["x_in"]), body), W, X)
        if r.placement == "offload"
    ]
    assert [(r.name, r.mark, r.count, r.nbytes) for r in rows] == [
        ("x_in", None, 5, 2560),
        (None, "offload", 5, 2560),
    ]


def test_counts_multiply_through_nested_scans():
    rows = {r.name: r for r in jaxoff.residuals(nested, W, X)}
    assert rows["x_in"].count == 10 and rows["x_in"].shape == (8, 16)


def test_unrolled_layers_print_as_one_row():
    report = jaxoff.explain(unrolled, W, X)
    assert sum(r.name == "x_in" for r in report.residuals) == 3
    assert sum(line.startswith("x_in") for line in str(report).splitlines()) == 1


def test_argnums_and_aux():
    def loss(w, x):
        y = jnp.square(x @ w[0])
        return y.sum(), jnp.sin(y)

    assert len(jaxoff.residuals(loss, W, X)) > len(jaxoff.residuals(loss, W, X, has_aux=True))
    both = jaxoff.residuals(lambda a, b: (jnp.sin(a) * jnp.sin(b)).sum(), X, X)
    one = jaxoff.residuals(lambda a, b: (jnp.sin(a) * jnp.sin(b)).sum(), X, X, argnums=0)
    assert len(both) > len(one)
    with pytest.raises(ValueError, match="argnums index the 2 positional arguments, got 2"):
        jaxoff.residuals(loss, W, X, argnums=2)


def test_integers_keywords_and_pytrees():
    def loss(params, tokens, *, scale):
        return jnp.square(params["embed"][tokens] * scale).sum()

    rows = jaxoff.residuals(loss, {"embed": X}, jnp.array([1, 2]), scale=jax.ShapeDtypeStruct((), "float32"))
    assert rows and all(r.placement == "save" for r in rows)


def test_a_500b_parameter_model_is_explained_in_seconds_and_allocates_nothing():
    layers, d, ff = 60, 16384, 4 * 16384 * 2

    def big(x, w):
        x = jaxoff.name(x, "x_in")
        h = jnp.square(jnp.maximum(jaxoff.name(x @ w[0], "fc1"), 0))
        return x + jaxoff.name(h, "act") @ w[1], None

    w = (jax.ShapeDtypeStruct((layers, d, ff), "bfloat16"), jax.ShapeDtypeStruct((layers, ff, d), "bfloat16"))
    x = jax.ShapeDtypeStruct((8192, d), "bfloat16")
    assert sum(a.size for a in w) > 250e9
    start = time.perf_counter()
    report = jaxoff.explain(stack(jaxoff.policy(offload=["x_in", "act"]), big), w, x)
    assert time.perf_counter() - start < 10
    assert report.nbytes("offload", "x_in") == layers * 8192 * d * 2
    assert {f.code for f in report.findings} == {"pinned-pool-too-small"}


def test_a_value_that_is_not_needed_is_not_called_recomputed():
    def block(w, x):
        return jnp.sin(jaxoff.mark_not_offload(jaxoff.name(x @ w, "out"))) @ w.T

    rows = jaxoff.residuals(jax.checkpoint(block, policy=jaxoff.policy("te_v1")), W[0], X)
    assert {r.placement for r in rows} == {"save"} and all(r.name is None for r in rows)


def test_many_unrolled_layers_take_seconds():
    block = jax.checkpoint(lambda x, w: layer(x, w)[0], policy=jaxoff.policy(offload=["x_in"]))

    def loss(w, x):
        for i in range(100):
            x = block(x, w[i % 5])
        return x.sum()

    start = time.perf_counter()
    rows = jaxoff.explain(loss, W, X).residuals
    assert time.perf_counter() - start < 20
    assert sum(r.count for r in rows if r.name == "x_in") == 100


def test_the_report_as_a_dict():
    report = jaxoff.explain(stack(jaxoff.policy(offload=["x_in", "nothing"])), W, X)
    data = json.loads(json.dumps(report.to_dict()))
    assert data["bytes"] == {"device": 0, "host": 5120, "recompute": 0}
    assert data["bytes_by_name"]["x_in"] == {"host": 2560}
    assert data["findings"][0]["code"] == "rule-matched-nothing"
    assert data["residuals"][0]["shape"] == [8, 16]


def test_the_report_is_plain_when_not_on_a_terminal():
    text = str(jaxoff.explain(stack(jaxoff.policy(offload=["x_in"])), W, X))
    assert "\x1b" not in text and "No findings." in text and "2.56 kB" in text
    assert "float32[8, 16]" in text and "host 5.12 kB" in text


def test_the_report_is_coloured_on_a_terminal():
    from rich.console import Console

    console = Console(force_terminal=True, width=150, record=True)
    with console.capture() as capture:
        console.print(jaxoff.explain(stack(jaxoff.policy(offload=["x_in"])), W, X))
    assert "\x1b[" in capture.get() and "x_in" in capture.get()


def test_a_function_that_keeps_nothing():
    assert "keeps nothing" in str(jaxoff.explain(lambda x: x.sum(), X))


def test_importing_the_library_imports_no_table():
    code = "import sys, jaxoff; assert not {'rich', 'flax', 'typer'} & set(sys.modules), sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
