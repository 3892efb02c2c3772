"""Print noise, gradient norm and equalizer factor of each step of the built-in samplers, as Markdown.

python -m examples.sampler_tables --num_steps 20 --shift 5 --eta 0.5
"""

from collections.abc import Iterable, Sequence

from hyvideo.data.outside import Parser, exit_on_error
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler
from hyvideo.schedulers.transitions import SAMPLERS


def tables(num_steps: int, shift: float, eta: float) -> dict[str, str]:
    """Return a table by title: a row for each step, a column for each sampler; 0 at deterministic steps."""
    scheduler = FlowMatchDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(num_steps)
    quantities = {
        "Standard deviation of each step": (scheduler.std_devs, ".4f"),
        "Gradient norm N_t of the log-probability": (scheduler.compute_log_prob_grad_norms, ".4g"),
        "Equalizer factor S_t = median(N) / N_t": (scheduler.compute_grad_balancing_factors, ".4g"),
    }
    found = {}
    for title, (values_of, spec) in quantities.items():
        columns = [values_of(eta=eta, sde_type=sde_type).tolist() for sde_type in SAMPLERS]
        steps = enumerate(zip(scheduler.sigmas.tolist(), *columns), start=1)
        rows = [[str(number), f"{sigma:.4f}", *(f"{v:{spec}}" for v in values)] for number, (sigma, *values) in steps]
        found[title] = markdown_table(["step", "sigma", *SAMPLERS], rows)
    return found


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join("| " + " | ".join(cells) + " |\n" for cells in [head, ["---"] * len(head), *rows])


@exit_on_error("sampler_tables.py")
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--num_steps", type=int, default=20, help="number of denoising steps")
    parser.add_argument("--shift", type=float, default=5.0, help="shift of the schedule")
    parser.add_argument("--eta", type=float, default=0.5, help="scale of the noise")
    for title, table in tables(**vars(parser.parse_args())).items():
        print(f"{title}\n\n{table}")


if __name__ == "__main__":
    main()
