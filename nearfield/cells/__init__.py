"""The cells engine."""
