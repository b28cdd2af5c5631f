"""What `jaxoff.jit` makes of a program, read from what is compiled for an H200."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import pytest

import jaxoff
from jaxoff._layers.scan import scan_by_strategy
from pallas_kernels import grouped_mlp
from tests.aot.programs import LAYERS, layer_with_a_norm
from tests.recipes import jit_in_order
from tests.repeated_steps import REPEATED_STEPS, step_of_list

pytestmark = pytest.mark.aot

ROWS, WIDTH, HIDDEN = 4096, 1024, 4096
ACT_NBYTES, X_NBYTES = 2 * ROWS * HIDDEN, 2 * ROWS * WIDTH
POLICY = jaxoff.policy(offload=["x_in", "mlp_in"])
CONCURRENT = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
# These layers are too small for a real link to hide their copies.
FAST_LINK = jaxoff.Device(flops=650e12, memory_gbps=4000, d2h_gbps=1000, h2d_gbps=1000)


def layer(x, w):
    x = jaxoff.name(x, "x_in")
    x = jaxoff.name(x + jnp.tanh(x @ w["mix"]), "mlp_in")
    return x + jnp.square(jax.nn.relu(x @ w["up"])) @ w["down"], None


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def weights(*lead):
    shapes = {"mix": (WIDTH, WIDTH), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    return {name: struct(*lead, *shape) for name, shape in shapes.items()}


def scanned(policy, strategy="captured"):
    def loss(w, x):
        return scan_by_strategy(layer, x, w, policy=policy, strategy=strategy)[0].astype(jnp.float32).sum()

    return jax.value_and_grad(loss, (0, 1))


def one_by_one(policy):
    def loss(w, x):
        return jaxoff.layers(lambda w, x: layer(x, w)[0], x, w, policy=policy).astype(jnp.float32).sum()

    return jax.value_and_grad(loss, (0, 1))


@functools.cache
def compiled(kind, policy, overlapped=True, **options):
    fun = {"scan": scanned, "layers": one_by_one}[kind](policy)
    given = weights(LAYERS) if kind == "scan" else [weights() for _ in range(LAYERS)]
    stock = jax.jit(fun, compiler_options=options or None)
    jitted = jit_in_order(fun, device=FAST_LINK) if overlapped else stock
    program = jaxoff.target("h200").compile(jitted, given, struct(ROWS, WIDTH))
    return program, getattr(jitted, "options", options)


def facts(kind, policy, overlapped=True, **options):
    program, chosen = compiled(kind, policy, overlapped, **options)
    return jaxoff.verify(program, compiler_options=chosen)


def concurrent(policy):
    """The same layers in stock order, with the graphs' edges by data."""
    return facts("scan", policy, False, **CONCURRENT)


def test_layers_in_a_loop_overlap():
    ours = facts("scan", POLICY)
    assert ours.findings == ()
    assert ours.scheduling_mode == "CONCURRENT"
    assert ours.d2h_bytes == ours.h2d_bytes == LAYERS * 2 * X_NBYTES
    assert ours.host_bytes == (LAYERS + 1) * 2 * X_NBYTES  # each stack has a spare row
    assert all(copy.via == "dma" and copy.is_async and copy.overlaps for copy in ours.copies)


def test_the_first_layers_in_a_loop_of_their_own_overlap():
    ours = facts("scan", jaxoff.FirstLayers(4, POLICY, POLICY.on_device()))
    assert ours.findings == ()
    assert ours.d2h_bytes == ours.h2d_bytes == 4 * 2 * X_NBYTES
    assert ours.host_bytes == (4 + 1) * 2 * X_NBYTES
    assert all(copy.via == "dma" and copy.is_async and copy.overlaps for copy in ours.copies)


def test_two_loops_read_and_write_one_stack():
    saved = POLICY.on_device()
    two = jaxoff.FirstLayers(3, saved, saved)
    assert facts("scan", two).device_temp_bytes <= facts("scan", saved).device_temp_bytes + X_NBYTES


@pytest.mark.long
def test_in_stock_order_two_loops_copy_their_rows_of_weights_and_gradients():
    saved = POLICY.on_device()
    two = jaxoff.FirstLayers(3, saved, saved)
    stacks = LAYERS * 2 * WIDTH * (WIDTH + 2 * HIDDEN)
    stock = facts("scan", two, False).device_temp_bytes
    assert stock >= facts("scan", saved, False).device_temp_bytes + 0.8 * stacks


