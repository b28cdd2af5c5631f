"""The language model: its names, its loss, and that a policy changes no bit of either."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxoff
from jaxoff._jaxpr import compat
from models import LM, Block, Config, loss_fn

SMALL = dict(d_model=32, num_heads=2, num_kv_heads=1, head_dim=16, d_expert=24, d_shared=40, d_ff=48)
TWO_OF_EXPERTS = dict(num_layers=2, first_k_dense=0)
ATTENTION = {"attn.norm_in", "attn.qkv_in", "attn.qkv", "attn.core", "attn.proj_in", "mlp.norm_in"}
DENSE = {"mlp.fc1_in", "mlp.act"}
EXPERTS = {"moe.router_logits", "moe.probs", "moe.in", "moe.act", "moe.combined"}
HEAD = {"head.norm_in", "head.logits"}
SHARED = {"moe.shared_fc1_in", "moe.shared_act"}


def tokens(batch, length, vocab=256):
    return jax.random.randint(jax.random.key(0), (batch, length), 0, vocab)


def programs_in(function, *args):
    """A function's program, then the scans and other sub-programs that it holds."""
    waiting = [jax.make_jaxpr(function)(*args).jaxpr]
    while waiting:
        yield (jaxpr := waiting.pop())
        waiting += [inner for eqn in jaxpr.eqns for inner in compat.sub_jaxprs(eqn)]


def names_in(function, *args):
    """Every name in a function's program."""
    eqns = (eqn for jaxpr in programs_in(function, *args) for eqn in jaxpr.eqns)
    return collections.Counter(str(eqn.params["name"]) for eqn in eqns if eqn.primitive.name == "name")


@functools.cache
def parameters(config):
    return jax.jit(lambda: nnx.state(LM(config)))()


def shapes(config, policy=None):
    """A model and its parameters without values, for what is traced alone."""
    return nnx.split(nnx.eval_shape(lambda: LM(config, policy=policy)))


def loss_of(graph):
    return lambda params, tokens: loss_fn(nnx.merge(graph, params), tokens)


def program(config, policy=None):
    graph, _ = shapes(config, policy)
    return parameters(config), loss_of(graph)


def model_of(config):
    return nnx.merge(shapes(config)[0], parameters(config))


@pytest.mark.parametrize(
    ("overrides", "moe", "want"),
    [
        ({}, False, ATTENTION | DENSE),
        ({}, True, ATTENTION | EXPERTS | SHARED),
        (dict(d_shared=0), True, ATTENTION | EXPERTS),
    ],
)
def test_names_of_each_kind_of_layer(overrides, moe, want):
    config = Config.preset("tiny", **(SMALL | overrides))
    graph, params = nnx.split(Block(config, moe=moe, rngs=nnx.Rngs(0)))
    x = jnp.ones((2, 8, config.d_model), jnp.bfloat16)
    found = names_in(lambda p, x: nnx.merge(graph, p)(x), params, x)
    assert set(found) == want
    # q, k and v are three arrays, and so are a choice and its weight two; no other value is named twice.
    assert {name: n for name, n in found.items() if n > 1} == {"attn.qkv": 3} | (
        {"moe.probs": 2} if moe else {}
    )


def test_names_of_the_whole_model():
    graph, params = shapes(Config.preset("tiny", mtp_layers=1, **SMALL))
    found = set(names_in(loss_of(graph), params, tokens(2, 9)))
    assert found == ATTENTION | DENSE | EXPERTS | SHARED | HEAD | {"mtp.norm_in", "mtp.proj_in"}


def residuals(config, policy, batch, length):
    graph, params = shapes(config, policy)
    report = jaxoff.residuals(lambda p, t: loss_of(graph)(p, t)[0], params, tokens(batch, length))
    return [r for r in report if r.placement != "recompute"]


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@functools.cache
def loss_and_gradients(config, policy):
    params, loss = program(config, policy)
    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params, tokens(2, 33))


FEW = {
    "first layers recomputed, others offloaded": jaxoff.FirstLayers(
        1, jaxoff.policy(recompute=["*"]), jaxoff.policy(offload=["*"])
    ),
}
EVERY = FEW | {
    "recompute": jaxoff.policy(recompute=["*"]),
    "first layers offloaded": jaxoff.FirstLayers(
        1, jaxoff.policy(offload=["*"]), jaxoff.policy(save=["attn.*"])
    ),
    "offload": jaxoff.policy(offload=["*"]),
    "attention saved, experts offloaded": jaxoff.policy(save=["attn.*"], offload=["moe.*", "mlp.*"]),
    "activations and inputs offloaded": jaxoff.policy(save=["moe.probs"], offload=["*.act", "attn.norm_in"]),
}


def check_placements(config, policies):
    saved = loss_and_gradients(config, jaxoff.policy(save=["*"]))
    assert all(np.asarray(g).any() for g in jax.tree.leaves(saved[1]))
    for name, policy in policies.items():
        assert bits(loss_and_gradients(config, policy)) == bits(saved), name


@pytest.mark.long
def test_placement_changes_no_bit_of_loss_and_gradients():
    config = Config.preset("tiny", dtype="float32", **TWO_OF_EXPERTS)
    check_placements(config, FEW)


