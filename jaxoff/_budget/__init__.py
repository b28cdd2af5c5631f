"""A differentiated step under a budget of device memory, without a name or a policy in its model.

In: a traced train step. Its layers become `JointGraph`s, each the equations of a layer and of its backward
pass: `find_layers` finds loops over layers with the loops of their backward passes (`LoopPair`),
`find_sequences` alike layers one after the other (`LayerSequence`) and sections of what does not repeat
(`Section`). `choose_placements` decides for each value, as `Placements`: saved on the device, offloaded into
host memory, or recomputed in the backward pass. `LayeredProgram` writes the program. A row-wise `Region` runs
part by part: of a head where its logits decide the peak, of layers where no placements fit. `find_fitting`
compiles programs until a program is within the budget. Out: a program of the same step.

Invariant: the results of the step do not depend on the placements, but for rounding.
"""
