"""The parts of the cost model: bytes, what is made again, copies, exposure, and memory over a step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxoff
from jaxoff._device.calibration import H200_CALIBRATION, Constant
from jaxoff._device.profile import Device
from jaxoff._plan.calibrations import COPY_SLOWDOWN, RELOADED_LAYERS, UNSHARED_PART
from jaxoff._plan.layer import UNNAMED_DOTS, KernelUse, Label, Layer, LayerValue
from jaxoff._plan.layer_cost import LayerModel
from jaxoff._plan.step_cost import StepModel
from jaxoff._plan.timeline import Point
from tests.jaxoff.plan.planned import (
    ACT_NBYTES,
    DEVICE,
    HIDDEN,
    LAYERS,
    ROWS,
    W_NBYTES,
    WIDTH,
    X_NBYTES,
    arguments,
    divided,
    flat_scan,
    iteration,
    layer,
    placed,
    scanned,
    unrolled,
)

SAVE, MOVE, AGAIN = "save", "offload", "recompute"
PRODUCTS, TRAFFIC = H200_CALIBRATION.product_share.value, H200_CALIBRATION.traffic_share.value
UNLOADED = dataclasses.replace(H200_CALIBRATION, idle_clock=Constant(1.0), load_slope=Constant(0.0))
STEADY = dataclasses.replace(DEVICE, calibration=UNLOADED)
INSTANT = dataclasses.replace(DEVICE, d2h_gbps=1e9, h2d_gbps=1e9)


def model(fun=None, device=DEVICE, resident=0):
    found = divided(fun or scanned(), *arguments(), device=device)
    kinds = [LayerModel(kind, n, device) for kind, n in zip(found.layers, found.counts, strict=True)]
    return StepModel(tuple(kinds), found.points, found.argument_nbytes, resident, found.outside_ms)


def residuals(choice, fun=scanned):
    """What jax itself keeps, by placement."""
    given = {verb: [k for k, v in choice.items() if v == verb] for verb in (SAVE, MOVE, AGAIN)}
    report = jaxoff.explain(fun(policy=jaxoff.policy(**given)), *arguments())
    return report.device_bytes, report.host_bytes


@pytest.mark.parametrize("x_in", [SAVE, MOVE, AGAIN])
@pytest.mark.parametrize("act", [SAVE, MOVE, AGAIN])
def test_residual_bytes_are_those_of_the_differentiated_program(x_in, act):
    choice = {"x_in": x_in, "act": act, "out": SAVE}
    kind = model().layers[0]
    use = kind.find_states(placed(choice))
    host = kind.host_nbytes(use) // (LAYERS + 1) * LAYERS  # without the spare row
    assert (kind.residual_nbytes(use), host) == residuals(choice)


def test_layers_one_after_the_other_are_of_one_kind():
    found = divided(unrolled, *arguments())
    assert sorted(found.counts) == [1, LAYERS - 1]  # the first one's input is the program's
    assert [kind.iterations for kind in found.layers] == [1, 1]
    assert {point.holds for point in found.points if point.kind is None} >= {(LAYERS - 1, 1), (0, 0)}


def test_a_function_without_checkpoints_is_refused():
    with pytest.raises(ValueError, match=r"places what is inside of jax.checkpoint; got a function without"):
        divided(flat_scan, *arguments())


def test_making_again_takes_what_is_not_kept_before_it():
    """A product each for act and out; out is not needed, nor is act if it is kept."""
    kind = model(device=STEADY).layers[0]

    def again_ms(**choice):
        return kind.times(kind.find_states(placed(choice))).recomputed

    # A kernel stores what the derivative of tanh needs.
    none, x_in, act = again_ms(), again_ms(x_in=SAVE), again_ms(x_in=SAVE, act=SAVE)
    assert none == x_in  # the input of the layer is kept in its place
    product = 1e3 * 2 * ROWS * WIDTH * (ACT_NBYTES // X_NBYTES * WIDTH) * 2 / DEVICE.flops / PRODUCTS
    product += TRAFFIC * DEVICE.pass_ms(X_NBYTES + W_NBYTES + ACT_NBYTES) / 2
    product += DEVICE.pass_ms(W_NBYTES)  # a copy of the loop's row of weights
    assert none == pytest.approx(product + 2 * DEVICE.pass_ms(ACT_NBYTES), rel=0.2)
    # The derivative reads the value before its name, which is made again; the named value is not.
    assert act == pytest.approx(none - DEVICE.pass_ms(ACT_NBYTES))
    assert again_ms(**{UNNAMED_DOTS: SAVE}) == pytest.approx(none - product)


@pytest.mark.parametrize("form", ["scan", "at once"])
def test_of_a_loop_only_what_is_needed_is_made_again(form):
    """The second product of each iteration makes what the layer returns, which no gradient reads."""

    def body(x, w):
        x = jaxoff.name(x, "x_in")

        def chunk(x):
            return jnp.tanh(x @ w["up"]) @ w["down"]

        if form == "at once":
            return x + chunk(x), None
        return x + lax.scan(lambda c, x: (c, chunk(x)), 0, x.reshape(4, -1, WIDTH))[1].reshape(x.shape), None

    quick = dataclasses.replace(STEADY, memory_gbps=1e12)
    kind = LayerModel(iteration(scanned(body), *arguments(), device=quick), 1, quick)
    times = kind.times(kind.find_states(placed({})))
    product = 1e3 * 2 * 2 * ROWS * WIDTH * HIDDEN / quick.flops / PRODUCTS
    assert times.recomputed == pytest.approx(product, rel=0.01)
    assert times.kernels == pytest.approx(6 * product, rel=0.01)


def test_neighbours_share_what_is_made_again():
    """Of two products with constants, only the second one's result is needed: keeping it spares both."""

    def body(x, w):
        a = jaxoff.name(x @ jax.lax.stop_gradient(w["up"]), "a")
        b = jaxoff.name(a @ jax.lax.stop_gradient(w["down"]), "b")
        return b * b, None

    kind = model(scanned(body)).layers[0]

    def again_ms(*kept):
        return kind.times(kind.find_states(placed(dict.fromkeys(kept, SAVE)))).recomputed

    spared = [again_ms() - again_ms(*kept) for kept in (("a",), ("b",), ("a", "b"))]
    assert np.array(spared) / spared[0] == pytest.approx([1.0, 2.0, 2.0])


