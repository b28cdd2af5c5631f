"""Findings, tables and wording, shared by every report of jaxoff.

A `Finding` is a problem of a program, with a stable `FindingCode`, a message and a source line. `explain`,
`verify` and `jit` produce findings; `tables` turns a finding or a report into text, and byte counts into
decimal units; `near_miss` adds a suggestion to the message of an error about a misspelt word.

In: values of the packages above. Out: text and rich renderables.

Invariant: this package is the lowest floor. No module here imports JAX or another package of jaxoff.
"""
