"""A model on a mesh of eight devices against the same on one: loss, gradients, where residuals live."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxoff
from models import LM, Config, loss_fn, optim
from models.divided import DividedModel, Layout
from models.errors import InputError
from models.mesh import AXES, MeshShape
from models.sharding import as_layers, shardings_of

SIZES = dict(
    d_model=16, num_heads=2, num_kv_heads=1, head_dim=8, d_expert=24, d_shared=24, d_ff=32, vocab_size=32
)
MODEL = dict(num_layers=4, num_experts=8, first_k_dense=0, mtp_layers=1, dtype="float32") | SIZES
# Four microbatches of eight sequences; a device never has a number of tokens that anything divides.
A, B, S = 4, 8, 5
MOVED = ("attn.norm_in", "attn.core", "moe.act")
POLICY = jaxoff.policy(offload=MOVED, save=["mlp.norm_in", "moe.probs", "head.*"])
WITHOUT_EXPERTS = jaxoff.policy(
    offload=["attn.norm_in", "attn.core", "mlp.act"], save=["mlp.norm_in", "head.*"]
)
DROPLESS = 8.0


def config(**overrides):
    return Config.preset("tiny", **(MODEL | overrides))


def tokens():
    return jax.random.randint(jax.random.key(1), (A, B, S + 1), 0, SIZES["vocab_size"])


def on(mesh, virtual=1, policy=POLICY, capacity=DROPLESS, **overrides):
    shape = MeshShape.parse(mesh)
    layout = Layout(shape, virtual, capacity)
    layout.check(config(**overrides), B, A, S)
    return DividedModel(config(**overrides), policy, layout, shape.build(jax.devices()[: shape.size]))


@functools.cache
def on_one_device(**overrides):
    """Gradients and metrics."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: LM(config(**overrides))))
    params = jax.jit(lambda: nnx.state(LM(config(**overrides), rngs=nnx.Rngs(0))))()

    def loss(params, tokens):
        value, metrics = loss_fn(nnx.merge(graph, params), tokens)
        return value, {key: x for key, x in metrics.items() if not x.ndim}

    return jax.jit(lambda p, t: optim.mean_grads(loss, p, t))(nnx.to_pure_dict(params), tokens())


def relative_error(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def check(divided, tolerance=1e-6, jit=jaxoff.jit, **overrides):
    grads, metrics = jit(divided.gradients)(jax.jit(divided.params)(), tokens())
    want_grads, want = on_one_device(**overrides)
    assert float(metrics["overflow"]) == 0.0
    for key, value in want.items():
        np.testing.assert_allclose(metrics[key], value, rtol=tolerance, atol=1e-30, err_msg=key)
    errors = jax.tree.map(relative_error, as_layers(jax.device_get(grads)), want_grads)
    worst = max(jax.tree.leaves_with_path(errors), key=lambda item: item[1])
    assert worst[1] < tolerance, worst
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(grads))


def meshes():
    """All of 8 devices, and the number of virtual stages."""
    powers = [1, 2, 4, 8]
    for pipe in (1, 2, 4):
        for data in powers:
            for fsdp in powers:
                expert, rest = divmod(8, pipe * data * fsdp)
                if not rest and expert:
                    for virtual in (1, 2):
                        yield f"data={data},fsdp={fsdp},expert={expert},pipe={pipe}", virtual


@pytest.mark.parametrize(
    ("mesh", "virtual"),
    [
        pytest.param(*mesh, marks=pytest.mark.long)
        for mesh in (("fsdp=2,expert=2,pipe=2", 2), ("data=2,pipe=4", 1))
    ],
)
def test_loss_and_gradients_with_offload(mesh, virtual):
    simple = dict(mtp_layers=0, d_shared=0)  # the long tests have all parts, and order the copies
    check(on(mesh, virtual, **simple), jit=jax.jit, **simple)


@pytest.mark.long
@pytest.mark.parametrize("policy", [None, POLICY], ids=["plain", "offload"])
@pytest.mark.parametrize(("mesh", "virtual"), list(meshes()))
def test_loss_and_gradients_on_every_mesh(mesh, virtual, policy):
    deep = dict(num_layers=8)  # as many as the most stages
    check(on(mesh, virtual, policy, **deep), **deep)


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "virtual"), [("data=2,expert=2,pipe=2", 2), ("fsdp=8", 1)])
def test_loss_and_gradients_in_16_bits(mesh, virtual):
    check(on(mesh, virtual, dtype="bfloat16"), 2e-2, dtype="bfloat16")


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "virtual"), [("data=2,pipe=4", 2), ("fsdp=8", 1)])
def test_a_model_without_experts(mesh, virtual):
    dense = dict(num_layers=8, first_k_dense=8, mtp_layers=0)
    check(on(mesh, virtual, WITHOUT_EXPERTS, **dense), **dense)


@pytest.mark.parametrize("experts", [pytest.param(True, marks=pytest.mark.long), False])
def test_parts_of_a_sequence_have_the_loss_and_gradients_of_the_whole(experts):
    """Each device has one of five tokens, and two of ten heads."""
    sizes = dict(num_heads=10, num_kv_heads=5, mtp_layers=0, num_layers=2, first_k_dense=0 if experts else 2)
    check(on("context=5", policy=POLICY if experts else WITHOUT_EXPERTS, **sizes), **sizes)


