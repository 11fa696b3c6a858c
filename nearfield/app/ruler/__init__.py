"""`nearfield ruler`: does a model still read? The 13 tasks of RULER at several lengths, attention methods side by side.

In reading order: `official` (the package that RULER comes in), `worker` and `generators` (its generators, in a process of their
own), `prompts` (made once, kept on disk), `ways` (how a prompt is read and answered), `answers` (of a model), `needles` (which
heads opened them), `record` (answers on disk), `run` (all of it), `scores`, `report`, `page` and `command`.
"""
