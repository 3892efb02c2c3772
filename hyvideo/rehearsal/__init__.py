"""Rehearsal of a run on a CPU: the user's settings at their true sizes, with tiny models of random
weights.

    settings   which settings change, and why
    stand_ins  cheap replacements of the two operations that a CPU cannot compute at true sizes
    stages     the commands of a run, one after another
    rehearsal  tiny models are written, and the stages follow
"""
