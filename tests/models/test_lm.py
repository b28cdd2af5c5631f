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
ATTENTION = {"attn.norm_in", "attn.qkv_in", "attn.qkv", "attn.core", "attn.proj_in", "mlp.norm_in"}
DENSE = {"mlp.fc1_in", "mlp.act"}
EXPERTS = {"moe.router_logits", "moe.probs", "moe.dispatched", "moe.act", "moe.combined"}
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


def program(config, policy=None):
    graph, params = nnx.split(LM(config, policy=policy))
    return params, lambda params, tokens: loss_fn(nnx.merge(graph, params), tokens)


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
    params, loss = program(Config.preset("tiny", mtp_layers=1, **SMALL))
    found = set(names_in(loss, params, tokens(2, 9)))
    assert found == ATTENTION | DENSE | EXPERTS | SHARED | HEAD | {"mtp.norm_in", "mtp.proj_in"}


def residuals(config, policy, batch=2, length=17):
    params, loss = program(config, policy)
    report = jaxoff.residuals(lambda p, t: loss(p, t)[0], params, tokens(batch, length))
    return [r for r in report if r.placement != "recompute"]


def test_backward_lives_from_the_names_alone():
    """With every name saved, nothing with an axis of tokens is kept that has no name."""
    config = Config.preset("tiny", **SMALL)
    kept = residuals(config, jaxoff.policy(save=["*"]), batch=3, length=12)
    named = {r.name for r in kept if r.name}
    tokens_of = [r for r in kept if not r.name and any(size in (33, 66) for size in r.shape)]
    assert tokens_of == []
    # What no gradient reads is not kept: a sum, and the attention's output, which is also `attn.proj_in`.
    assert named == (ATTENTION | DENSE | EXPERTS | SHARED | HEAD) - {"attn.core", "moe.combined"}


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@functools.cache
def loss_and_gradients(config, policy):
    params, loss = program(config, policy)
    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params, tokens(2, 33))


EVERY = {
    "offload": jaxoff.policy(offload=["*"]),
    "recompute": jaxoff.policy(recompute=["*"]),
    "attention saved, experts offloaded": jaxoff.policy(save=["attn.*"], offload=["moe.*", "mlp.*"]),
    "first layers offloaded": jaxoff.FirstLayers(
        1, jaxoff.policy(offload=["*"]), jaxoff.policy(save=["attn.*"])
    ),
    "activations and inputs offloaded": jaxoff.policy(save=["moe.probs"], offload=["*.act", "attn.norm_in"]),
}


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(dict(dtype="bfloat16"), marks=pytest.mark.long),
        dict(dtype="float32"),
        pytest.param(
            dict(dtype="bfloat16", mtp_layers=1, router="softmax", d_shared=0), marks=pytest.mark.long
        ),
    ],
    ids=["bf16", "fp32", "bf16-mtp-softmax"],
)
def test_placement_changes_no_bit_of_loss_and_gradients(overrides):
    config = Config.preset("tiny", **overrides)
    saved = loss_and_gradients(config, jaxoff.policy(save=["*"]))
    assert all(np.asarray(g).any() for g in jax.tree.leaves(saved[1]))
    for name, policy in EVERY.items():
        assert bits(loss_and_gradients(config, policy)) == bits(saved), name


@pytest.mark.long
def test_presets_change_no_bit_either():
    config = Config.preset("tiny")
    saved = loss_and_gradients(config, jaxoff.policy(save=["*"]))
    for preset in ("save_all", "dots", "te_v2"):
        assert bits(loss_and_gradients(config, jaxoff.policy(preset))) == bits(saved), preset


def test_policies_place_differently_what_computes_the_same():
    config = Config.preset("tiny", **SMALL)
    placed = {
        kind: {(r.name, r.placement) for r in residuals(config, policy) if r.name}
        for kind, policy in {
            "saved": jaxoff.policy(save=["*"]),
            "moved": jaxoff.policy(offload=["*"]),
            "mixed": jaxoff.policy(offload=["moe.act"]),
            "none": jaxoff.policy(recompute=["*"]),
        }.items()
    }
    assert {place for _, place in placed["saved"]} == {"save"}
    assert {place for _, place in placed["moved"]} == {"offload"}
    assert {name for name, _ in placed["saved"]} == {name for name, _ in placed["moved"]}
    assert placed["mixed"] == {("moe.act", "offload")}
    assert placed["none"] == set()


