"""The planner: the fastest placement of a step's residuals within budgets of device and host memory.

In goes a loss or a train step with its arguments, the profile of a device, and budgets; out comes a `Plan`,
whose policy places each name, or a `Frontier` of plans. Nothing is compiled or allocated unless the caller
asks.

- `divide_loss` and `divide_step` turn the traced program into a `DividedStep`: a `Layer` for each kind of
  layer group, with its values and kernels, and a timeline of `Point`s for all other memory.
- `LayerModel` and `StepModel` predict the cost of any `Placements`: durations, device memory, host memory.
- `find_fastest` and `find_smallest` state the same rules as an integer program and find the best
  `Placements`.
- `find_fitting` replaces predicted memory by the memory of compiled steps.

Invariant: for every placement found, the search and the model agree on the peak; the search
raises an error otherwise. A rule of the model therefore changes together with its counterpart in the search.
"""
