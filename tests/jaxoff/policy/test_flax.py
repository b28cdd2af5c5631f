"""Flax's own checkpoints and loops take the same policies: `nnx.remat`, `nnx.scan`, `nn.remat`, `nn.scan`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import jaxoff
from tests.jaxoff.policy import placement
from tests.jaxoff.policy.matrix import (
    NO_CHECKPOINT,
    OFFLOAD_ALL,
    POLICIES,
    Cases,
    assert_close,
    assert_equal,
    block,
    check_control,
    check_placement,
    check_values,
    inputs,
    weights,
)

CASES = Cases()
on_nnx = functools.partial(CASES.add, checkpoint=nnx.remat)
on_linen = functools.partial(CASES.add, checkpoint=nn.remat)


class NnxBlock(nnx.Module):
    def __init__(self, w):
        self.up, self.down, self.proj = nnx.Param(w["up"]), nnx.Param(w["down"]), nnx.Param(w["proj"])

    def __call__(self, x):
        return block({"up": self.up[...], "down": self.down[...], "proj": self.proj[...]}, x)


@on_nnx()
def nnx_remat_of_a_method(remat, w, x):
    return remat(NnxBlock.__call__)(NnxBlock(w), x)


@on_nnx()
def nnx_remat_of_a_function(remat, w, x):
    return remat(lambda model, x: model(x))(NnxBlock(w), x)


@on_nnx()
def nnx_jit_around_remat(remat, w, x):
    return nnx.jit(lambda model, x: remat(NnxBlock.__call__)(model, x))(NnxBlock(w), x)


@on_nnx()
def nnx_cond_around_remat(remat, w, x):
    return nnx.cond(x[0, 0] < 9, lambda m, x: remat(NnxBlock.__call__)(m, x), lambda m, x: x, NnxBlock(w), x)


@on_nnx(x=(5, 4, 8), rows=(5, 4))
def nnx_vmap_around_remat(remat, w, x):
    return nnx.vmap(lambda m, x: remat(NnxBlock.__call__)(m, x), in_axes=(None, 0))(NnxBlock(w), x)


@on_nnx(w=(3,), count=3)
def nnx_scan_of_remat(remat, w, x):
    layer = remat(NnxBlock.__call__, prevent_cse=False)
    return nnx.scan(lambda x, model: layer(model, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
        x, NnxBlock(w)
    )


@on_nnx(w=(3,), count=3)
def nnx_remat_of_scan(remat, w, x):
    layers = nnx.scan(lambda x, model: model(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    return remat(lambda model, x: layers(x, model))(NnxBlock(w), x)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        shapes = {k: v.shape for k, v in weights().items()}
        return block({k: self.param(k, nn.initializers.zeros, shape) for k, shape in shapes.items()}, x)


class Carrying(nn.Module):
    """A layer for `nn.scan`, which wants (carry, y)."""

    layer: type[nn.Module] = LinenBlock

    @nn.compact
    def __call__(self, x, _):
        return self.layer(name="layer")(x), None


def linen_scan(layer):
    return nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)


@on_linen()
def linen_remat(remat, w, x):
    return remat(LinenBlock)().apply({"params": w}, x)


@on_linen()
def linen_remat_of_a_method(remat, w, x):
    class Model(nn.Module):
        def setup(self):
            self.layer = LinenBlock()

        def __call__(self, x):
            return remat(lambda model, x: model.layer(x))(self, x)

    return Model().apply({"params": {"layer": w}}, x)


@on_linen(x=(5, 4, 8), rows=(5, 4))
def linen_vmap_of_remat(remat, w, x):
    over_batch = nn.vmap(remat(LinenBlock), variable_axes={"params": None}, split_rngs={"params": False})
    return over_batch().apply({"params": w}, x)


@on_linen(w=(3,), count=3)
def linen_scan_of_remat(remat, w, x):
    layers = linen_scan(remat(Carrying, prevent_cse=False))
    return layers().apply({"params": {"layer": w}}, x, None)[0]


@on_linen(w=(3,), count=3)
def linen_scan_of_inner_remat(remat, w, x):
    layers = linen_scan(functools.partial(Carrying, layer=remat(LinenBlock, prevent_cse=False)))
    return layers().apply({"params": {"layer": w}}, x, None)[0]


@on_linen(w=(3,), count=3)
def linen_remat_of_scan(remat, w, x):
    return remat(linen_scan(Carrying))().apply({"params": {"layer": w}}, x, None)[0]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.some_cases(13)
def test_moves_exactly_the_chosen_values(case, policy):
    check_placement(CASES[case], *POLICIES[policy])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.some_cases(4)
def test_keeps_loss_and_gradients(case):
    check_values(CASES[case], twins=case in ("nnx_scan_of_remat", "linen_scan_of_remat"))


@pytest.mark.parametrize("case", CASES)
def test_a_policy_that_moves_nothing_fails_the_check(case):
    check_control(CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_a_call_without_gradients_moves_nothing(case):
    assert not placement.host_arrays(CASES[case].loss(OFFLOAD_ALL), *CASES[case].args)


def test_flax_and_jax_agree_on_what_is_moved_and_on_the_gradients():
    """The same three layers in `nnx.scan`, in `nn.scan` and in `lax.scan`."""
    args = weights(3), inputs(4, 8)

    def by_jax(w, x):
        layer = jax.checkpoint(block, policy=OFFLOAD_ALL, prevent_cse=False)
        return 0.5 * jnp.sum(jnp.square(lax.scan(lambda x, w: (layer(w, x), None), x, w)[0]))

    found, wanted = placement.grad_host_arrays(by_jax, *args), jax.jit(jax.grad(by_jax))(*args)
    for case in ("nnx_scan_of_remat", "linen_scan_of_remat"):
        loss = CASES[case].loss(OFFLOAD_ALL)
        assert placement.grad_host_arrays(loss, *args) == found
        assert_close(jax.jit(jax.grad(loss))(*args), wanted)


def test_nnx_gradients_of_a_model_object():
    def loss(policy, model, x):
        call = NnxBlock.__call__ if policy is NO_CHECKPOINT else nnx.remat(NnxBlock.__call__, policy=policy)
        return jnp.sum(jnp.square(call(model, x)))

    def gradients(policy):
        grad = nnx.value_and_grad(functools.partial(loss, policy))
        return nnx.jit(grad)(NnxBlock(weights()), inputs(4, 8))

    model, rest = nnx.split(NnxBlock(weights()))
    found = placement.host_arrays(
        lambda rest, x: nnx.grad(functools.partial(loss, OFFLOAD_ALL))(nnx.merge(model, rest), x),
        rest,
        inputs(4, 8),
    )
    assert found == placement.arrays({(4, 8): 1, (4, 32): 1, (4, 16): 1})
    moved, twin, plain = map(gradients, (OFFLOAD_ALL, OFFLOAD_ALL.on_device(), NO_CHECKPOINT))
    assert_equal(moved, twin)
    assert_close(moved, plain)


class NnxDropped(nnx.Module):
    def __init__(self, w):
        self.w = nnx.Param(w)
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=0))

    def __call__(self, x):
        return jnp.square(jaxoff.name(self.dropout(x @ self.w[...]), "dropped"))


class LinenDropped(nn.Module):
    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.zeros, (8, 8))
        return jnp.square(jaxoff.name(nn.Dropout(0.5, deterministic=False)(x @ w), "dropped"))


def nnx_dropped(checkpoint, w, x):
    model = NnxDropped(w)
    y = checkpoint(nnx.remat)(NnxDropped.__call__)(model, x)
    return y, model.dropout.rngs.count[...]


def linen_dropped(checkpoint, w, x):
    model = checkpoint(nn.remat)(LinenDropped)()
    return model.apply({"params": {"w": w}}, x, rngs={"dropout": jax.random.key(0)}), 0


@pytest.mark.parametrize("model", [nnx_dropped, linen_dropped])
def test_recomputation_draws_the_same_dropout_mask(model):
    def gradients(checkpoint):
        def loss(w, x):
            y, draws = model(checkpoint, w, x)
            return jnp.sum(y), (y, draws)

        return jax.grad(loss, has_aux=True), loss

    args = inputs(8, 8), inputs(4, 8)
    policy = jaxoff.policy(offload=["dropped"])
    grad, loss = gradients(lambda remat: functools.partial(remat, policy=policy))
    plain, _ = gradients(lambda remat: lambda layer: layer)
    assert placement.host_arrays(grad, *args) == placement.arrays({(4, 8): 1})
    assert jaxoff.explain(loss, *args, argnums=0, has_aux=True).host_bytes == 4 * 8 * 4
    got, (y, draws) = jax.jit(grad)(*args)
    assert 0 < np.sum(y == 0) < y.size
    assert_close((got, (y, draws)), jax.jit(plain)(*args))
