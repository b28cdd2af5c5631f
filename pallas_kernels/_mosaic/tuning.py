"""Chooses the tile sizes and tile orders of the kernels.

`choose_configs` takes the shape of W1 and the number of rows and returns one `Config` for each of the six
kernel launches. Measured choices come from `tiles/<device kind>.json`, where each file records the card,
date, commit and command of its measurement. A shape without an entry takes the choices of `apply_rule`. Only
the H200 has a table: every other device reads the H200's.

Invariant: every chosen tile fits in the 227 KiB of shared memory of a Hopper kernel.

`python -m bench.tune_grouped_mlp` measures the candidates on a GPU and prints the file of its device.
"""

import dataclasses
import functools
import importlib.resources
import json
import re
from collections.abc import Mapping

from pallas_kernels._implementation import find_device_kind

# The device whose table serves devices without a table of their own.
_FALLBACK_DEVICE = "NVIDIA H200"

# Blocks of columns. Outputs with at most 28 blocks are walked row by row, wider outputs in strips. An H200 is
# fastest row by row in fc2 of DeepSeek-V3 (28 blocks) and in strips in grad_act of Mixtral (56 blocks):
# tiles/nvidia_h200.json.
_BLOCKS_OF_A_ROW = 28

# Blocks of columns in a strip. Measured on an H200: tiles/nvidia_h200.json.
_STRIP = 8

# Device -> the same two numbers, in all products of rows but the activation's gradient. On an H100, 14 to 16
# blocks are faster in strips of 4 and 8 blocks row by row, in fc2 and grad_x: bench/LOG.md, 2026-11-26.
_STRIPS_OF_PRODUCTS = {"NVIDIA H100 80GB HBM3": (12, 4)}

# Device -> blocks of columns in a strip of a weight gradient whose expert's rows stay in the L2 cache. Other
# devices walk as in products. Measured on an H100 at 512 to 2048 rows per expert: bench/LOG.md, 2026-11-26.
_STRIP_OF_WEIGHTS = {"NVIDIA H100 80GB HBM3": 2}

# Bytes. An expert's rows up to this size stay in the L2 cache while a weight gradient walks over them; larger
# groups are walked in strips. An H200 has 50 MB of L2, and 42 MB did not stay: bench/LOG.md, 2026-11-21.
_L2_NBYTES = 32 * 2**20

# Rows per expert. From this group length on, the rule prefers wide tiles. Measured on an H200 between 768 and
# 4096 rows per expert: bench/LOG.md, 2026-11-21.
_MANY_ROWS = 2048

