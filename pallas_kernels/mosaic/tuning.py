"""Tile sizes and orders of the kernels."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class RowsConfig:
    block_columns: int = 256
    stages: int = 4
    minor: int = 1
    width: int = 8
    programs: int = 132


@dataclasses.dataclass(frozen=True)
class WeightsConfig:
    block_columns: int = 256
    stages: int = 4
    minor: int = 1
    width: int = 8
    programs: int = 132
