"""Tile sizes and orders of the kernels: a table of what was measured, and a rule for the rest.

`python -m bench.tune_grouped_mlp` measures the candidates on a GPU and prints the table.
"""

import dataclasses

# Output blocks of a row up to which one row after the other is walked; wider outputs in strips.
_BLOCKS_OF_A_ROW = 28
_STRIP = 8
# Bytes of an expert's rows that stay in L2 while a weight gradient walks over them; more go in strips.
_L2_NBYTES = 32 * 2**20
_MANY_ROWS = 2048


@dataclasses.dataclass(frozen=True)
class Config:
    """How one kernel cuts its output and walks over it.

    Attributes:
      block_columns: width of a tile of the output, a multiple of 64.
      stages: steps of operands that shared memory holds.
      slots: buffers of 64 columns (of float32: 32) through which a warpgroup's half of a tile leaves.
      minor: the axis of the output, 0 for rows or 1 for columns, whose blocks are walked first.
      width: how many blocks of that axis are walked before the other advances; more than there are means all.
    """

    block_columns: int
    stages: int = 4
    slots: int = 2
    minor: int = 1
    width: int = 64


@dataclasses.dataclass(frozen=True)
class Configs:
    """One for each product of the grouped MLP."""

    fc1: Config
    fc2: Config
    grad_act: Config
    grad_x: Config
    grad_w1: Config
    grad_w2: Config


def bucket_rows(rows: int, experts: int) -> int:
    """The power of two at or below the mean number of rows an expert has, at least 1.

    Example:
      >>> from pallas_kernels._mosaic.tuning import bucket_rows
      >>> bucket_rows(rows=98304, experts=128)
      512
    """
    return 1 << (max(rows // experts, 1).bit_length() - 1)


def choose_configs(w1_shape: tuple[int, ...], rows: int) -> Configs:
    """Chooses the tiles for a shape: those of the table, else those of the rule.

    Args:
      w1_shape: (E, H, I).
      rows: number of rows R.

    Returns:
      The choice.
    """
    experts, width, inner = w1_shape
    found = TABLE.get((width, inner, bucket_rows(rows, experts)))
    return found or apply_rule(w1_shape, rows)


def apply_rule(w1_shape: tuple[int, ...], rows: int) -> Configs:
    """Chooses tiles for a shape that was not measured.

    Tiles 256 wide move the fewest bytes, tiles 192 wide hide their ends better: the wider serve groups that
    are long, and outputs of which the narrower would leave a strip of 64. There, and where groups are short,
    the activation's gradient takes 128, since a wide tile has the longer epilogue.
    """
    experts, width, inner = w1_shape
    many = rows >= _MANY_ROWS * experts

    def product(columns, wide, narrow):
        exact = columns % 256 == 0
        config = wide if exact and (many or columns % 192 == 64) else narrow
        blocks = -(-columns // config.block_columns)
        return config if blocks <= _BLOCKS_OF_A_ROW else dataclasses.replace(config, width=_STRIP)

    def weights(columns):
        config = product(columns, *plain)
        fits = 2 * columns * rows // experts <= _L2_NBYTES
        return config if fits else dataclasses.replace(config, width=_STRIP)

    plain = Config(256), Config(192, slots=3)
    activation = Config(256, stages=3, slots=1), Config(192, slots=1)
    small = not many and inner % 128 == 0 and inner % 192 == 64
    return Configs(
        fc1=product(inner, *plain),
        fc2=product(width, *plain),
        grad_act=Config(128, stages=5, slots=1) if small else product(inner, *activation),
        grad_x=product(width, *plain),
        grad_w1=weights(inner),
        grad_w2=weights(width),
    )


def scales_dy(w1_shape: tuple[int, ...]) -> bool:
    """Says which operand of W2's gradient takes the probs: dy (true), or a.

    Scaling dy is a pass of its own, which reads and writes (R, H). Scaling a only writes (R, I), but in
    grad_act's epilogue, where the tensor cores wait for it.
    """
    _, width, inner = w1_shape
    return 4 * width < 3 * inner


# By (H, I, bucket_rows), measured on an H200.
TABLE: dict[tuple[int, int, int], Configs] = {
    # Mixtral 8x7B
    (4096, 14336, 4096): Configs(
        fc1=Config(192, slots=3, width=8),
        fc2=Config(256),
        grad_act=Config(256, stages=3, slots=1, width=8),
        grad_x=Config(256, width=8),
        grad_w1=Config(256, width=8),
        grad_w2=Config(256, minor=0, width=8),
    ),
    # DeepSeek-V3
    (7168, 2048, 4096): Configs(
        fc1=Config(256),
        fc2=Config(256),
        grad_act=Config(256, stages=3, slots=1, width=4),
        grad_x=Config(192, slots=3),
        grad_w1=Config(256),
        grad_w2=Config(256, minor=0),
    ),
}