def test_copies_are_exposed_by_what_the_pass_cannot_hide():
    slow = dataclasses.replace(DEVICE, d2h_gbps=DEVICE.d2h_gbps / 100, h2d_gbps=DEVICE.h2d_gbps / 50)
    kind = model(device=slow).layers[0]
    use = kind.find_states(placed({"x_in": MOVE}))
    times = kind.times(use)
    assert times.exposed_forward == pytest.approx(slow.d2h_ms(X_NBYTES) - kind.layer.forward_ms)
    beside = kind.layer.backward_ms + times.recomputed
    assert times.exposed_backward == pytest.approx(slow.h2d_ms(X_NBYTES) - beside)
    assert times.slowed == pytest.approx(COPY_SLOWDOWN * (slow.d2h_ms(X_NBYTES) + slow.h2d_ms(X_NBYTES)))
    fast = model(device=INSTANT).layers[0]
    assert fast.times(fast.find_states(placed({"x_in": MOVE}))).exposed_forward == 0


def test_a_step_takes_all_turns_and_what_is_outside():
    whole = model()
    choice = {"act": MOVE}
    kind = whole.layers[0]
    iterations = kind.times(kind.find_states(placed(choice))) * LAYERS
    assert whole.cost(placed(choice)).times.total == pytest.approx(iterations.total + whole.outside_ms)
    assert whole.outside_ms > 0


