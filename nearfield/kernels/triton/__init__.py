"""The cells engine in Triton, held to the reference by tests/test_triton.py. No method chooses it yet.

Where more cells reach a row's threshold than there are slots (ties, or more than some fifty probes), the first ones are
opened and not the best.
"""
