"""Which sizes of groups of ranks go together. Imports no torch, so that a mistake is told in the first second."""


def layout_problem(num_processes: int, sp_size: int, dp_replicate: int = 1) -> str | None:
    """Why ranks cannot be laid out so, with what could be; None if they can."""
    if num_processes % sp_size:
        return (
            f"the number of processes must be a multiple of sp_size, got {num_processes} and sp_size {sp_size}; "
            f"sp_size could be {_listed(num_processes)}"
        )
    if num_processes % (dp_replicate * sp_size):
        return (
            f"dp_replicate must divide the {num_processes // sp_size} data-parallel replicas "
            f"({num_processes} processes, sp_size {sp_size}), got {dp_replicate}; it could be "
            f"{_listed(num_processes // sp_size)}"
        )
    return None


def _listed(number: int) -> str:
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)
