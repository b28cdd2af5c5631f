"""The process and the machine under a program: versions, XLA's flags, pinned host memory, the link.

Modules:
  versions, pinned_pool, flags: facts about JAX and XLA, as constants and pure functions of their arguments.
  link: times copies between a device and pinned host memory.
  environment: `collect()` reads this process into an `Environment`, a frozen record.
  judgements: `judge` turns an `Environment` into `JudgedSetting`s, each with its effect on offload.
  doctor, table: `diagnose` turns an `Environment` into a `Diagnosis`, which the table prints.

Invariant: only `collect` and the link's measurement read the process; every other result depends on its
arguments alone.
"""
