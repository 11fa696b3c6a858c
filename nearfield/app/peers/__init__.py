"""Rules that others have published for which keys a query reads, small and plain, to be measured beside cells.

They say which keys count, not how fast they could be read: all logits are computed, and most of them dropped. `nearfield ruler`
runs them on the prompts that it runs cells on, at the same number of keys.
"""
