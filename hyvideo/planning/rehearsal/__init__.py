"""Rehearsal of a run on a CPU: the user's settings at their true sizes, with tiny models of random
weights.

    settings   which settings change, and why
    pairs      stand-ins for rated pairs that do not exist yet
    stand_ins  cheap replacements of the two operations that a CPU cannot compute at true sizes
    stages     the commands of a run, one after another, and what they must leave behind
    checks     the files of a run, compared with its settings
"""
