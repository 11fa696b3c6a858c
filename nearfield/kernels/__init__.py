"""Kernels that several methods share: plain tensors in, plain tensors out."""
