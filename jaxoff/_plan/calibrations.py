"""The fitted constants of the planner: memory rules of XLA, and margins for the errors of predictions.

Each constant has a docstring with its unit, its range, and its origin: an entry of `bench/LOG.md` by its
heading. All of them were fitted to, or read off, four benchmark layers (`dense`, `mlp`, `nano`, `mixtral`)
compiled for or run on an H200 with jaxlib 0.11.2. Another device or another jaxlib may need other values.
"""

from __future__ import annotations

RELOADED_LAYERS: int = 2
"""Layers outside of loops whose offloaded residuals are on the device when the backward pass starts.

Unit: number of layers, the last ones of the forward pass. Range: at least 0. Origin: programs of layers in a
row, compiled for an H200 (2026-11-23, evening: every plan of the MoE frontiers by compilation timed and run).
"""

UNSHARED_PART: float = 0.75
"""Part of the memory which small and large values could share, but do not share in loops with copies.

Unit: none. Range: 0 (the working set is the largest sum of small and large values at one kernel) to 1 (the
working set is the largest sum of small values plus the largest sum of large values). Origin: fitted to 19
placements of the dense layer, compiled for an H200 (2026-11-22, night: kernels by class, plans over a mesh).
"""

LARGE_PART: float = 0.5
"""Border between small and large values, as a part of the largest value of a layer's forward pass.

Unit: none. Range: 0 to 1. A value above the border is large. Origin: read off XLA's buffer
assignments of the benchmark layers (2026-11-22: the planner, whole steps and a turn's memory); not fitted.
"""

COPY_SLOWDOWN: float = 0.02
"""Slowdown of kernels during a copy, as a part of the copy's duration.

Unit: none. Range: at least 0. Origin: traces of 11 steps (dense, `nano`, `mixtral`) on an H200 (2026-11-22,
night: kernels by class, plans over a mesh).
"""

SECOND_LOOP_PART: float = 0.003
"""Cost of a second loop for the first layers, as a part of the duration of a step.

Unit: none. Range: at least 0. Origin: two plans by layer of 48 dense layers on an H200, predicted 0.03%
faster than a single loop, were 0.4 and 0.6% slower (2026-11-23, after the plans by layer: `mixtral` by
compilation; a second loop costs time).
"""

MARGIN: float = 0.1
"""Default part of the free budget, left unused by a plan. Free is the budget less arguments and results.

Unit: none. Range: 0 to 1, without 1. Origin: of 121 placements of the four layers compiled for an H200 the
worst took 8% more of the free budget than predicted (2026-11-23, later: a margin of what is not known).
"""

WIDE_MARGIN: float = 0.25
"""As `MARGIN`, for steps over several devices and for train steps with layers outside of loops.

Origin: train steps of `nano` over two to eight devices, compiled for H200s, took up to 17% more of the free
budget than predicted (2026-11-23, later: a margin of what is not known).
"""
