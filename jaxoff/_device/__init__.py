"""Devices: their rates, the time of a kernel or a copy by these rates, and compilation for an absent GPU.

Types:
  Device, SharedLink (profile): measured rates of a GPU, of its memory and of its link to the host.
  Calibration, Constant (calibration): fitted efficiencies of kernels, data of a profile.
  Target (target): GPUs by XLA's description, for compilation ahead of time.

An equation goes into `flops.product_flops` and `kernel_time`, and operations or ms come out. `measure` times
a GPU and gives a `Device`. `data/` holds a profile and a description for each known GPU.

Invariant: times depend on shapes, dtypes and a `Device` alone; a fitted number is data of the profile.
"""