def test_memory_is_a_timeline():
    whole = model(resident=123)
    choice = {"x_in": SAVE, "act": SAVE, "out": AGAIN}
    moments = list(whole.timeline(placed(choice)))
    passes = ["forward" in m.what or "backward" in m.what for m in moments]
    assert sum(passes) == 2
    assert {moment.arguments for moment in moments} == {LAYERS * 2 * W_NBYTES + X_NBYTES}
    assert {moment.resident for moment in moments} == {123}
    # Every residual waits while the loop forward runs to the end, and until the loop back does.
    assert {moment.residuals for moment in moments} == {LAYERS * (X_NBYTES + ACT_NBYTES)}
    forward = next(moment for moment in moments if "forward" in moment.what)
    backward = next(moment for moment in moments if "backward" in moment.what)
    assert backward.alive - forward.alive >= LAYERS * 2 * W_NBYTES  # gradients of weights
    assert whole.cost(placed(choice)).peak == backward
    assert backward.nbytes == sum(
        (backward.arguments, 123, backward.alive, backward.residuals, backward.working)
    )


def test_layers_one_after_the_other_give_their_residuals_back():
    whole = model(unrolled)
    held = [moment.residuals for moment in whole.timeline(placed({"act": SAVE, "x_in": SAVE}))]
    highest = held.index(max(held))
    assert held == sorted(held[: highest + 1]) + sorted(held[highest + 1 :], reverse=True)
    assert held[-1] == 0


def test_what_is_moved_is_on_the_device_only_around_its_use():
    kind = model(device=INSTANT).layers[0]

    def working(**choice):
        return kind.working_nbytes(kind.find_states(placed(choice)))[0]

    steps = kind.layer.backward
    assert working(x_in=MOVE, act=MOVE) >= max(s.small_nbytes for s in steps) + max(
        s.large_nbytes for s in steps
    )
    moved = [n for n, value in enumerate(kind.layer.values) if value.label == Label("x_in")]
    first, last = kind.find_use_range(moved[0])
    there = [kind.count_copies(moved[0], first, s) for s in range(len(steps))]
    assert (there[0], there[last], max(there)) == (0, 1, 1)
    slow = model(device=dataclasses.replace(DEVICE, h2d_gbps=1e-9)).layers[0]
    # What comes an iteration ahead has its place all the time, and one more while the value of the iteration
    # is read.
    ahead = [slow.count_copies(moved[0], first, s) for s in range(len(steps))]
    assert ahead == [2] * (last + 1) + [1] * (len(steps) - last - 1)


def test_another_name_of_a_value_is_in_its_memory():
    kind = model().layers[0]
    (n,) = [n for n, value in enumerate(kind.layer.values) if value.label == Label("x_in")]
    other = kind.layer.values[n].alias_of
    assert other is not None
    assert kind.layer.values[other].is_carried
    values = [dataclasses.replace(value, alias_of=None) for value in kind.layer.values]
    apart = LayerModel(dataclasses.replace(kind.layer, values=tuple(values)), 1, DEVICE)
    # A product reads it at step 4, and one before the first step, which makes others again. It is another
    # name of a row of a stack, which is copied for both; apart, it is made again and stays for both.
    assert (kind.layer.values[n].last_reader, kind.find_row_copy(0), apart.find_row_copy(0)) == (
        4,
        (4, 4),
        None,
    )
    use = kind.find_states(placed({}))
    assert (
        kind.find_row_copy_start(4, 0, use, kind.find_recompute_starts(use)),
        apart.find_recompute_starts(use)[n],
    ) == (0, 0)
    assert kind.nbytes_by_kernel(use) == apart.nbytes_by_kernel(use)


def squared(x, w):
    pre = jaxoff.name(x @ w["up"], "pre")
    return x + jaxoff.name(jnp.square(jax.nn.relu(pre)), "act") @ w["down"], None


def summed(x, w):
    act = jaxoff.name(jnp.square(jax.nn.relu(jaxoff.name(x @ w["up"], "pre"))), "act")
    return x + jnp.sin(act).sum(-1, keepdims=True), None


