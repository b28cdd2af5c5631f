"""The experts of mixture-of-experts layers, with hand-written gradients.

`moe` takes (T, H) tokens with their experts and probabilities and returns (T, H), the layer after its router.
`grouped_mlp` takes (R, H) rows sorted by expert, the experts' weights and (E,) group sizes, and returns
(R, H) rows. `choose_implementation` returns an `Implementation`: "mosaic" (Pallas kernels for Hopper GPUs) or
"reference" (XLA operations), with the reason.

A call flows through `_moe` or `_grouped_mlp` (with `_checks`), `_implementation` (choice), `_op`
(differentiation rules, names for checkpoint policies), `_routing` (order of the rows) and a
`_backend.Backend`: `_reference.Reference` or `_mosaic.launch.Mosaic`.

Invariant: a group's outputs and gradients depend only on the group's rows and expert. A NaN in one group
reaches no other group, and equal inputs give equal bits.
"""

from pallas_kernels._grouped_mlp import grouped_mlp as grouped_mlp
from pallas_kernels._implementation import Implementation as Implementation
from pallas_kernels._implementation import choose_implementation as choose_implementation
from pallas_kernels._moe import moe as moe

__all__ = ["Implementation", "choose_implementation", "grouped_mlp", "moe"]
