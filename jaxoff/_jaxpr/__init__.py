"""JAX programs as data: no device, no policy.

`compat` is the one module that depends on a JAX release. `primitives` sorts equations into classes (products,
views, collectives; `KernelClass`), `dataflow` tells makers, readers and dependents of a variable, `scopes`
writes and reads the name-stack scopes of layers, `tag` is the name of a marked value. `kernels.KernelGraph`
says which equations XLA runs as kernels of their own, `provenance` where a value was made, `inline` puts
calls in place, `stack_slices` finds loops over slices of one stack, `per_device` gives one device's share.

In: jaxprs. Out: indices and rewritten jaxprs. Invariant: a rewritten jaxpr computes the results of the given
jaxpr.
"""
