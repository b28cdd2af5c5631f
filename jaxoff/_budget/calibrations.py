"""The fitted constants of budgets: what copies cost beyond their time by the rates of the device.

Each constant has a docstring with its unit, its range, and its origin: an entry of `bench/LOG.md` by its
heading, and the cards. Constants of kernels are data of a device's profile (`jaxoff._device.calibration`).
"""

from __future__ import annotations

HIDING_SHARE: float = 0.9
"""Part of a loop's compute that hides copies: the first and last copies have no kernel beside them.

Unit: none. Range: 0 to 1. Origin: chosen, not fitted.
"""

EXPOSED_STATE_SHARE: float = 0.52
"""The least part of the copies of state that nothing hides, where rows are updated in a backward loop.

Unit: none. Range: 0 to 1. Origin: a decoder's eight layers with 14 GB of state on one H200 (reloads of
residuals beside state).
"""

ORDERED_KERNEL_MS: float = 0.0095
"""What any offload in a loop costs for each kernel of the loop: kernels then run one behind the other.

Unit: ms. Range: at least 0. Origin: fitted to a decoder and a state space model on an H100 and an H200
(2026-11-26: plans by the compiler alone).
"""

COMPRESSING_PASSES: float = 3.0
"""Passes of memory over a value to compress and to restore the value: 1.5 of its bytes each.

Unit: passes. Range: at least 2. Origin: counted, not fitted.
"""

STREAMED_SHARE: float = 0.9
"""The rate of the link that a loop over blocks of state reaches, both directions at a time.

Unit: share of the link's rate. Range: 0 to 1. Origin: one H100 (2026-11-26: state on the host).
"""

DIVIDED_COPIES_WIN: float = 0.06
"""Part of the layers' time by which copies must win, by the model, where the compiler divides the values.

Unit: none. Range: 0 to 1. Origin: on two H200s copies that were to win 1.4% lost 4%, since collectives break
CUDA graphs and the copies hide less well (the batch stays divided).
"""

GROUPS_SLOWER: float = 0.02
"""Part of a step's time by which groups of iterations, each recomputed, may be slower by the model.

Unit: none. Range: 0 to 1. Origin: the stacks of a group are smaller. On one H200 a recurrence of 1,024 steps
took 308 ms in chunks of 32 (317 by the model), and 339 in one loop (313; conditions, chunks and pullbacks).
"""

PARTS_SLOWER: float = 1.5
"""The time of layers in parts, over their time by the model, at most.

Unit: none. Range: at least 1. Origin: attention over blocks of queries on one H200 (loops in layers of a
loop, masks of blocks, calls with shardings).
"""