def test_stacks_are_not_filled_with_zeros_first():
    """XLA by itself writes every stack of a loop before its rows: of gradients, and of what is saved."""

    def fills(program):
        stacks = [
            rf"bf16\[{LAYERS},{rows},{columns}\]" for rows, columns in ((WIDTH, HIDDEN), (HIDDEN, WIDTH))
        ]
        return len(re.findall(rf"= (?:{'|'.join(stacks)})\S* broadcast\(", program.as_text()))

    assert fills(compiled("scan", POLICY)[0]) == 0
    assert fills(compiled("scan", POLICY, False, **CONCURRENT)[0]) == 2
    assert fills(compiled("scan", POLICY.on_device())[0]) == 0
    assert fills(compiled("scan", POLICY.on_device(), False)[0]) >= 2


def test_the_gradient_of_an_embedding_is_filled_with_zeros_behind_the_loops():
    """Of a constant alone, it may be filled at any time, and its memory is taken from the beginning."""
    vocab = 16 * HIDDEN

    def loss(w, table, tokens):
        x = jaxoff.scan(layer, table[tokens], w, policy=POLICY)[0]
        return jnp.square(x.astype(jnp.float32)).sum()

    def filled_with(jit):
        args = weights(LAYERS), struct(vocab, WIDTH), jax.ShapeDtypeStruct((ROWS,), jnp.int32)
        program = jaxoff.target("h200").compile(jit(jax.value_and_grad(loss, (0, 1))), *args)
        return re.findall(rf"= \w+\[{vocab},{WIDTH}\]\S* broadcast\(%([a-z]+)", program.as_text() or "")

    assert filled_with(jax.jit) == ["constant"]
    assert filled_with(jit_in_order) == ["param"]


def test_layers_in_a_loop_hold_less_than_in_stock_order():
    """An activation less at once, and what was moved is off the device."""
    ours, stock, saved = facts("scan", POLICY), concurrent(POLICY), facts("scan", POLICY.on_device(), False)
    assert ours.device_temp_bytes + ACT_NBYTES <= stock.device_temp_bytes
    assert ours.device_temp_bytes + 0.9 * ours.d2h_bytes <= saved.device_temp_bytes


def test_saved_layers_in_a_loop_hold_less_than_in_stock_order():
    """An activation less at once, under the same options."""
    saved = POLICY.on_device()
    assert "xla_gpu_command_buffer_scheduling_mode" not in compiled("scan", saved)[1]
    ours, stock = facts("scan", saved), facts("scan", saved, False)
    assert ours.device_temp_bytes + ACT_NBYTES <= stock.device_temp_bytes


def test_the_gradient_of_a_head_does_not_keep_logits_through_the_backward_loop():
    """The loop needs none of it, so that a graph with edges by data alone would leave it for later."""
    vocab = 16 * HIDDEN

    def loss(policy):
        def compute(w, head, x):
            x = jaxoff.scan(layer, x, w, policy=policy)[0]
            logits = (x @ head).astype(jnp.float32)
            return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[:, 0])

        return jax.value_and_grad(compute, (0, 1))

    def temp_bytes(jitted):
        args = weights(LAYERS), struct(WIDTH, vocab), struct(ROWS, WIDTH)
        return jaxoff.target("h200").compile(jitted, *args).memory_analysis().temp_size_in_bytes

    ours = temp_bytes(jit_in_order(loss(POLICY), device=FAST_LINK))
    saved = temp_bytes(jax.jit(loss(POLICY.on_device())))
    assert ours <= saved - 2 * X_NBYTES, (ours, saved)


def test_layers_one_after_the_other_hold_less_and_their_copies_stand_apart():
    ours, stock = facts("layers", POLICY), facts("layers", POLICY, False)
    # XLA folds a copy and its return where the last layer ends and its backward pass begins.
    moved = LAYERS * 2 * X_NBYTES
    assert moved - 2 * X_NBYTES <= ours.d2h_bytes == ours.h2d_bytes <= moved
    assert 3 * ours.device_temp_bytes < stock.device_temp_bytes
    assert all(copy.is_async for copy in ours.copies)
    exposed = [copy for copy in ours.copies if not copy.overlaps]
    assert len(exposed) <= 1, exposed


