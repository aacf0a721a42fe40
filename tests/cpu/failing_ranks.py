"""Rank tests that fail, one kind after another; tests/cpu/test_ranks.py runs them."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import GlooTest


class TestFailures(GlooTest):
    world_size = 2

    def all_reduced(self) -> float:
        value = torch.ones(())
        dist.all_reduce(value)
        return value.item()

    def test_1_passes(self) -> None:
        assert self.all_reduced() == 2

    def test_2_every_rank_raises(self) -> None:
        raise ValueError("raised everywhere")

    def test_3_passes_after_it(self) -> None:
        assert self.all_reduced() == 2

    @pytest.mark.timeout(2)
    def test_4_one_rank_ends_and_the_other_waits(self) -> None:
        if self.rank == 1:
            os._exit(3)
        time.sleep(600)

    def test_5_passes_after_it(self) -> None:
        assert self.all_reduced() == 2
