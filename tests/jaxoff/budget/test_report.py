"""The table of a plan: a row for every value, where it comes from, and sums that add up."""

import dataclasses
import inspect
import os

import jax
import jax.numpy as jnp
import scipy.optimize

import jaxoff

LAYERS, WIDTH, HEADS, HIDDEN, VOCABULARY = 6, 4096, 32, 16384, 32000
TOKENS = jax.ShapeDtypeStruct((4, 4096), "int32")


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, "bfloat16")


def plan_within(nbytes, step, *args):
    return jaxoff.plan(step, *args, device_bytes=nbytes, compiled=False)


def decoder_layer(x, w):
    """A layer of a decoder, without names."""
    heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
    q, k, v = (part.reshape(heads) for part in jnp.split(x @ w["qkv"], 3, axis=2))
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + attended.reshape(x.shape) @ w["o"]
    with jax.named_scope("mlp"):
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None


def decoder_loss(w, tokens):
    x = w["embedding"][tokens]
    x, _ = jax.lax.scan(jax.checkpoint(decoder_layer, prevent_cse=False), x, w["layers"])
    logits = (x @ w["embedding"].T).astype(jnp.float32)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1).mean()


def decoder_weights():
    layers = dict(
        qkv=struct(LAYERS, WIDTH, 3 * WIDTH),
        o=struct(LAYERS, WIDTH, WIDTH),
        up=struct(LAYERS, WIDTH, HIDDEN),
        down=struct(LAYERS, HIDDEN, WIDTH),
    )
    return dict(embedding=struct(VOCABULARY, WIDTH), layers=layers)


def test_each_product_without_a_name_has_a_row_and_a_placement_of_its_own():
    plan = plan_within(40e9, jax.value_and_grad(decoder_loss), decoder_weights(), TOKENS)
    lines, first = inspect.getsourcelines(decoder_layer)
    at = {
        text: first + i
        for i, line in enumerate(lines)
        for text in ("qkv", "attention(", "up")
        if text in line
    }
    rows = [(v.value, v.placement, v.source) for v in plan.values if v.value.endswith("dot_general")]
    assert [row[:2] for row in rows] == [
        ("mlp:dot_general", "save"),
        ("BTNH,BSNH->BNTS:dot_general", "recompute"),  # the logits of attention, 51.5 GB
    ]
    assert f"test_report.py:{at['up']} " in rows[0][2] and f"test_report.py:{at['attention(']} " in rows[1][2]
    assert not any(v.is_named for v in plan.values)
    assert all("test_report.py:" in v.source for v in plan.values)  # the layer's input, too
    assert len({(v.value, v.shape, v.source) for v in plan.values}) >= 6


def layer(x, w):
    return x + jnp.tanh(jaxoff.name(x, "in") @ w), None


def two_stacks(first, second, x):
    x = jax.lax.scan(layer, x, first)[0][:, :512]
    return jax.lax.scan(layer, x, second)[0].astype(jnp.float32).mean()


def test_a_name_in_two_stacks_is_placed_in_each_and_the_rows_add_up():
    args = struct(12, 1024, 1024), struct(12, 512, 512), struct(65536, 1024)
    plan = plan_within(3e9, jax.grad(two_stacks, argnums=(0, 1)), *args)
    kept = {v.shape: v.placement for v in plan.values if v.value in ("in", "carry")}
    assert kept == {"bfloat16[65536, 1024]": "save", "bfloat16[65536, 512]": "offload"}
    assert plan.host_bytes == sum(v.nbytes for v in plan.values if v.placement == "offload")
    assert plan.policy is None  # no list of names says this


def test_layers_within_microbatches_are_found_and_a_plan_of_nothing_has_no_empty_table():
    w, x = struct(16, 1024, 1024), struct(4, 8192, 1024)

    def loss(w, x):
        return jax.lax.scan(layer, x, w)[0].astype(jnp.float32).mean()

    def step(w, x):
        grads, _ = jax.lax.scan(lambda g, x: (g + jax.grad(loss)(w, x), None), jnp.zeros_like(w), x)
        return w - grads

    rows = [(v.value, v.count, v.placement) for v in plan_within(1e9, step, w, x).values]
    assert ("in", 16, "save") in rows
    text = str(plan_within(1e9, loss, w, struct(8192, 1024)))
    assert text.lstrip().startswith("estimated peak") and "No value is placed" in text


def test_a_plan_says_why_memory_is_left():
    plan = plan_within(40e9, jax.value_and_grad(decoder_loss), decoder_weights(), TOKENS)
    sentence = "The rest of the budget is left: no faster placements were found that fit."
    assert "The rest" not in str(plan)  # a part of the budget is left for what an estimate does not see
    left = dataclasses.replace(plan, peak_bytes=0.5 * plan.device_bytes, is_fastest=False, is_compiled=True)
    assert sentence in str(left)
    assert "by the model of time" in str(dataclasses.replace(left, is_fastest=True))
    assert "The rest" not in str(dataclasses.replace(left, peak_bytes=0.95 * plan.device_bytes))


def test_what_the_solver_prints_is_no_part_of_the_output(monkeypatch, capfd):
    """A plan as JSON is read from the standard output, to which HiGHS prints a line of its own."""
    solve = scipy.optimize.milp

    def print_and_solve(*args, **kwargs):
        os.write(1, b"of the solver\n")
        return solve(*args, **kwargs)

    monkeypatch.setattr(scipy.optimize, "milp", print_and_solve)
    plan = plan_within(40e9, jax.value_and_grad(decoder_loss), decoder_weights(), TOKENS)
    print(plan.device)
    printed = capfd.readouterr()
    assert printed.out == f"{plan.device}\n"
    assert "of the solver" in printed.err


def test_values_of_a_condition_in_a_layer_are_those_of_its_equations():
    def layer(x, w):
        def attend(x):
            return x + jnp.tanh(x @ w["up"]) @ w["down"]

        return jax.lax.cond(w["keep"] > 0, attend, lambda x: x, x), None

    def loss(w, x):
        return (jax.lax.scan(layer, x, w)[0].astype(jnp.float32) ** 2).mean()

    w = {"up": struct(8, 1024, 4096), "down": struct(8, 4096, 1024), "keep": struct(8)}
    values = plan_within(1e9, jax.value_and_grad(loss), w, struct(8192, 1024)).values
    inside = {v.value: v.source for v in values}
    assert "dot_general" in inside and not any(value.startswith("cond/") for value in inside)
    assert "test_report.py" in inside["dot_general"] and "attend" in inside["dot_general"]
