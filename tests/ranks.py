"""Test cases whose tests run on several ranks, started once per class."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta

import torch
from torch.testing._internal.common_distributed import MultiProcContinuousTest
from torch.testing._internal.common_utils import instantiate_parametrized_tests


class RankTest(MultiProcContinuousTest):
    """Every test method runs on every rank; ``self.device`` is the rank's device."""

    timeout = timedelta(seconds=120)

    @property
    def device(self) -> torch.device:
        return torch.device(self.device_type(), self.rank if self.device_type() == "cuda" else None)

    @classmethod
    def _run_test_given_id(cls, test_id: str, **kwargs: object) -> None:
        torch.set_num_threads(1)
        # torch warns about its own defaults here, once a rank and test.
        warnings.simplefilter("ignore")
        super()._run_test_given_id(test_id, **kwargs)


class GlooTest(RankTest):
    world_size = 4

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    @classmethod
    def device_type(cls) -> str:
        return "cpu"


def on_ranks(tests: type, ranks: type[RankTest], *, module: str) -> type:
    """``tests``' methods as a test class on ``ranks``, with its parametrized ones spelled out.

    Parametrization rewrites the class that holds the methods, so that each backend needs its own.
    Assign the result to a variable of ``module`` named as ``tests``: spawned ranks look it up.
    """
    members = {k: v for k, v in vars(tests).items() if k not in ("__dict__", "__weakref__")}
    members["__module__"] = module
    cls = type(tests.__name__, (ranks,), members)
    instantiate_parametrized_tests(cls)
    return cls


os.environ.setdefault("OMP_NUM_THREADS", "1")
