"""Tile sizes and orders of the kernels."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Config:
    """How one kernel cuts its output and walks over it.

    Attributes:
      block_columns: width of a tile of the output, a multiple of 64.
      stages: steps of operands that shared memory holds.
      slots: buffers of 64 columns through which a warpgroup's half of a tile leaves.
      minor: the axis of (rows, columns) blocks that varies fastest.
      width: how many blocks of the minor axis are walked before the major one advances.
    """

    block_columns: int
    stages: int = 4
    slots: int = 2
    minor: int = 1
    width: int = 64


@dataclasses.dataclass(frozen=True)
class Configs:
    """One for each product of the grouped MLP.

    Attributes:
      fc1, fc2, grad_act, grad_x, grad_w1, grad_w2: the tiles.
      scale_dy: whether the gradient of w2 multiplies dy with the probs, in a pass of its own over (R, H), or
        a, which grad_act then writes on its way, (R, I).
    """

    fc1: Config
    fc2: Config
    grad_act: Config
    grad_x: Config
    grad_w1: Config
    grad_w2: Config
    scale_dy: bool


def configs(w1_shape: tuple[int, int, int], rows: int) -> Configs:
    """Chooses the tiles for a shape.

    Args:
      w1_shape: (E, H, I).
      rows: number of rows R.

    Returns:
      The choice.
    """
    _, width, inner = w1_shape

    def rows_config(columns):
        return Config(256, slots=2) if columns % 256 == 0 else Config(192, slots=3)

    return Configs(
        fc1=rows_config(inner),
        fc2=rows_config(width),
        grad_act=Config(192, slots=1),
        grad_x=rows_config(width),
        grad_w1=Config(192, slots=3),
        grad_w2=Config(192, slots=3),
        # The pass over dy reads and writes; the other only writes, but where the tensor cores wait for it.
        scale_dy=4 * width < 3 * inner,
    )
