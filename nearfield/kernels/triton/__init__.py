"""The cells engine in Triton, held to the reference by tests/test_triton.py. No method chooses it yet.

Known gap: where more cells reach a row's threshold than there are slots (ties, or more than some fifty probes), those beyond are
lost to the forward pass.
"""
