"""State at rest on the host between steps: found in the program, updated in blocks or with its gradients.

An optimizer's moments, and everything else that only the update of a training step reads and writes, sleep
through the forward and the backward pass. `find_updates` finds such arguments in a differentiated program;
`stream_updates` writes the program that takes and returns them in pinned host memory, and computes their
update in a loop over blocks: while a block is computed, the next one is on its way to the device and the one
before on its way back. Where nothing of all gradients comes between, `write_early` writes the update of a
layer into the loop of the backward pass. On several devices each has a part of the state and a loop of its
own, in a `jax.shard_map`; `ManualStep` does the same inside of a user's. In comes a `ClosedJaxpr` whose
arguments are on the device, out goes the same step.
The invariant: the same equations compute each element, so no update changes its numbers.
"""
