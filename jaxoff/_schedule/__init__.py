"""The order of kernels and copies in a program, and `jaxoff.jit`, which applies the order.

`rewrite` finds the loops over layers (`loops` writes them out as while loops) and the equations outside. Each
straight-line program becomes an `OrderProblem` (`problem`). `decide` turns the problem into a `Schedule`, a
list of actions, by the times of copies (`copy_times`, `copy_waits`), the order of collectives (`collectives`)
and the memory held (`liveness`); `emit` turns the schedule into equations: problem -> decide -> Schedule ->
emit. `calibrations` holds the constants. `host_memory` counts host stacks before compilation. `recipes` lists
the ways to compile a program, among which `jit` chooses by the memory of the compiled candidates.

In: a jaxpr and a `Device`. Out: a jaxpr and compiler options. Invariant: the new program has the arguments,
results and effects of the given program; only the order of equations and the buffers of stacks differ.
"""
