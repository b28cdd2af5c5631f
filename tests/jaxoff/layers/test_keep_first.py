"""`keep_first`: the residual at the start of the backward pass stays on the device, and no other."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxoff
from jaxoff._layers.scan import scan_by_strategy
from tests.jaxoff.policy import placement
from tests.jaxoff.policy.matrix import assert_close
from tests.jaxoff.schedule.test_order import BOTH, HIDDEN, LAYERS, ROWS, WIDTH, arguments, layer

X, ACT = (ROWS, WIDTH), (ROWS, HIDDEN)  # the values of a layer, in this order
STRATEGIES = ["captured", "ordered", "plain"]


def scanned(body=layer, **options):
    def loss(w, x):
        return jnp.sum(scan_by_strategy(body, x, w, **({"policy": BOTH} | options))[0])

    return loss


def one_by_one(body=layer, **options):
    def loss(w, x):
        each = [jax.tree.map(lambda leaf, i=i: leaf[i], w) for i in range(len(jax.tree.leaves(w)[0]))]
        return jnp.sum(jaxoff.layers(lambda w, x: body(x, w)[0], x, each, **({"policy": BOTH} | options)))

    return loss


def functions_of_their_own(**options):
    def loss(w, x):
        each = [jax.tree.map(lambda leaf, i=i: leaf[i], w) for i in range(LAYERS)]
        functions = [lambda x, w=w: layer(x, w)[0] for w in each]
        return jnp.sum(jaxoff.layers(functions, x, policy=BOTH, **options))

    return loss


KINDS = {name: functools.partial(scanned, strategy=name) for name in STRATEGIES}
KINDS |= {"layers": one_by_one, "functions": functions_of_their_own}


def moved(loss, *args):
    """How often each shape goes to the host; `explain` agrees."""
    args = args or arguments()
    arrays = placement.grad_host_arrays(loss, *args)
    assert jaxoff.explain(loss, *args).host_bytes == placement.nbytes(arrays)
    return {shape: n for (shape, _), n in arrays.items()}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_the_last_value_that_moves_in_each_layer_stays(make):
    assert moved(make(keep_first=False)) == {X: LAYERS, ACT: LAYERS}
    assert moved(make(keep_first=True)) == {X: LAYERS}
    report = jaxoff.explain(make(keep_first=True), *arguments())
    placed = {(r.name, r.placement, r.rule) for r in report.residuals if r.name}
    assert placed == {
        ("x_in", "offload", "offload='x_in'"),
        ("act", "save", "offload='act', kept by keep_first"),
    }
    assert report.nbytes("save", "act") == LAYERS * ROWS * HIDDEN * 4
    assert report.findings == ()


@pytest.mark.parametrize("make", [scanned, one_by_one])
def test_results_stay_the_same(make):
    steps = [jaxoff.jit(jax.value_and_grad(make(keep_first=k), (0, 1))) for k in (True, False)]
    assert_close(*(step(*arguments()) for step in steps))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.some_cases(1)
def test_of_a_block_the_last_step_keeps_it(strategy, reverse):
    w, x = arguments()
    w = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf[:1]]), w)
    loss = scanned(strategy=strategy, reverse=reverse, block=3, keep_first=True)
    assert moved(loss, w, x) == {X: 6, ACT: 4}
    assert_close(jax.grad(loss)(w, x), jax.grad(scanned(reverse=reverse, keep_first=False))(w, x))


def wide_layer(x, w):
    x = jaxoff.name(x, "x_in")
    return x + jnp.square(jax.nn.relu(jaxoff.name(x @ w, "z"))) @ w.T, None


W = jax.ShapeDtypeStruct((4, 8192, 32768), jnp.bfloat16)
ROWS_8K = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)
X_NBYTES, Z_NBYTES = 8192 * 8192 * 2, 8192 * 32768 * 2
WIDE = jaxoff.policy(offload=["x_in", "z"])


def link(gbps):
    return jaxoff.Device(flops=650e12, memory_gbps=1e9, d2h_gbps=1e9, h2d_gbps=gbps)


def layer_ms():
    """Compute of a layer's backward pass."""
    loss = scanned(wide_layer, policy=WIDE, keep_first=False)
    return jaxoff.explain(loss, W, ROWS_8K, device=link(1e9)).traffic[1].compute_ms


