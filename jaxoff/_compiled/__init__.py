"""Compiled programs: their copies between device and host memory, and faults of their offload.

Input: a `jax.stages.Compiled` for a GPU. Output, by `verify`: `CompiledFacts` (copies, memory, findings).

Modules, each a step:
  hlo: parses XLA's text into a `Module` of `Computation`s of `Instruction`s.
  transfers: finds each `Transfer` with host memory, and the `Execution` around it.
  cuda_graphs: finds the compute able to overlap a transfer, by the CUDA graphs captured.
  value_identity: finds transfers of equal values.
  exchange: counts the bytes that collectives exchange.
  facts, checks, verify, table: the result, its faults, the entry point, the printed form.

Invariant: nothing runs and no GPU is needed; every result follows from the program's text and XLA's memory
analysis.
"""
