"""JAX programs as data: no device, no policy.

- `compat`: all code that depends on the JAX release.
- `primitives`: classes of equations (products, views, collectives; `KernelClass`).
- `dataflow`: makers, readers and dependents of a variable.
- `scopes`: the name-stack scopes of layers.
- `tag`: the name of a marked value.
- `kernels`: `KernelGraph`, the equations XLA runs as kernels, and the equations fused into each kernel.
- `provenance`: the equation, argument or constant behind a value, through calls, loops and views.
- `inline`: calls replaced by their equations.
- `stack_slices`: loops over slices of a shared stack.

In: jaxprs. Out: indices and rewritten jaxprs. Invariant: a rewritten jaxpr computes the results of the given
jaxpr.
"""
