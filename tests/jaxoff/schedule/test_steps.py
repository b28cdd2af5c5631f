"""Whole training steps with moved activations: donation, accumulation, second derivatives, tracing."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxoff
from tests.jaxoff.policy import placement
from tests.jaxoff.policy.matrix import (
    NO_CHECKPOINT,
    OFFLOAD_ALL,
    POLICIES,
    Case,
    assert_close,
    assert_equal,
    block,
    inputs,
    weights,
)

BLOCK = Case(lambda remat, w, x: remat(block)(w, x))
SCAN = Case(
    lambda remat, w, x: lax.scan(lambda x, w: (remat(block, prevent_cse=False)(w, x), None), x, w)[0],
    w=(3,),
    count=3,
)
PROGRAMS = {"block": BLOCK, "scan": SCAN}


def times(arrays, n):
    return placement.arrays({shape: n * count for (shape, _), count in arrays.items()})


# Donation


def momentum_step(case, policy, w, m, x):
    """One step of momentum. Its weights and momenta may be donated."""
    loss, grads = jax.value_and_grad(case.loss(policy))(w, x)
    m = jax.tree.map(lambda m, g: 0.9 * m + g, m, grads)
    return loss, jax.tree.map(lambda w, m: w - 1e-3 * m, w, m), m


@pytest.mark.parametrize(("case", "policy"), [("block", "lists"), ("scan", "te_v2")])
@pytest.mark.some_cases(1)
def test_donated_weights_are_consumed_and_the_steps_are_right(case, policy):
    case = PROGRAMS[case]

    def train(policy, donate):
        w, x = jax.tree.map(jnp.array, case.args)
        m = jax.tree.map(jnp.zeros_like, w)
        step = jax.jit(
            functools.partial(momentum_step, case, policy), donate_argnums=(0, 1) if donate else ()
        )
        losses = []
        for _ in range(3):
            before = jax.tree.leaves((w, m))
            loss, w, m = step(w, m, x)
            losses.append(loss)
            assert all(a.is_deleted() == donate for a in before)
        assert not x.is_deleted()
        return losses, w, m

    policy, names = POLICIES[policy]
    w, x = case.args
    assert placement.host_arrays(functools.partial(momentum_step, case, policy), w, w, x) == case.arrays(
        names
    )
    donated = train(policy, donate=True)
    assert_close(donated, train(NO_CHECKPOINT, donate=False))
    if case is BLOCK:
        assert_equal(donated, train(policy, donate=False))


# Accumulation


@pytest.mark.parametrize(("case", "policy"), [("block", "te_v1"), ("block", "lists"), ("scan", "te_v2")])
@pytest.mark.some_cases(1)
def test_microbatches_accumulate_the_gradient_of_the_batch(case, policy):
    case = PROGRAMS[case]
    policy, names = POLICIES[policy]
    microbatches = 3

    def accumulated(policy, w, xs):
        def one(grads, x):
            loss, new = jax.value_and_grad(case.loss(policy))(w, x)
            return jax.tree.map(jnp.add, grads, new), loss

        grads, losses = lax.scan(one, jax.tree.map(jnp.zeros_like, w), xs)
        return losses.sum(), grads

    w, xs = weights(*case.w), inputs(microbatches, *case.x)
    step = functools.partial(accumulated, policy)
    found = placement.host_arrays(step, w, xs)
    assert found == times(case.arrays(names), microbatches)
    loss = case.loss(policy)
    assert jaxoff.explain(loss, w, xs[0], argnums=0).host_bytes * microbatches == placement.nbytes(found)
    got = jax.jit(step)(w, xs)
    assert_equal(got, jax.jit(functools.partial(accumulated, policy.on_device()))(w, xs))
    # The block takes each row by itself, so that one batch holds all rows.
    assert_close(got, jax.jit(jax.value_and_grad(case.loss(NO_CHECKPOINT)))(w, xs.reshape(-1, case.x[-1])))


# Higher derivatives


def hessian_times(loss, w, x, order):
    """The Hessian of a loss, by weights and input, times a vector of ones."""
    args = (w, x)
    v = jax.tree.map(jnp.ones_like, args)

    def grad(args):
        return jax.grad(lambda args: loss(*args))(args)

    def slope(args):
        return jax.jvp(lambda args: loss(*args), (args,), (v,))[1]

    def along(args):
        return sum(jnp.sum(g) for g in jax.tree.leaves(grad(args)))

    return {
        "forward over reverse": lambda: jax.jvp(grad, (args,), (v,))[1],
        "reverse over forward": lambda: jax.grad(slope)(args),
        "reverse over reverse": lambda: jax.grad(along)(args),
    }[order]()


ORDERS = ["forward over reverse", "reverse over forward"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", PROGRAMS.values(), ids=PROGRAMS)
def test_second_derivatives_move_the_chosen_values(case, policy, order):
    policy, names = POLICIES[policy]
    moved = functools.partial(hessian_times, case.loss(policy), order=order)
    twin = functools.partial(hessian_times, case.loss(policy.on_device()), order=order)
    found, once = placement.host_arrays(moved, *case.args), case.arrays(names)
    if order == "forward over reverse":  # the tangents of the residuals move too
        assert found == times(once, 2)
    elif policy.unmarked == "offload":  # dots of the tangents are anchors of their own
        assert once < found
    else:
        assert found == once
    assert not placement.host_arrays(twin, *case.args)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("case", "policy"), [("block", "te_v2"), ("scan", "lists")])
@pytest.mark.some_cases(2)
def test_second_derivatives_keep_their_values(case, policy, order):
    case = PROGRAMS[case]
    moved = functools.partial(hessian_times, case.loss(POLICIES[policy][0]), order=order)
    plain = functools.partial(hessian_times, case.loss(NO_CHECKPOINT), order=order)
    assert_close(jax.jit(moved)(*case.args), jax.jit(plain)(*case.args))


def test_reverse_over_reverse_fails_loudly_and_works_on_the_device():
    """JAX does not transpose the copy to the host: it raises. The saved twin has no such copy."""
    case, order = BLOCK, "reverse over reverse"
    with pytest.raises(ValueError, match="cotangent type"):
        hessian_times(case.loss(OFFLOAD_ALL), *case.args, order=order)
    twin = functools.partial(hessian_times, case.loss(OFFLOAD_ALL.on_device()), order=order)
    plain = functools.partial(hessian_times, case.loss(NO_CHECKPOINT), order=order)
    assert_close(jax.jit(twin)(*case.args), jax.jit(plain)(*case.args))


# Loops that only run forward


def test_a_while_loop_runs_forward_and_moves_nothing():
    def loop(policy, w, x):
        layer = block if policy is NO_CHECKPOINT else jax.checkpoint(block, policy=policy)
        return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, layer(w, s[1])), (0, x))[1]

    args = BLOCK.args
    moved, plain = functools.partial(loop, OFFLOAD_ALL), functools.partial(loop, NO_CHECKPOINT)

    def forward(fun):
        return lambda *args: jax.jvp(fun, args, args)

    assert not placement.host_arrays(moved, *args)
    assert not placement.host_arrays(forward(moved), *args)
    assert_close(jax.jit(forward(moved))(*args), jax.jit(forward(plain))(*args))


# Nested checkpoints whose policies differ


def test_the_outer_checkpoint_decides_what_waits_for_the_backward_pass():
    inner, outer = jaxoff.policy(offload=["pre"]), jaxoff.policy(offload=["act"], save=["in", "pre"])

    def nested(w, x):
        return jnp.sum(jax.checkpoint(jax.checkpoint(block, policy=inner), policy=outer)(w, x))

    rows = {r.name: r.placement for r in jaxoff.residuals(nested, *BLOCK.args)}
    assert rows == {"in": "save", "pre": "save", "act": "offload", "out": "save"}
    assert_close(jax.grad(nested)(*BLOCK.args), jax.grad(lambda w, x: jnp.sum(block(w, x)))(*BLOCK.args))


# Tracing


def equal_policies():
    first, second = (jaxoff.policy(offload=["pre", "act"], save=["in"], min_bytes=8) for _ in range(2))
    assert first is not second
    return first, second, first.on_device()


def test_equal_policies_hit_the_caches_of_jit():
    traces = []

    @functools.partial(jax.jit, static_argnames="policy")
    def step(w, x, policy):
        traces.append(policy)
        return jax.grad(SCAN.loss(policy))(w, x)

    first, second, other = equal_policies()
    got = step(*SCAN.args, policy=first)
    assert_equal(step(*SCAN.args, policy=second), got)
    assert len(traces) == 1
    step(*SCAN.args, policy=other)
    assert len(traces) == 2


def test_equal_policies_hit_the_caches_of_checkpoint():
    traces, asked = [], []

    def counted(w, x):
        traces.append(None)
        return block(w, x)

    class Asked(jaxoff.Policy):
        def __call__(self, *args, **params):
            asked.append(self)
            return super().__call__(*args, **params)

    def gradient(policy):
        policy = Asked(
            policy.offload, policy.save, min_bytes=policy.min_bytes, memory_kind=policy.memory_kind
        )
        return jax.grad(lambda w, x: jnp.sum(jax.checkpoint(counted, policy=policy)(w, x)))(*BLOCK.args)

    first, second, other = equal_policies()
    got = gradient(first)
    counts = len(traces), len(asked)
    assert counts[0] == 1 and counts[1] > 0
    assert_equal(gradient(second), got)
    assert (len(traces), len(asked)) == counts
    gradient(other)
    assert len(traces) == counts[0] and len(asked) > counts[1]


@pytest.mark.parametrize("case", PROGRAMS.values(), ids=PROGRAMS)
def test_an_evaluation_in_between_changes_nothing(case):
    """There is no warm-up: the first step, the next, and the one after an evaluation give the same bits."""
    step = jax.jit(case.value_and_grad(OFFLOAD_ALL))
    evaluate = jax.jit(case.loss(OFFLOAD_ALL))
    first = step(*case.args)
    assert_close(first, jax.jit(case.value_and_grad(NO_CHECKPOINT))(*case.args))
    assert_equal(step(*case.args), first)
    assert_close(evaluate(*case.args), first[0])
    assert_equal(step(*case.args), first)
    assert not placement.host_arrays(case.loss(OFFLOAD_ALL), *case.args)
