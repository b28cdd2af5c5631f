"""Names, marks and policies: for each value of a checkpointed function, a placement.

`marks` binds a `Tag` (a name, a mark) to a value. A `Policy` maps a tag, or the primitive of an untagged
value, to a `Decision`: a `Placement` and the `Rule` behind the placement. `combinators` makes policies out
of policies (`Either`, `FirstLayers`, `KeepFirst`, `OnDevice`), `presets` holds the registry, and `protocol`
asks any policy of `jax.checkpoint`, from jaxoff or elsewhere, for a `Decision`.

In: lists of names, a preset, a tagged value. Out: policies for `jax.checkpoint`, decisions for reports.

Invariant: a policy is frozen, hashable and pure. The same equation gets the same decision, so equal policies
share the entries of JAX's trace caches, and a report repeats the decision made during tracing.
"""
