"""The cells engine in Triton, for GPUs."""