def test_a_model_of_both_kinds_of_layers():
    divided = on("fsdp=2,expert=4", num_layers=2, first_k_dense=1)
    loss, _ = jax.eval_shape(divided.loss, jax.eval_shape(divided.params), tokens()[:1])
    assert loss.shape == ()


@pytest.mark.parametrize(
    ("mesh", "virtual"),
    [("data=2,expert=2,pipe=2", 2), pytest.param("fsdp=2,expert=4", 1, marks=pytest.mark.long)],
)
def test_residuals_of_every_tick_are_on_the_host(mesh, virtual):
    """Each rank keeps those of all its ticks, of the layers of one stage; a part of the batch each."""
    divided = on(mesh, virtual, mtp_layers=0)
    shape = divided.layout.mesh
    batch = tokens() if divided.layout.is_pipelined else tokens()[:1]
    turns = A * virtual + shape.pipe - 1 if divided.layout.is_pipelined else 1
    layers = divided.config.num_layers // (shape.pipe * virtual)
    found = collections.Counter()
    shapes = jax.eval_shape(divided.params)
    for residual in jaxoff.residuals(divided.loss, shapes, batch, argnums=0, has_aux=True):
        if residual.placement == "offload":
            found[residual.name] += residual.nbytes
    local = B // shape.batch * S
    rows = local * divided.config.top_k * shape.expert  # room for all
    width = {"attn.norm_in": 16 * local, "attn.core": 16 * local, "moe.act": 24 * rows}
    assert found == {name: 4 * turns * layers * shape.size * width[name] for name in MOVED}
    saved = on(mesh, virtual, POLICY.on_device(), mtp_layers=0)
    kept = jaxoff.residuals(saved.loss, shapes, batch, argnums=0, has_aux=True)
    assert {r.placement for r in kept if r.name in MOVED} == {"save"}


def test_parameters_and_optimizer_state_are_divided():
    divided = on("fsdp=2,expert=2,pipe=2", 2)
    params = jax.eval_shape(divided.params)
    optimizer = optim.adamw(lambda step: 1e-3, weight_decay=0.1, clip=1.0)
    state = {"params": params, "optimizer": jax.eval_shape(optimizer.init, params)}
    shardings = shardings_of(state, divided.mesh, divided.layout.mesh)

    def part(x, sharding):
        return np.prod(sharding.shard_shape(x.shape)) / np.prod(x.shape)

    parts = jax.tree.map(part, state, shardings)
    (experts,) = parts["params"]["experts"]
    assert experts["mlp"]["w1"] == experts["mlp"]["w2"] == 1 / 8
    assert experts["attention"]["qkv"] == experts["mlp"]["shared"]["w1"] == 1 / 4
    assert parts["params"]["embedding"] == parts["params"]["head"] == 1 / 2
    moments = [leaf for path, leaf in jax.tree.leaves_with_path(parts["optimizer"]) if "mu" in str(path)]
    assert sorted(moments) == sorted(jax.tree.leaves(parts["params"]))


def test_gradients_are_reduced_in_float32():
    divided = on("data=2,fsdp=2,pipe=2", dtype="bfloat16")
    jaxpr = jax.make_jaxpr(divided.gradients)(jax.eval_shape(divided.params), tokens()).jaxpr
    (mapped,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map"]
    sums = [eqn for eqn in mapped.params["jaxpr"].eqns if eqn.primitive.name.startswith("psum")]
    over_data = [v.aval for eqn in sums if "data" in eqn.params["axes"] for v in eqn.invars]
    assert len(over_data) >= len(jax.tree.leaves(divided.specs))
    assert {aval.dtype for aval in over_data} == {jnp.dtype("float32")}
    assert set(mapped.params["mesh"].axis_names) == set(AXES)


@pytest.mark.parametrize(
    ("mesh", "virtual", "overrides", "message"),
    [
        ("pipe=3", 1, {}, "a multiple of 3 microbatches a step, got 4"),
        ("data=8,expert=2", 1, {}, r"data x fsdp x expert = 16, got 8 sequences"),
        ("pipe=4", 3, {}, "12 equal stages, got 4: .*num_layers=12"),
        ("pipe=2", 1, dict(first_k_dense=1), "layers of one kind.*got first_k_dense=1 of 4 layers"),
        ("expert=8", 1, dict(num_experts=12), "divided by expert = 8, got 12"),
        ("data=1", 0, {}, "--virtual is at least 1"),
        ("context=2", 1, dict(num_kv_heads=2), "tokens of a sequence are divided by context = 2, got 5"),
        ("context=5", 1, {}, "key-value heads are divided by context = 5, got 1"),
        ("context=5", 1, dict(num_heads=5, num_kv_heads=5), "without multi-token prediction.*mtp_layers=0"),
        ("context=5", 2, dict(num_heads=5, num_kv_heads=5, mtp_layers=0), "without a pipeline.*pipe=1"),
    ],
)
def test_what_cannot_be_divided_is_refused(mesh, virtual, overrides, message):
    with pytest.raises(InputError, match=message):
        Layout(MeshShape.parse(mesh), virtual).check(config(**overrides), B, A, S)


def test_a_capacity_of_nothing_is_refused():
    with pytest.raises(InputError, match="--capacity is greater than 0, got 0"):
        Layout(MeshShape(), capacity=0.0)
