"""Tests of merge_rows and average_gradients on two processes."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from hyvideo.distributed import mesh as ranks
from hyvideo.distributed.collectives import average_gradients, merge_rows
from tests.distributed.launch import launch


def merged_and_averaged() -> list:
    mesh = ranks.start(1, torch.device("cpu"))
    rows = merge_rows({mesh.rank: [1.0, mesh.rank], 2: [0.1, mesh.rank]}, 4, 2, mesh)
    parameters = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad = torch.full((2, 3), 1.0 + mesh.rank)
    if mesh.rank:
        parameters[1].grad = torch.arange(4.0)
    average_gradients(parameters, mesh, is_sharded=False)
    averaged = [parameter.grad.tolist() for parameter in parameters]
    # Two ranks that share a video: each has half of its tokens and twice their gradient.
    parameters[2].grad = torch.full((1,), 4.0 * mesh.rank)
    average_gradients(parameters[2:], replace(mesh, sp_size=2), is_sharded=False)
    return [rows.nan_to_num(-1.0).tolist(), averaged, parameters[2].grad.item()]


def test_rows_come_from_the_lowest_rank_and_gradients_are_averaged():
    for rows, gradients, of_one_video in launch(f"{__name__}:merged_and_averaged", 2):
        assert rows == [[1, 0], [1, 1], [0.1, 0], [-1, -1]]
        assert gradients == [[[1.5] * 3] * 2, pytest.approx([0, 0.5, 1, 1.5]), [0]]
        assert of_one_video == 2