@pytest.mark.long
def test_a_model_without_policy_agrees_closely():
    config = Config.preset("tiny", dtype="float32")
    plain, saved = (loss_and_gradients(config, policy) for policy in (None, jaxoff.policy(save=["*"])))
    # Without a policy XLA fuses, and so rounds, otherwise.
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(saved), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    "overrides",
    [
        dict(dtype="bfloat16"),
        dict(dtype="float32"),
        dict(dtype="bfloat16", mtp_layers=1, router="softmax", d_shared=0),
    ],
    ids=["bf16", "fp32", "bf16-mtp-softmax"],
)
def test_no_placement_changes_a_bit_of_loss_and_gradients(overrides):
    check_placements(Config.preset("tiny", **overrides), EVERY)


@pytest.mark.long
def test_presets_change_no_bit_either():
    config = Config.preset("tiny")
    saved = loss_and_gradients(config, jaxoff.policy(save=["*"]))
    for preset in ("save_all", "dots", "te_v2"):
        assert bits(loss_and_gradients(config, jaxoff.policy(preset))) == bits(saved), preset


@pytest.mark.long
def test_policies_place_differently_what_computes_the_same():
    config = Config.preset("tiny", **SMALL)
    kept = {
        kind: residuals(config, policy, batch=3, length=12)
        for kind, policy in {
            "saved": jaxoff.policy(save=["*"]),
            "moved": jaxoff.policy(offload=["*"]),
            "mixed": jaxoff.policy(offload=["moe.act"]),
            "none": jaxoff.policy(recompute=["*"]),
        }.items()
    }
    # With every name saved, no value without a name has an axis of tokens.
    assert [r for r in kept["saved"] if not r.name and any(size in (33, 66) for size in r.shape)] == []
    placed = {kind: {(r.name, r.placement) for r in found if r.name} for kind, found in kept.items()}
    # What no gradient reads is not kept: a sum, and the attention's output, which is also `attn.proj_in`.
    names = (ATTENTION | DENSE | EXPERTS | SHARED | HEAD) - {"attn.core", "moe.combined"}
    assert {name for name, _ in placed["saved"]} == names
    assert {place for _, place in placed["saved"]} == {"save"}
    assert {place for _, place in placed["moved"]} == {"offload"}
    assert {name for name, _ in placed["saved"]} == {name for name, _ in placed["moved"]}
    assert placed["mixed"] == {("moe.act", "offload")}
    assert placed["none"] == set()


@pytest.mark.parametrize(
    ("policy", "mtp_layers"),
    [
        pytest.param(jaxoff.policy(offload=["*.norm_in"]), 0, marks=pytest.mark.long),
        pytest.param(jaxoff.policy(offload=["*.norm_in"]), 1, marks=pytest.mark.long),
        pytest.param(None, 1, marks=pytest.mark.long),
    ],
    ids=["offload", "offload-mtp", "none-mtp"],
)
def test_logits_in_chunks_make_the_same_loss_in_less_memory(policy, mtp_layers):
    """Of 31 tokens, which no chunk of 8 divides, and of the prediction head's 30."""
    narrow = dict(SMALL, num_layers=1, first_k_dense=1, mtp_layers=mtp_layers, num_experts=2, dtype="float32")

    def compiled(chunk):
        config = Config.preset("tiny", vocab_size=4096, logits_chunk=chunk, **narrow)
        params, loss = program(config, policy)
        batch = tokens(2, 32, vocab=4096)
        step = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(params, batch).compile()
        return step.memory_analysis().temp_size_in_bytes, step(params, batch)

    (most, whole), (least, parts) = compiled(0), compiled(8)
    logits = 4 * 2 * 31 * 4096
    assert least < most - logits
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_policy_that_cannot_be_hashed_or_called_is_refused():
    for wrong in ("save_all", ["moe.*"]):
        with pytest.raises(TypeError, match="policy must be None, or callable and hashable"):
            LM(Config.preset("tiny", **SMALL), policy=wrong)  # pyright: ignore[reportArgumentType]


def test_loss_is_the_sum_of_its_terms_and_a_later_token_changes_no_earlier_logit():
    config = Config.preset(
        "tiny", dtype="float32", mtp_layers=1, **(SMALL | TWO_OF_EXPERTS | dict(d_shared=0))
    )
    model, batch = model_of(config), tokens(2, 17)
    loss, metrics = jax.jit(lambda batch: loss_fn(model, batch))(batch)
    terms = metrics["ce"] + config.aux_loss_coef * metrics["aux"] + config.z_loss_coef * metrics["z"]
    np.testing.assert_allclose(loss, terms + config.mtp_weight * metrics["mtp"], rtol=1e-6)
    compute_logits, read = jax.jit(lambda tokens: model(tokens)), batch[:, :-1]
    logits = compute_logits(read)
    log_probs = jax.nn.log_softmax(logits)
    want = -jnp.take_along_axis(log_probs, batch[:, 1:, None], axis=-1).mean()
    np.testing.assert_allclose(metrics["ce"], want, rtol=1e-5)
    assert abs(float(metrics["ce"]) - np.log(256)) < 0.3
    # Two layers of experts and the prediction head's own, whose last position has no target.
    assert metrics["expert_load"].shape == (3, 8)
    assert metrics["expert_load"].sum(axis=1).tolist() == [2 * 16 * 2] * 2 + [2 * 15 * 2]
    after = compute_logits(read.at[0, 8].set((read[0, 8] + 1) % 256))
    assert (logits[0, :8] == after[0, :8]).all()
    assert (logits[0, 8] != after[0, 8]).any()
    assert (logits[1] == after[1]).all()