def test_a_model_without_policy_agrees_closely():
    config = Config.preset("tiny", dtype="float32")
    plain, saved = (loss_and_gradients(config, policy) for policy in (None, jaxoff.policy(save=["*"])))
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(saved), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "policy",
    [pytest.param(None, marks=pytest.mark.long), jaxoff.policy(offload=["*.norm_in"])],
    ids=["none", "offload"],
)
def test_logits_in_chunks_make_the_same_loss_in_less_memory(policy):
    """Of 32 tokens, and of the prediction head's 31, which no chunk of 8 divides."""
    narrow = dict(SMALL, num_layers=1, first_k_dense=1, mtp_layers=1, num_experts=2, dtype="float32")

    def compiled(chunk):
        config = Config.preset("tiny", vocab_size=4096, logits_chunk=chunk, **narrow)
        params, loss = program(config, policy)
        batch = tokens(2, 33, vocab=4096)
        step = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(params, batch).compile()
        return step.memory_analysis().temp_size_in_bytes, step(params, batch)

    (most, whole), (least, parts) = compiled(0), compiled(8)
    logits = 4 * 2 * 32 * 4096
    assert least < most - logits
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_policy_that_cannot_be_hashed_or_called_is_refused():
    for wrong in ("save_all", ["moe.*"]):
        with pytest.raises(TypeError, match="policy must be None, or callable and hashable"):
            LM(Config.preset("tiny", **SMALL), policy=wrong)  # pyright: ignore[reportArgumentType]


def test_loss_is_the_sum_of_its_terms():
    config = Config.preset("tiny", dtype="float32", mtp_layers=1, **SMALL)
    model, batch = LM(config), tokens(2, 17)
    loss, metrics = jax.jit(lambda batch: loss_fn(model, batch))(batch)
    terms = metrics["ce"] + config.aux_loss_coef * metrics["aux"] + config.z_loss_coef * metrics["z"]
    np.testing.assert_allclose(loss, terms + config.mtp_weight * metrics["mtp"], rtol=1e-6)
    log_probs = jax.nn.log_softmax(jax.jit(lambda tokens: model(tokens))(batch[:, :-1]))
    want = -jnp.take_along_axis(log_probs, batch[:, 1:, None], axis=-1).mean()
    np.testing.assert_allclose(metrics["ce"], want, rtol=1e-5)
    assert abs(float(metrics["ce"]) - np.log(256)) < 0.3
    # Two layers of experts and the prediction head's own, whose last position has no target.
    assert metrics["expert_load"].shape == (3, 8)
    assert metrics["expert_load"].sum(axis=1).tolist() == [2 * 16 * 2] * 2 + [2 * 15 * 2]


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


def test_a_later_token_changes_no_earlier_logit():
    model, batch = LM(Config.preset("tiny", dtype="float32", **SMALL)), tokens(1, 12)
    logits = jax.jit(lambda tokens: model(tokens))
    before, after = logits(batch), logits(batch.at[0, 8].set((batch[0, 8] + 1) % 256))
    assert (before[:, :8] == after[:, :8]).all()
    assert (before[:, 8] != after[:, 8]).any()


def test_layers_differ_and_equal_rngs_make_equal_models():
    a, b, c = (LM(Config.preset("tiny", **SMALL), rngs=rngs) for rngs in (None, nnx.Rngs(0), nnx.Rngs(1)))
    assert bits(nnx.state(a)) == bits(nnx.state(b)) != bits(nnx.state(c))
    assert a.experts is not None
    stacked = a.experts.attention.qkv[...]
    assert stacked.shape[0] == 2
    assert not (stacked[0] == stacked[1]).any()


@pytest.mark.parametrize("dense", [0, 3])
def test_models_of_one_kind_of_layer(dense):
    config = Config.preset("tiny", first_k_dense=dense, **SMALL)
    model = LM(config)
    loss, metrics = jax.jit(lambda tokens: loss_fn(model, tokens))(tokens(2, 9))
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
        loss_fn(LM(Config.preset("tiny", **SMALL)), batch)


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
