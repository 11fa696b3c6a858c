"""The experiments of the paper, run again with the methods of this library.

    python -m experiments                     # what there is
    python -m experiments error-vs-k          # run one; a second run goes on where the first was stopped
    python -m experiments all --quick         # everything, small
    python -m experiments report              # build the page about the committed results: experiments/report.html

Every experiment plans its units of work, and each unit is saved when it is done. Pictures and text are made from what is saved.
"""