# Device -> rows per expert, where wide tiles pay earlier in all products but the activation's gradient.
# Measured on an H100 at 1024 rows per expert: bench/LOG.md, 2026-11-26.
_MANY_ROWS_OF_PRODUCTS = {"NVIDIA H100 80GB HBM3": 1024}


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile size and tile order of one kernel.

    Attributes:
      block_columns: columns of an output tile, a multiple of 64.
      stages: slots of the ring of operands in shared memory.
      slots: shared-memory buffers through which each warpgroup stores its half tile. A buffer is 64 columns
        wide, 32 columns for a float32 output.
      minor: axis of the output whose blocks are walked first, 0 for rows or 1 for columns.
      width: blocks of the minor axis that are walked before the other axis advances. A width past the last
        block means all blocks.
    """

    block_columns: int
    stages: int = 4
    slots: int = 2
    minor: int = 1
    width: int = 64


@dataclasses.dataclass(frozen=True)
class Configs:
    """One `Config` for each kernel launch of the grouped MLP."""

    fc1: Config
    fc2: Config
    grad_act: Config
    grad_x: Config
    grad_w1: Config
    grad_w2: Config


# Gated activations. Accumulators of 128 columns of g and of u fill the registers of a multiplying warpgroup.
# FC1 walks more than eight blocks in strips: on an H100 faster by 1 to 5% at 15 and 23 blocks. The gradient's
# stores use the slots of its loads, which leaves room for five stages: bench/LOG.md, 2026-11-26.
_GATED_FC1 = Config(128, width=_STRIP)
_GATED_GRAD_ACT = Config(128, stages=5)


def bucket_rows(rows: int, experts: int) -> int:
    """Returns the largest power of two up to the mean number of rows per expert, at least 1.

    Example:
      >>> from pallas_kernels._mosaic.tuning import bucket_rows
      >>> bucket_rows(rows=98304, experts=128)
      512
    """
    return 1 << (max(rows // experts, 1).bit_length() - 1)


def name_table(device_kind: str) -> str:
    """Returns the file name of a device's table.

    Example:
      >>> from pallas_kernels._mosaic.tuning import name_table
      >>> name_table("NVIDIA H200")
      'nvidia_h200.json'
    """
    return re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_") + ".json"


@functools.cache
def load_table(device_kind: str) -> Mapping[tuple[int, int, int], Configs]:
    """Reads the measured choices for a device; a device without a file gets the H200's.

    Args:
      device_kind: the device's name, as in `jax.Device.device_kind`.

    Returns:
      A map (H, I, `bucket_rows`) -> `Configs`.

    Example:
      >>> from pallas_kernels._mosaic.tuning import load_table
      >>> load_table("NVIDIA H200")[4096, 14336, 4096].fc1.block_columns
      192
    """
    folder = importlib.resources.files(__package__) / "tiles"
    file = folder / name_table(device_kind)
    if not file.is_file():
        file = folder / name_table(_FALLBACK_DEVICE)
    names = [field.name for field in dataclasses.fields(Configs)]
    return {
        (entry["width"], entry["hidden"], entry["rows_bucket"]): Configs(
            **{name: Config(**entry[name]) for name in names}
        )
        for entry in json.loads(file.read_text())["tiles"]
    }


def choose_configs(w1_shape: tuple[int, ...], rows: int, parts: int = 1) -> Configs:
    """Chooses the tiles for a shape on the device in use: from the table, else by the rule.

    Args:
      w1_shape: (E, H, F).
      rows: number of rows R.
      parts: columns of FC1 a column of the activation: F / I, 2 for a gated activation.

    Returns:
      The choice.
    """
    experts, width, columns = w1_shape
    shape = experts, width, columns // parts
    kind = find_device_kind()
    chosen = load_table(kind).get((width, shape[2], bucket_rows(rows, experts)))
    chosen = chosen or apply_rule(shape, rows, kind)
    if parts == 1:
        return chosen
    grad_w1 = apply_rule(w1_shape, rows, kind).grad_w1
    return dataclasses.replace(chosen, fc1=_GATED_FC1, grad_act=_GATED_GRAD_ACT, grad_w1=grad_w1)


def apply_rule(w1_shape: tuple[int, ...], rows: int, device_kind: str = _FALLBACK_DEVICE) -> Configs:
    """Chooses the tiles for a shape without a measured entry.

    Tiles of 256 columns move the fewest bytes. Tiles of 192 columns hide their epilogues better. The rule
    takes 256 for long groups, and for outputs where 192 would leave a strip of 64 columns. For such outputs
    the activation gradient takes 128 where groups are short, since a wide tile has the longer epilogue.

    Args:
      w1_shape: (E, H, I).
      rows: number of rows R.
      device_kind: the device's name.

    Returns:
      The choice.
    """
    experts, width, inner = w1_shape
    many = rows >= _MANY_ROWS * experts
    many_of_products = rows >= _MANY_ROWS_OF_PRODUCTS.get(device_kind, _MANY_ROWS) * experts
    strips = _BLOCKS_OF_A_ROW, _STRIP
    strips_of_products = _STRIPS_OF_PRODUCTS.get(device_kind, strips)

    def product(columns, wide, narrow, many=many_of_products, strips=strips_of_products):
        exact = columns % 256 == 0
        config = wide if exact and (many or columns % 192 == 64) else narrow
        most, strip = strips
        blocks = -(-columns // config.block_columns)
        return config if blocks <= most else dataclasses.replace(config, width=strip)

    def weights(columns):
        config = product(columns, *plain, strips=strips)
        fits = 2 * columns * rows // experts <= _L2_NBYTES
        strip = _STRIP_OF_WEIGHTS.get(device_kind, config.width) if fits else _STRIP
        return dataclasses.replace(config, width=strip)

    plain = Config(256), Config(192, slots=3)
    activation = Config(256, stages=3, slots=1), Config(192, slots=1)
    small = not many and inner % 128 == 0 and inner % 192 == 64
    return Configs(
        fc1=product(inner, *plain),
        fc2=product(width, *plain),
        grad_act=Config(128, stages=5, slots=1) if small else product(inner, *activation, many, strips),
        grad_x=product(width, *plain),
        grad_w1=weights(inner),
        grad_w2=weights(width),
    )


def scales_dy(w1_shape: tuple[int, ...]) -> bool:
    """Returns whether the probs multiply dy (true) or a (false) in the gradient of W2.

    Scaling dy is a separate pass over (R, H): one read and one write. Scaling a costs one write of (R, I) in
    the epilogue of `grad_act`, during which the tensor cores are idle.
    """
    _, width, inner = w1_shape
    return 4 * width < 3 * inner
