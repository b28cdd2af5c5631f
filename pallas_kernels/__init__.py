"""Grouped matrix products for mixture-of-experts layers. Imports jax only."""

from pallas_kernels.grouped_mlp import grouped_mlp as grouped_mlp

__all__ = ["grouped_mlp"]
