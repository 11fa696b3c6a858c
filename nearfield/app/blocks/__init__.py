"""Block sizes for the card at hand, found by trying them.

passes       whole passes, in which a kernel is compiled, timed and tried
compilers    processes that compile kernels ahead of the one that runs them
times        what each kernel of a pass takes
search       which block sizes to try next, and which to take
find         all of it for one card, within a deadline
"""
