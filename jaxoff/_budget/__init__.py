"""A differentiated step under a budget of device memory, without a name or a policy in its model.

In: a traced train step. `find_loop_pairs` finds each loop over layers with the loop of its backward pass, as
a `LoopPair`: the layer's equations, the values read by the backward pass, and the operands of both loops.
`choose_placements` decides for each value, as `Placements`: saved in a stack on the device, offloaded into a
stack in host memory, or recomputed in the backward loop. `write_placed` writes the program. `find_fitting`
compiles programs until a program is within the budget. Out: a program of the same step.

Invariant: the results of the step do not depend on the placements, but for rounding.
"""