@pytest.mark.long
def test_prediction_head_learns_the_token_after_the_next():
    """The last token is a target and never an input: changing it changes the loss and not the routing."""
    config = Config.preset("tiny", dtype="float32", mtp_layers=1, **SMALL)
    model = LM(config)
    hidden, embed = jnp.ones((2, 5, 32)), jnp.ones((2, 5, 32))
    assert model.mtp is not None
    out, stats = model.mtp(hidden, embed)
    assert out.shape == hidden.shape
    assert stats is not None
    batch = tokens(1, 9)
    other = batch.at[0, -1].set((batch[0, -1] + 1) % 256)
    graph, params = nnx.split(model)
    metrics = jax.jit(lambda params, tokens: loss_fn(nnx.merge(graph, params), tokens)[1])
    a, b = metrics(params, batch), metrics(params, other)
    assert a["mtp"] != b["mtp"]
    assert (a["expert_load"] == b["expert_load"]).all()
    grads = jax.jit(jax.grad(lambda params: metrics(params, batch)["mtp"]))(params)
    assert grads["mtp"]["proj"][...].any()
    assert grads["embedding"][...].any()
    # The final norm is the main head's own; the matrix is shared.
    assert not grads["norm"]["scale"][...].any()
    assert grads["head"][...].any()


def test_layers_differ_and_equal_rngs_make_equal_models():
    config = Config.preset("tiny", **SMALL, **TWO_OF_EXPERTS)
    make = jax.jit(lambda key: nnx.state(LM(config, rngs=nnx.Rngs(key))))
    a, b, c = parameters(config), make(jax.random.key(0)), make(jax.random.key(1))
    assert bits(a) == bits(b) != bits(c)
    stacked = a["experts"]["attention"]["qkv"][...]
    assert stacked.shape[0] == 2
    assert not (stacked[0] == stacked[1]).any()


@pytest.mark.parametrize("dense", [pytest.param(0, marks=pytest.mark.long), 3])
def test_models_of_one_kind_of_layer(dense):
    config = Config.preset("tiny", first_k_dense=dense, **SMALL)
    params, loss_in = program(config)
    loss, metrics = jax.jit(loss_in)(params, tokens(2, 9))
    assert np.isfinite(loss)
    assert metrics["expert_load"].shape == (3 - dense, 8)
    assert (float(metrics["aux"]) == 0.0) == (dense == 3)


@pytest.mark.long
def test_training_on_one_batch_lowers_the_loss():
    params, loss = program(Config.preset("tiny", **SMALL), jaxoff.policy(offload=["moe.*"]))
    batch = tokens(2, 33)

    @jax.jit
    def step(params):
        value, grads = jax.value_and_grad(lambda p: loss(p, batch)[0])(params)
        return value, jax.tree.map(lambda p, g: p - 0.3 * g, params, grads)

    values = []
    for _ in range(20):
        value, params = step(params)
        values.append(float(value))
    assert values[-1] < values[0] - 0.3, values


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (jnp.zeros((2,), jnp.int32), r"integers of shape \(batch, sequence\)"),
        (jnp.zeros((2, 9)), "got float32"),
        (jnp.zeros((1, 1026), jnp.int32), "1 to max_seq_len = 1025 tokens, got 1026"),
        (jnp.zeros((1, 1), jnp.int32), "at least 2 tokens"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        loss_fn(nnx.eval_shape(lambda: LM(Config.preset("tiny", **SMALL))), batch)


@pytest.mark.parametrize("moe", [False, True])
def test_no_rounding_of_a_block_is_left_to_the_compiler(moe):
    """A value rounded and at once widened again keeps its width where XLA fuses both: bits of its own."""
    graph, params = nnx.split(Block(Config.preset("tiny", **SMALL), moe=moe, rngs=nnx.Rngs(0)))

    def total(params, x):
        out, stats = nnx.merge(graph, params)(x)
        return jnp.sum(out.astype(jnp.float32)) + (stats.aux + stats.z if moe else 0.0)

    def rounds(eqn):
        return eqn.primitive.name == "convert_element_type" and eqn.params["new_dtype"] == jnp.bfloat16

    x = jnp.ones((2, 16, SMALL["d_model"]), jnp.bfloat16)
    roundings = 0
    for jaxpr in programs_in(jax.value_and_grad(total, (0, 1)), params, x):
        rounded = {eqn.outvars[0] for eqn in jaxpr.eqns if rounds(eqn)}
        roundings += len(rounded)
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "convert_element_type":
                assert eqn.invars[0] not in rounded, eqn
    assert roundings >= 10