@pytest.mark.parametrize(("body", "copies"), [(squared, 1), (summed, 0)])
def test_what_a_product_reads_is_written_to_its_stack_beside_it(body, copies):
    """An elementwise kernel writes into the stack itself where only elementwise ones read its result."""
    kind = model(scanned(body)).layers[0]

    def stored_ms(**choice):
        return kind.times(kind.find_states(placed(choice))).stored

    extra = stored_ms(pre=SAVE, act=SAVE) - stored_ms(pre=SAVE)
    assert extra == pytest.approx(copies * DEVICE.pass_ms(ACT_NBYTES))


def test_a_row_of_a_stack_is_copied_for_products_only():
    kind = model(scanned(squared)).layers[0]
    number = {value.label: n for n, value in enumerate(kind.layer.values)}
    assert kind.find_row_copy(number[Label("pre")]) is None
    assert kind.find_row_copy(number[Label("act")]) == (0, 0)  # the gradient of the second weights
    # A layer that is in no loop has no stack.
    alone = model(unrolled).layers[0]
    assert {alone.find_row_copy(n) for n in range(len(alone.layer.values))} == {None}


def test_a_copied_row_has_its_place_from_its_first_reader_to_its_last():
    made = model(scanned(squared)).layers[0].layer
    (pre,) = [n for n, value in enumerate(made.values) if value.label == Label("pre")]
    values = [*made.values]
    values[pre] = dataclasses.replace(values[pre], row_copy=(2, 3))
    kind = LayerModel(dataclasses.replace(made, values=tuple(values)), 1, DEVICE)

    def steps_with_a_copy(choice):
        use = kind.find_states(placed(choice))
        without = dataclasses.replace(use, saved=use.saved - {pre})
        sizes = (list(map(sum, zip(*kind.nbytes_by_kernel(u), strict=True))) for u in (use, without))
        return [s for s, (with_row, none) in enumerate(zip(*sizes, strict=True)) if with_row > none]

    assert len(made.backward) > 4
    assert steps_with_a_copy({"pre": SAVE, "act": SAVE}) == [2, 3]
    # `act`, which the first step reads, is made again from it.
    assert steps_with_a_copy({"pre": SAVE}) == [0, 1, 2, 3]
    # Beside copies, the row is copied at any time.
    assert steps_with_a_copy({"pre": SAVE, "act": MOVE}) == [0, 1, 2, 3]


def test_weights_are_copied_out_of_their_stacks():
    def rows(fun):
        layers = [kind.layer for kind in model(fun).layers]
        return [
            v.nbytes
            for layer in layers
            for v in layer.values
            if not v.reads and not v.is_carried and not v.label
        ]

    assert rows(scanned()) == [W_NBYTES, W_NBYTES]
    assert rows(unrolled) == []


def in_stock_order(w, x):
    body = jax.checkpoint(squared, policy=jaxoff.policy(), prevent_cse=False)
    return jax.lax.scan(body, x, w)[0].mean()


def test_kernels_that_read_the_same_row_are_one_that_writes_over_nothing():
    kind = model(in_stock_order).layers[0]
    ((shared, step),) = [(shared, step) for step in kind.layer.backward for shared in step.fusions]
    assert shared.large_nbytes == ACT_NBYTES
    saved, again, ordered = (
        kind.find_states(placed(choice)) for choice in ({"pre": SAVE}, {}, {"pre": SAVE, "act": MOVE})
    )
    assert kind.is_fused(shared, saved)
    assert not kind.is_fused(shared, again)
    assert not kind.is_fused(shared, ordered)
    s = kind.layer.backward.index(step)
    assert kind.nbytes_by_kernel(saved)[1][s] == step.large_nbytes + ACT_NBYTES


