"""Size of the parts in which videos are scored: memory does not grow with the number of videos.

A part is large enough that scorers which move to the GPU for it, and requests to a reward service,
are few.
"""

PART_BYTES = 2**29  # of decoded videos: three of 121 x 480 x 864


def num_per_part(num_bytes: int) -> int:
    """Return how many items of ``num_bytes`` bytes make up a part, at least 1."""
    return max(1, PART_BYTES // num_bytes)
