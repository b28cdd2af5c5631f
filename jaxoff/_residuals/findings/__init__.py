"""Findings of `explain`: failures of an offload without an error of their own, read off the traced program.

Each check is a generator from an `Analysis` to `Finding`s and has a name of the form `find_...`. `names`
checks names and marks, `placements` checks placements, `runtime` checks this machine and its software, and
`registry` holds all checks. `finding` has questions shared by the checks.

To add a check: a `FindingCode`, a generator in a module of this package, an entry in `registry.CHECKS`, a
  test.

In: an `Analysis`, a `Runtime`. Out: findings, without repeats.

Invariant: a check reads the analysis and changes nothing. The order of the findings is the order of the
  checks.
"""