def test_a_cotangent_is_counted_once():
    """The one that a layer is given, and the one that it hands on, are in the memory of the loop."""
    whole = model()
    forward, backward = (p for p in whole.points if p.kind is not None)
    assert backward.nbytes - forward.nbytes == LAYERS * 2 * W_NBYTES + 4
    assert whole.layers[0].layer.backward[0].small_nbytes == W_NBYTES


def test_marks_decide():
    def body(x, w):
        x = jaxoff.mark_not_offload(jaxoff.name(x, "x_in"))
        act = jaxoff.mark_offload(jnp.tanh(x @ w["up"]))
        return x + act @ w["down"], None

    found = iteration(scanned(body), *arguments())
    assert found.labels == (Label(UNNAMED_DOTS),)
    assert {value.label: value.fixed for value in found.values if value.fixed} == {
        Label("x_in"): SAVE,
        Label("(offload)"): MOVE,
    }


def test_the_dense_step_takes_about_what_was_measured():
    """FACTS of an H200: width 4096, batch 4, 12 layers, without attention's own kernels (about 50 ms)."""
    wide = jax.ShapeDtypeStruct((12, 4096, 16384), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((4 * 4096, 4096), jnp.bfloat16)
    weights = {"up": wide, "down": jax.ShapeDtypeStruct((12, 16384, 4096), jnp.bfloat16)}
    h200 = Device.of("h200")
    (found,) = divided(scanned(layer), weights, x, device=h200).layers
    product_ms = 1e3 * 2 * 16384 * 4096 * 16384 / 650e12
    assert found.forward_ms == pytest.approx(2 * product_ms, rel=0.25)
    assert found.backward_ms == pytest.approx(4 * product_ms, rel=0.15)


def by_hand(values, steps, in_order=True):
    backward = tuple(KernelUse("b", small, large, 0, float(s)) for s, (small, large) in enumerate(steps))
    forward = (KernelUse("f", 0, 0, 0, 1.0),)
    return LayerModel(Layer(3, tuple(values), forward, backward, "layer", in_order), 1, DEVICE)


def working(kind, choice):
    return kind.working_nbytes(kind.find_states(placed(choice)))[0]


@pytest.mark.parametrize(("in_order", "packed"), [(True, 9), (False, 11)])
def test_small_values_take_places_of_large_ones_in_order_and_out_of_graphs(in_order, packed):
    value = LayerValue(1000, False, 0.0, (), 0, 0, Label("v"))
    kind = by_hand([value], [(4000, 1000), (0, 7000), (2000, 7000)], in_order)
    assert working(kind, {"v": SAVE}) == 1000 * packed
    # Two copies of what comes back ahead at the first step, one after that.
    at_one_step, apart = (2000 + 1000) + 7000, (4000 + 2000) + 7000
    assert working(kind, {"v": MOVE}) == (1 - UNSHARED_PART) * at_one_step + UNSHARED_PART * apart


@pytest.mark.parametrize(
    ("fills", "sizes", "arrives"),
    [
        ((), [2], 3),  # under way 3 ms before it is needed
        ((1, 3), [2], 1),  # what starts it would find room at 9 ms: so as the kernel before that ends
        ((3,), [2], 0),
        ((1, 3), [0.9], 3),  # which at 9 ms is early enough
        ((1, 3), [0.9, 0.9], 1),  # but not for two
        ((1, 3), [4], 1),  # small kernels before the long one do not count
    ],
)
def test_a_reload_has_its_place_before_a_long_kernel_that_would_make_it_late(fills, sizes, arrives):
    device = Device(1, 1, 1e-3, 1e-3)  # a kilobyte takes a millisecond
    values = [LayerValue(int(1000 * size), False, 0.0, (), 5, 5, Label("v")) for size in sizes]
    ends = (1.0, 4.0, 5.0, 9.0, 10.0, 11.0)
    backward = tuple(KernelUse("b", 0, 0, 0, end, fills_device=s in fills) for s, end in enumerate(ends))
    layer = Layer(3, tuple(values), (KernelUse("f", 0, 0, 0, 1.0),), backward, "layer", True)
    kind = LayerModel(layer, 1, device)
    assert [kind.find_arrival(n, 5) for n in range(len(sizes))] == [arrives] * len(sizes)


@pytest.mark.parametrize(
    ("to_come", "backward", "choice", "peak"),
    [
        ((), True, {"s": SAVE, "l": SAVE}, 50),
        ((10, 10, 3), True, {"s": SAVE, "l": SAVE}, 23 + 40),  # both small ones have a place
        ((10, 3, 3), True, {"s": SAVE, "l": SAVE}, 16 + 40 + 5),  # one has
        ((3, 3, 3), True, {"s": SAVE, "l": SAVE}, 9 + 50),
        ((60,), True, {"s": SAVE}, 60 + 5 + 20),  # one at a time, beside what is made again
        ((60,), True, {"l": MOVE}, 60 + RELOADED_LAYERS * 20 + 2 * 20),  # and two copies of what is reloaded
        ((60,), False, {"s": SAVE, "l": SAVE}, 50),
    ],
)
def test_results_have_memory_before_they_are_made_which_small_values_take(to_come, backward, choice, peak):
    values = LayerValue(5, False, 0.0, (), 0, 0, Label("s")), LayerValue(20, True, 0.0, (), 0, 0, Label("l"))
    layer = Layer(1, values, (KernelUse("f", 0, 0, 0, 1e6),), (KernelUse("b", 0, 0, 0, 1e6),), "layer")
    point = Point("b", 0, (2,), 0, backward, pending_nbytes=to_come)
    model = StepModel((LayerModel(layer, 2, INSTANT),), (point,), 0, 0, 0.0)
    assert model.cost(placed({"s": AGAIN, "l": AGAIN} | choice)).peak.nbytes == peak


@pytest.mark.parametrize(("nbytes", "is_large", "held"), [(2, False, 1 + 2), (2, True, 1)])
def test_a_large_row_is_read_again_where_a_turn_is_in_order(nbytes, is_large, held):
    """By what is made again before the first step, and by the last one."""
    row = LayerValue(nbytes, is_large, 0.0, (), 2, 2)
    made = LayerValue(1, False, 1.0, (0,), 0, 1)
    kind = by_hand([row, made], [(0, 0), (0, 0), (0, 0)])
    small, large = kind.nbytes_by_kernel(kind.find_states(placed({})))
    assert [a + b for a, b in zip(small, large, strict=True)] == [held, held, 2]


@pytest.mark.parametrize(("copied", "held"), [((0, 0), 8), (None, 0)])
def test_a_row_of_a_stack_takes_memory_for_the_kernels_that_copy_it(copied, held):
    row = LayerValue(8, True, 0.0, (), 0, 0, Label("act"), row_copy=copied)
    other = LayerValue(1, False, 0.0, (), 1, 1, Label("x"))
    kind = by_hand([row, other], [(0, 0), (0, 0)])
    assert working(kind, {"act": SAVE, "x": SAVE}) == held
    assert working(kind, {"act": SAVE, "x": MOVE}) == pytest.approx(held + 2, abs=0.5)


def test_gradients_that_are_only_written_come_at_once_and_take_no_memory():
    """Of weights that a layer reads in another type: no two of them wait."""

    def body(x, w):
        act = jaxoff.name(jnp.tanh(x @ w["up"].astype(x.dtype)), "act")
        return x + act @ w["down"].astype(x.dtype), None

    w, x = arguments()
    steps = iteration(scanned(body), w, jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)).backward
    written = [s for s, step in enumerate(steps) if step.operation.startswith("convert_element_type")]
    assert len(written) == 2
    assert written[1] > written[0] + 1, "the second product comes after the first one's gradient is written"
    for s in written:
        product, write = steps[s - 1], steps[s]
        assert product.operation.startswith("dot_general")
        assert write.small_nbytes + write.large_nbytes <= product.small_nbytes + product.large_nbytes
