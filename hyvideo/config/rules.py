"""Rules between settings. Imports neither torch nor a model."""

from collections.abc import Iterator


def layout_problems(world_size: int, sp_size: int, dp_replicate: int, num_heads: int | None = None) -> Iterator[str]:
    """Reasons why ranks cannot be laid out so, with what could be."""
    if world_size % sp_size:
        yield (
            f"the number of processes must be a multiple of sp_size, got {world_size} and sp_size {sp_size}; "
            f"sp_size could be {_divisors(world_size)}"
        )
    elif world_size % (dp_replicate * sp_size):
        yield (
            f"dp_replicate must divide the {world_size // sp_size} data-parallel replicas "
            f"({world_size} processes, sp_size {sp_size}), got {dp_replicate}; it could be "
            f"{_divisors(world_size // sp_size)}"
        )
    if num_heads is not None and sp_size > num_heads:
        yield (
            f"sp_size must be at most the {num_heads} attention heads of the transformer, got {sp_size}; "
            f"{_divisors(num_heads)} give every rank the same number of them"
        )


def _divisors(number: int) -> str:
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)
