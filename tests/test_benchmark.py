"""The benchmark runs with a small model, and both models agree."""

import torch

from tests.benchmark import CPU, SMALL, benchmark
from tests.cuda.speed import Workload


def test_the_benchmark_compares_results_and_seconds():
    work = Workload(CPU, torch.float32, SMALL | {"num_layers": 1}, (1, 2, 2), text_tokens=8)
    for _, difference, ratio in benchmark(work, repeats=1):
        assert difference < 1e-5 and ratio > 0
