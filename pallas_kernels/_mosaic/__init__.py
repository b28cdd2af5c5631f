"""The grouped MLP as Pallas kernels for Hopper GPUs."""
