"""An audit of a run: what its files say, recomputed by arithmetic of its own.

Nothing here imports `hyvideo`: formulas are written again, from the paper (arXiv:2603.21872) and the
pages of docs/, and models and scorers are used through their public commands.
"""
