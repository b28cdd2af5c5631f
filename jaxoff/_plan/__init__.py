"""Plans for a train step within a budget of memory, before the step runs.

In: a train step with its arguments, a device and budgets. Out: a `Plan` of `jaxoff._budget`, whose `step`
runs within the budget, or a `Frontier` of plans.

Invariant: a plan is what `jaxoff.jit(step, device_bytes=...)` finds for the same step, device and budget.
Only the judge of memory differs: the compiler of the GPU at hand, the compiler ahead of time, or an estimate.
"""
