"""Layers of the user's model with a policy: `scan` for equal layers in a loop, `layers` for layers in a row.

`scan` and `layers` put each layer under `jax.checkpoint` with the policy, and write scopes into the name
stack by which `jaxoff.jit` and `jaxoff.plan` recognise the layers. `keep_first` decides whether the
residual at the start of a layer's backward pass stays on the device.

In: a function of a layer, its arrays, a policy. Out: the outputs, as of `jax.lax.scan` or a chain of calls.

Invariant: values and gradients are those of the same layers without jaxoff. Only placements and order differ.
"""
