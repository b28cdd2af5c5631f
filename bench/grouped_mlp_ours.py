"""The fused kernels as programs to time."""

from __future__ import annotations

import pallas_kernels
from bench import grouped_mlp_peers as peers
from bench.grouped_mlp_peers import Data, Programs


def ours(data: Data) -> Programs:
    """The fused kernels, each alone and as the whole op."""
    # Imported here: a jax without Mosaic GPU loses this variant only.
    from pallas_kernels._mosaic import tuning
    from pallas_kernels._mosaic.row_products import fc1, fc2, grad_act, grad_x
    from pallas_kernels._mosaic.row_tiling import tile_rows
    from pallas_kernels._mosaic.weights import grad_weight

    x, dy, a, pa, dz, p, w1, w2 = (
        data.x, data.dy, data.a, data.pa, data.dz, data.p, data.w1, data.w2
    )  # fmt: skip
    c = tuning.choose_configs(w1.shape, data.shape.rows)
    # Where dy takes the probs, the scaling is a pass of its own, charged to the whole op.
    scale_a = not tuning.scales_dy(w1.shape)

    def program(kernel, *operands):
        return peers.jax_product(kernel, *operands, schedule=lambda sizes: tile_rows(sizes, data.shape.rows))

    def op(x, w1, w2, p, sizes):
        return pallas_kernels.grouped_mlp(x, w1, w2, sizes, probs=p, implementation="mosaic")

    return {
        "F1": program(lambda x, w1, plan: fc1(x, w1, None, plan, c.fc1), x, w1),
        "F2": program(lambda a, w2, p, plan: fc2(a, w2, None, p, plan, c.fc2), a, w2, p),
        "B1": program(
            lambda dy, w2, a, p, plan: grad_act(dy, w2, a, p, plan, c.grad_act, scale_a=scale_a), dy, w2, a, p
        ),
        "B2": program(lambda pa, dy, plan: grad_weight(pa, dy, plan, w2.dtype, c.grad_w2), pa, dy),
        "B3": program(lambda dz, w1, plan: grad_x(dz, w1, plan, c.grad_x), dz, w1),
        "B4": program(lambda x, dz, plan: grad_weight(x, dz, plan, w1.dtype, c.grad_w1), x, dz),
    } | peers.jax_parts(op, data)