def test_a_product_that_is_saved_and_read_is_computed_once():
    """XLA by itself computes it a second time, in its place in the stack."""

    def body(x, w):
        x = jaxoff.name(x, "x_in")
        act = jaxoff.name(x @ w["up"], "act")
        return x + jnp.square(jax.nn.relu(act)) @ w["down"], None

    def loss(w, x):
        policy = jaxoff.policy(offload=["x_in"], save=["act"])
        return jaxoff.scan(body, x, w, policy=policy)[0].astype(jnp.float32).sum()

    given = weights(LAYERS)
    cublas = {"xla_gpu_enable_triton_gemm": False}
    jitted = jit_in_order(jax.value_and_grad(loss, (0, 1)), device=FAST_LINK, compiler_options=cublas)
    program = jaxoff.target("h200").compile(
        jitted, {name: given[name] for name in ("up", "down")}, struct(ROWS, WIDTH)
    )
    assert program.as_text().count('custom_call_target="__cublas') == 2 + 4


@pytest.mark.long
def test_rows_of_experts_are_not_converted_at_once():
    """Each waits for the kernel before its own: a small value between them may be known before that."""
    experts, width, hidden = 8, 256, 512

    def body(x, w):
        up, down = (leaf.astype(x.dtype) for leaf in w)
        sizes = jnp.sum(jnp.arange(experts) == (x[:, :1] > 0), axis=0, dtype=jnp.int32)
        return x + grouped_mlp(jaxoff.name(x, "x_in"), up, down, sizes, implementation="mosaic"), None

    def loss(w, x):
        return jaxoff.scan(body, x, w, policy=jaxoff.policy(save=["x_in"]))[0].astype(jnp.float32).sum()

    def rows(*shape):
        return jax.ShapeDtypeStruct((LAYERS, experts, *shape), jnp.float32)

    jitted = jit_in_order(jax.value_and_grad(loss, (0, 1)))
    given = (rows(width, hidden), rows(hidden, width)), struct(4096, width)
    text = jaxoff.target("h200").compile(jitted, *given).as_text()
    row = re.compile(rf"bf16\[1,{experts},(?:{width},{hidden}|{hidden},{width})\]")
    made = [row.findall(line.split(" fusion(")[0]) for line in text.splitlines() if " fusion(" in line]
    assert sum(map(len, made)) >= 3, "weights are converted in each pass, or the test shows nothing"
    assert max(map(len, made)) == 1


def test_a_norm_is_the_same_kernels_where_its_input_moves():
    """A statistic that others wait for would be a result of its own, computed in another order."""

    def kernels(policy):
        def loss(w, x):
            return jaxoff.scan(layer_with_a_norm, x, w, policy=policy)[0].astype(jnp.float32).sum()

        jitted = jit_in_order(jax.value_and_grad(loss), device=FAST_LINK)
        program = jaxoff.target("h200").compile(jitted, weights(LAYERS), struct(ROWS, WIDTH))
        return len(re.findall(rf"= f32\[{ROWS}[,\]].* fusion\(", program.as_text() or ""))

    moved = jaxoff.policy(offload=["x_in"])
    assert kernels(moved) == kernels(moved.on_device()) > 0


def test_a_plain_loop_is_left_to_xla():
    program = jaxoff.target("h200").compile(
        jit_in_order(scanned(POLICY, strategy="plain")), weights(LAYERS), struct(ROWS, WIDTH)
    )
    stock, _ = compiled("scan", POLICY, False)
    assert jaxoff.verify(program).device_temp_bytes == jaxoff.verify(stock).device_temp_bytes
    assert {finding.code for finding in jaxoff.verify(program).findings} == {"copy-not-overlapped"}


def compile_and_verify(step, *args, **options):
    jitted = jaxoff.jit(step, **options)
    compiled = jaxoff.target("h200").compile(jitted, *args)
    return jitted, compiled, jaxoff.verify(compiled, compiler_options=jitted.options)


@pytest.mark.parametrize("first", [0, 1])
def test_a_carried_counter_leaves_copies_to_the_host_by_dma(first):
    """XLA would make one counter of it and of the loop's own, and lose the number of iterations."""

    def loss(w, x):
        def body(carry, _):
            x, count = carry
            x = jaxoff.name(x, "x_in")
            angle = jnp.sin(count.astype(jnp.float32) * 1e-3).astype(x.dtype)
            return (x + jnp.tanh(x @ w) @ w.T + angle, count + 1), None

        body = jax.checkpoint(body, policy=jaxoff.policy(offload=["x_in"]), prevent_cse=False)
        (x, _), _ = jax.lax.scan(body, (x, jnp.int32(first)), None, length=LAYERS)
        return x.astype(jnp.float32).var()

    args = struct(WIDTH, WIDTH), struct(ROWS, WIDTH)
    _, _, facts = compile_and_verify(jax.grad(loss), *args, recipe="concurrent", device=FAST_LINK)
    assert facts.copies
    assert all(copy.via == "dma" for copy in facts.copies)
    assert facts.d2h_bytes in [layers * X_NBYTES for layers in (LAYERS - 1, LAYERS)]


