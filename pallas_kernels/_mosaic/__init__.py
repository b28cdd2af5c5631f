"""The grouped MLP and the MoE layer as Pallas kernels for Hopper GPUs.

`launch.Mosaic` implements `pallas_kernels._backend.Backend`: 16-bit rows and weights come in, and 16-bit rows
and 16-bit or float32 weight gradients go out. `row_tiling` cuts the rows into tiles on the device, `tuning`
chooses tile sizes, and two kernels compute all products: `rows.rows_product` (rows times their expert's
matrix, with the epilogues of `row_products` and `gated`) and `weights.grad_weight` (a sum over an expert's
rows). Both pass their operands through a `ring.Ring` in shared memory, and take rows by index
(`row_copies`). `gather` adds the rows of a token.

Invariant: each output tile is written by one program, in a fixed order of sums and without atomics, so equal
inputs give equal bits. A program waits for every barrier phase and every copy before it ends.
"""