AUTO = {f"{name}-{block}": (KINDS[name], block) for name in STRATEGIES for block in (1, 2)}
AUTO["layers-1"] = (one_by_one, 1)


@pytest.mark.parametrize(("make", "block"), AUTO.values(), ids=AUTO)
def test_auto_keeps_it_where_the_step_waits_with_it_and_not_without(make, block):
    def stays(gbps):
        more = {"block": block} if block > 1 else {}
        report = jaxoff.explain(make(wide_layer, policy=WIDE, device=link(gbps), **more), W, ROWS_8K)
        kept = any("keep_first" in r.rule for r in report.residuals)
        assert report.nbytes("save", "z") == (4 // block * Z_NBYTES if kept else 0)
        return kept

    both = (X_NBYTES + Z_NBYTES) / layer_ms() / 1e6
    without = (X_NBYTES + Z_NBYTES - Z_NBYTES // block) / layer_ms() / 1e6
    assert not stays(1.1 * both)
    assert stays((both + without) / 2)
    assert not stays(0.9 * without)


def test_auto_leaves_alone_what_hardly_waits():
    """A small share of a millisecond in all."""
    slow = jaxoff.Device(flops=650e12, memory_gbps=4000, d2h_gbps=50, h2d_gbps=0.1)
    assert moved(scanned(device=slow)) == {X: LAYERS, ACT: LAYERS}


def test_policies_of_jax_work_too():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["x_in", "act"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    loss = scanned(policy=policy, keep_first=True)
    assert moved(loss) == {X: LAYERS}
    (kept,) = (r for r in jaxoff.explain(loss, *arguments()).residuals if r.name == "act")
    assert (kept.placement, kept.rule.endswith("kept by keep_first")) == ("save", True)
    assert moved(scanned(policy=policy | BOTH, keep_first=True)) == {X: LAYERS}


def named_twice(shape_of_second):
    def body(x, w):
        up, down = w
        a = jaxoff.name(jnp.sin(x), "a")
        b = jaxoff.name(jnp.sin(a @ up if shape_of_second == ACT else a), "a")
        return jnp.sin(b @ down if shape_of_second == ACT else b @ up @ down), None

    return body


@pytest.mark.parametrize(
    ("second", "goes"), [(ACT, {X: LAYERS}), (X, {})], ids=["told apart by shape", "not to be told apart"]
)
def test_of_two_values_of_one_name_the_last_stays_if_they_can_be_told_apart(second, goes):
    loss = scanned(named_twice(second), policy=jaxoff.policy(offload=["a"]), keep_first=True)
    assert moved(loss) == goes


def test_what_moves_without_a_name():
    """Of the dots offloaded by te_v2 the last stays."""

    def body(x, w):
        up, down = w
        h = jnp.sin(jaxoff.name(x, "x_in") @ up)
        return jnp.sin(h @ down), None

    policy = jaxoff.policy("te_v2", min_bytes=0)
    options = dict(policy=policy, keep_first=True)
    assert moved(scanned(body, policy=policy)) == {X: 2 * LAYERS, ACT: LAYERS}
    assert moved(scanned(body, **options)) == {X: LAYERS, ACT: LAYERS}
    report = jaxoff.explain(scanned(body, **options), *arguments())
    (kept,) = (r for r in report.residuals if r.placement == "save")
    assert (kept.made_by, kept.rule) == ("dot_general", "unmarked='offload', kept by keep_first")


def test_a_name_in_a_forward_rule():
    @jax.custom_vjp
    def squared(x):
        return x * x

    def forward(x):
        x = jaxoff.name(x + 0, "sq")
        return x * x, x

    squared.defvjp(forward, lambda x, g: (2 * x * g,))

    def body(x, w):
        return squared(jaxoff.name(x, "x_in") @ w[0]) @ w[1], None

    policy = jaxoff.policy(offload=["x_in", "sq"])
    assert moved(scanned(body, policy=policy, keep_first=True)) == {X: LAYERS}


def test_the_saved_twin_and_policies_that_move_nothing_stay_as_they_are():
    for policy in (BOTH.on_device(), jaxoff.policy(recompute=["*"])):
        jaxprs = [
            str(jax.make_jaxpr(jax.grad(scanned(policy=policy, keep_first=k)))(*arguments()))
            for k in (True, False)
        ]
        assert jaxprs[0] == jaxprs[1]


def test_weights_that_the_body_closes_over_count():
    """Only their gradient reads the last value."""

    def loss(w, x):
        up, down = w[0][0], w[1][0]

        def body(x, _):
            act = jaxoff.name(jnp.sin(jaxoff.name(x, "x_in")) @ up, "act")
            return act @ down, None

        return jnp.sum(jaxoff.scan(body, x, length=LAYERS, policy=BOTH, keep_first=True)[0])

    assert moved(loss) == {X: LAYERS}


def test_a_policy_of_other_checkpoints_too_is_one_policy():
    """Rules find their names inside the layers."""

    def loss(w, x):
        policy = jaxoff.policy(offload=["x_in", "act", "head"])
        x = jaxoff.scan(layer, x, w, policy=policy, keep_first=True)[0]
        return jnp.sum(jax.checkpoint(lambda x: jnp.sin(jaxoff.name(x, "head")), policy=policy)(x))

    assert moved(loss) == {X: LAYERS + 1}
    assert jaxoff.explain(loss, *arguments()).findings == ()


def test_carries_of_any_kind_and_keys():
    def body(carry, w):
        x, count, key, none = carry
        noise = jax.random.normal(jax.random.fold_in(key, count), x.shape)
        return (layer(x, w)[0] + noise, count + 1, key, none), {"count": count}

    def loss(w, x):
        init = x, 0, jax.random.key(0), None
        return jnp.sum(jaxoff.scan(body, init, w, policy=BOTH, keep_first=True)[0][0])

    assert moved(loss) == {X: LAYERS}


def test_inside_shard_map_vmap_and_jit():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    loss = scanned(keep_first=True)

    def part(w, x):
        return lax.psum(loss(w, x), "data")

    specs = jax.P(), jax.P("data")
    sharded = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=jax.P())
    want = jax.grad(scanned(keep_first=False))(*arguments())
    assert moved(sharded) == {(4 * LAYERS, ROWS // 4, WIDTH): 1}
    assert_close(jax.grad(sharded)(*arguments()), want)
    assert moved(jax.jit(loss)) == {X: LAYERS}
    w, x = arguments()
    each = jax.vmap(jax.grad(loss), (None, 0))(w, jnp.stack([x, x]))
    assert_close(jax.tree.map(lambda g: g[0], each), want)


def test_a_forward_pass_without_a_gradient():
    def body(x, _):
        return jax.pure_callback(lambda x: x + 1, x, jaxoff.name(x, "x_in")), None

    run = functools.partial(jaxoff.scan, body, jnp.zeros(2), length=2, policy=BOTH)
    assert_close(run()[0], jnp.full(2, 2.0))
    with pytest.raises(ValueError, match="Pure callbacks do not support JVP"):
        run(keep_first=True)


@pytest.mark.parametrize("apply", [jaxoff.scan, jaxoff.layers])
def test_other_choices_are_refused(apply):
    with pytest.raises(ValueError, match="keep_first must be True, False or 'auto', got 'always'"):
        apply(layer, *reversed(arguments()), policy=BOTH, keep_first="always")