@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_by_xla_holds_less_than_in_stock_order(is_causal):
    """Its gradient is rounded once for two products, and its mask is made in the kernels that read it."""
    batch, length, heads, head = 4, 1024, 16, 64
    scores = batch * heads * length * length

    def loss(w, x):
        def body(x, w):
            x = jaxoff.name(x, "x_in")
            q, k, v = jnp.moveaxis((x @ w["qkv"]).reshape(batch, length, 3, heads, head), 2, 0)
            mixed = jax.nn.dot_product_attention(q, k, v, is_causal=is_causal)
            return x + mixed.reshape(x.shape) @ w["out"], None

        body = jax.checkpoint(body, policy=jaxoff.policy(offload=["x_in"]), prevent_cse=False)
        return (jax.lax.scan(body, x, w)[0].astype(jnp.float32) ** 2).mean()

    width = heads * head
    args = {"qkv": struct(4, width, 3 * width), "out": struct(4, width, width)}, struct(batch, length, width)
    _, stock, _ = compile_and_verify(jax.grad(loss), *args, recipe="stock")
    _, ours, _ = compile_and_verify(jax.grad(loss), *args, recipe="ordered")
    temporaries = [c.memory_analysis().temp_size_in_bytes for c in (stock, ours)]
    assert temporaries[1] < temporaries[0] - scores
    # Two float32 arrays of scores at most, and one in bfloat16, with the rest of a layer.
    assert temporaries[1] < 2.5 * 4 * scores


@pytest.mark.filterwarnings("ignore:offload-vanished:UserWarning")  # XLA leaves a sixth in place
def test_the_gradient_of_a_scale_behind_a_product_has_its_turn():
    """Else all layers' products, recomputed for it alone, come at the end, and hold their operands."""

    policy = jaxoff.policy(offload=["x_in"])

    def loss(w, x, scaled):
        for i in range(LAYERS):
            own = jax.tree.map(lambda a, i=i: a[i], w)
            x = jax.checkpoint(functools.partial(layer_with_scale, scaled=scaled), policy=policy)(x, own)
        return x.astype(jnp.float32).var()

    def layer_with_scale(x, w, *, scaled):
        x = jaxoff.name(x, "x_in")
        out = jax.nn.gelu(x @ w["up"]) @ w["down"]
        return x + (w["scale"] * out if scaled else out)

    args = weights(LAYERS) | {"scale": struct(LAYERS, WIDTH)}, struct(ROWS, WIDTH)
    peaks = [
        compile_and_verify(
            jax.grad(functools.partial(loss, scaled=scaled)), *args, recipe="ordered", device=FAST_LINK
        )[1]
        .memory_analysis()
        .temp_size_in_bytes
        for scaled in (False, True)
    ]
    assert peaks[1] < peaks[0] + 2 * ACT_NBYTES


@pytest.mark.parametrize("repeated", REPEATED_STEPS)
def test_layers_in_a_list_overlap_within_other_loops_and_conditions(repeated):
    """For example, in a loop over microbatches. `jax.jit` waits for these reloads."""

    def layer(x, w):
        h = jaxoff.name(jax.nn.relu(jaxoff.name(x, "x") @ w["up"]), "h")
        return x + jnp.tanh(h @ w["down"])

    def run(policy):
        step = functools.partial(step_of_list, jax.checkpoint(layer, policy=policy))
        return functools.partial(REPEATED_STEPS[repeated], step)

    layers, width, rows = 8, 4096, 16384
    w = {"up": struct(width, 4 * width), "down": struct(4 * width, width)}
    args, target = ([w] * layers, struct(rows, width)), jaxoff.target("h100")
    policy = jaxoff.policy(offload=["x", "h"])
    step, twin = jaxoff.jit(run(policy)), target.compile(jax.jit(run(policy.on_device())), *args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some copies vanish, and the step says so
        found = jaxoff.verify(target.compile(step, *args), compiler_options=step.options)
    assert found.device_peak_bytes < 0.95 * jaxoff.verify(twin).device_peak_bytes
    assert found.host_bytes >= 2 * rows * 4 * width * 2
    assert all(copy.overlaps for copy in found.copies if copy.nbytes > X_NBYTES // 4)
