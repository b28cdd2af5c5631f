"""Residuals: the values of a function's forward pass with a use in the backward pass, and their placements.

`TracedFunction` holds the jaxpr of a user's function and, on demand, of its gradients. `analyse` finds every
`Residual`: name, shape, bytes, placement, rule, source line. `traffic` estimates the copies between device
and host against the compute beside the copies. `findings` checks the analysis for failures without an error
of their own. `explain` puts residuals, traffic and findings into a `Report`, a table or JSON.

In: a function of arrays and its arguments, traced and never run. Out: frozen dataclasses.

Invariant: bytes are read off the differentiated program, so the host bytes of a report are the bytes of the
program's arrays in host space. Only times are estimates.
"""
