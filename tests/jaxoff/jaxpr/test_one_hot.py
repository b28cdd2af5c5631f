"""`jaxoff._jaxpr.one_hot`: the gradient of one logit a row, as a comparison instead of a scatter."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.one_hot import compare_labels

BATCH, LENGTH, VOCABULARY = 2, 4, 8
LABELS = jnp.array([[1, 0, 7, 3], [-1, 6, 6, 5]])


def optax_loss(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def along_axis(logits, labels, **keywords):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1, **keywords).mean()


def along_middle_axis(logits, labels):
    logs = jnp.moveaxis(jax.nn.log_softmax(logits), -1, 1)
    return -jnp.take_along_axis(logs, labels[:, None], axis=1).mean()


def by_own_index(logits, labels):
    logs = jax.nn.log_softmax(logits).reshape(-1, VOCABULARY)
    return -logs[jnp.arange(labels.size), labels.reshape(-1)].mean()


def by_two_own_indices(logits, labels):
    logs = jax.nn.log_softmax(logits)
    return -logs[jnp.arange(BATCH)[:, None], jnp.arange(LENGTH), labels].mean()


def by_own_index_in_another_type(logits, labels):
    logs = jax.nn.log_softmax(logits).reshape(-1, VOCABULARY)
    return -logs[jnp.arange(labels.size, dtype=jnp.int16).astype(jnp.int32), labels.reshape(-1)].mean()


def mapped(logits, labels):
    return -jax.vmap(jax.vmap(lambda logs, label: logs[label]))(jax.nn.log_softmax(logits), labels).mean()


def of_one_sequence(logits, labels):
    return along_axis(logits[:1], labels[:1])


def of_one_token(logits, labels):
    return along_axis(logits[:, :1], labels[:, :1])


def checkpointed(logits, labels):
    return jax.checkpoint(lambda logits: optax_loss(logits, labels))(logits)


def in_scan(logits, labels):
    def add_up(total, row):
        return total + optax_loss(*row), None

    return jax.lax.scan(add_up, 0.0, (logits, labels))[0]


def clipped(logits, labels):
    """A label out of bounds counts as the last."""
    return along_axis(logits, labels.at[0, 0].set(VOCABULARY + 3), mode="clip")


def dropped(logits, labels):
    """A label out of bounds has no gradient."""
    return along_axis(logits, labels.at[0, 0].set(VOCABULARY + 3), mode="fill")


def in_bytes(logits, labels):
    """Indices of fewer bits than numbers of columns."""
    return along_axis(jnp.tile(logits, 40), labels.astype(jnp.int8))


def without_sign(logits, labels):
    return along_axis(logits, labels.astype(jnp.uint32))


def of_a_single_row(logits, labels):
    return along_axis(jnp.tile(logits[0, 0], 9), labels[0, 0])


def list_scatters(jaxpr) -> list[Any]:
    """The shapes that a program, with those inside, scatters into."""
    found = []
    for eqn in compat.as_open(jaxpr).eqns:
        if eqn.primitive.name == "scatter-add":
            found.append(eqn.outvars[0].aval.shape)
        for inner in compat.sub_jaxprs(eqn):
            found += list_scatters(inner)
    return found


def scatters_into_logits(closed) -> bool:
    return any(np.prod(shape) > LENGTH * 2 for shape in list_scatters(closed.jaxpr))


def make_logits():
    return jax.random.normal(jax.random.key(0), (BATCH, LENGTH, VOCABULARY))


@pytest.mark.parametrize(
    "loss",
    [
        optax_loss,
        along_axis,
        along_middle_axis,
        by_own_index,
        by_own_index_in_another_type,
        by_two_own_indices,
        mapped,
        of_one_sequence,
        of_one_token,
        checkpointed,
        in_scan,
        clipped,
        dropped,
        in_bytes,
        without_sign,
        of_a_single_row,
    ],
)
def test_the_gradient_has_the_bits_of_the_scatter(loss):
    gradient = jax.make_jaxpr(jax.value_and_grad(loss))(make_logits(), LABELS)
    compared = compare_labels(gradient)
    assert scatters_into_logits(gradient)
    assert not scatters_into_logits(compared)
    expected = compat.jaxpr_as_fun(gradient)(make_logits(), LABELS)
    found = compat.jaxpr_as_fun(compared)(make_logits(), LABELS)
    np.testing.assert_array_equal(expected[1], found[1])
    np.testing.assert_array_equal(expected[0], found[0])  # nan where a label out of bounds is read


@pytest.mark.gpu
def test_a_kernel_on_a_gpu_rounds_the_softmax_before_it_adds_the_element():
    """A CPU may contract the product and the sum, and round once."""
    keys = jax.random.split(jax.random.key(1))
    logits = jax.random.normal(
        keys[0], (4096, VOCABULARY)
    )  # so few columns that the softmax is no small part
    labels = jax.random.randint(keys[1], (4096,), 0, VOCABULARY)
    gradient = jax.make_jaxpr(jax.grad(optax_loss))(logits, labels)
    run = lambda program: jax.jit(compat.jaxpr_as_fun(program))(logits, labels)[0]  # noqa: E731
    np.testing.assert_array_equal(run(compare_labels(gradient)), run(gradient))


def into_ones(x, labels):
    return jnp.ones_like(x).at[jnp.arange(BATCH), labels[:, 0]].add(x[:, 0])


def two_in_a_row(x, labels):
    return jnp.zeros_like(x).at[jnp.arange(BATCH)[:, None], labels].add(1.0)


def rows_in_any_order(x, labels):
    return jnp.zeros_like(x).at[labels[:, 1] % 2, labels[:, 0]].add(x[:, 0])


def rows_of_a_part(x, labels):
    """The positions of another axis than the one that they index: two of the four rows."""
    return jnp.zeros((LENGTH, VOCABULARY)).at[jnp.arange(BATCH), labels[:, 0]].add(x[:, 0])


def one_row_over_and_over(x, labels):
    """Positions along an axis of one element, broadcast: all are 0."""
    rows = jnp.broadcast_to(jnp.arange(1), (BATCH,))
    return jnp.zeros_like(x).at[rows, labels[:, 0]].add(x[:, 0])


def whole_rows(x, labels):
    """The gradient of an embedding: tokens may repeat."""
    return jnp.zeros_like(x).at[labels[0] % 2].add(1.0)


@pytest.mark.parametrize(
    "fun",
    [into_ones, two_in_a_row, rows_in_any_order, rows_of_a_part, one_row_over_and_over, whole_rows],
)
def test_other_scatters_stay(fun):
    program = jax.make_jaxpr(fun)(make_logits()[:, 0], LABELS)
    assert list_scatters(program.jaxpr)
    assert compare_labels(program) is program


def test_the_type_is_that_of_explicit_axes():
    mesh = jax.make_mesh((2, 2), ("rows", "columns"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        logits = jax.device_put(make_logits(), jax.NamedSharding(mesh, P("rows", None, None)))
        labels = jax.device_put(LABELS, jax.NamedSharding(mesh, P("rows", None)))
        gradient = jax.make_jaxpr(jax.grad(optax_loss))(logits, labels)
        compared = compare_labels(gradient)
        assert scatters_into_logits(gradient) and not scatters_into_logits(compared)
        (result,) = compared.jaxpr.outvars
        assert result.aval == gradient.jaxpr.outvars[0].aval
        run = lambda program: jax.jit(compat.jaxpr_as_fun(program))(logits, labels)[0]  # noqa: E731
        np.testing.assert_array_equal(run(gradient), run(compared))


def test_rows_of_a_map_over_devices():
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,))
    step = jax.shard_map(jax.grad(optax_loss), mesh=mesh, in_specs=P("rows"), out_specs=P("rows"))
    gradient = jax.make_jaxpr(step)(make_logits(), LABELS)
    compared = compare_labels(gradient)
    assert scatters_into_logits(gradient) and not scatters_into_logits(compared)
    run = functools.partial(compat.jaxpr_as_fun(compared), make_logits(), LABELS)
    np.testing.assert_array_equal(step(make_logits(), LABELS), jax.jit(run)()[0])
