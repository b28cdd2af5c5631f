"""Programs measured on a GPU: step time, memory, busy times of kernels and copies.

Modules:
  gpu_trace: `read` turns a file of JAX's profiler into a `Trace` of `Event`s, and a `Trace` into `GpuTimes`.
  intervals: union, difference and length of time intervals.
  measure: `measure` runs a program and returns a `Measurement`: times of calls, peak memory, `GpuTimes`.
  table: prints `GpuTimes`.

Invariant: a copy's exposed time is the length of its intervals minus the union of the kernels' intervals on
the same GPU. So exposed time never exceeds busy time.
"""
