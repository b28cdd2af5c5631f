"""The order of kernels and copies in a program, and `jaxoff.jit`, which applies it.

`jit` traces the user's function once and hands the jaxpr to `rewrite`, which finds the loops over layers
(`loops`) and the equations outside of loops. Each body becomes an `OrderProblem` in all but name
(`problem.OrderProblem`); `order.ordered` chains its large values by optimization barriers, with the times of
copies (`copy_times`, `copy_waits`), collectives and the memory held (`liveness`). `host_memory` counts host
stacks before compilation.

In: a jaxpr and a `Device`. Out: a jaxpr and compiler options. Invariant: the new program has the arguments,
results and effects of the given program; only the order of its equations differs, and where its stacks live.
"""
