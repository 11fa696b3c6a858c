"""The cells engine in torch, one head at a time."""
