"""Test cases whose tests run on several ranks, started once per class."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import unittest
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcContinuousTest
from torch.testing._internal.common_utils import instantiate_parametrized_tests

from tests import scenarios

# What a Gloo rank finds imported when it is forked. torchtitan's trainer alone takes seconds.
_PRELOADED = [
    "tests.invocations",
    "tests.partial_backwards",
    "tests.pipelines",
    "titan_lifecycle.trainer",
    "torchtitan.models.deepseek_v3",
]


class RankTest(MultiProcContinuousTest):
    """Every test method runs on every rank; ``self.device`` is the rank's device."""

    timeout = timedelta(seconds=120)

    @property
    def device(self) -> torch.device:
        return torch.device(self.device_type(), self.rank if self.device_type() == "cuda" else None)

    def setUp(self) -> None:
        cls = type(self)
        if cls.poison_pill:
            # A test has failed, and its ranks may hang in a collective. The next gets new ones.
            for process in cls.processes:
                process.kill()
                process.join()
            cls.poison_pill = cls._processes_spawned = False
        super().setUp()

    @classmethod
    def _use_start_method(cls, method: str) -> None:
        # torch's class sets its own only where none is set.
        multiprocessing.set_start_method(method, force=True)

    @classmethod
    def _run_test_given_id(cls, test_id: str, **kwargs: object) -> None:
        torch.set_num_threads(1)
        # torch warns about its own defaults here, once a rank and test.
        warnings.simplefilter("ignore")
        super()._run_test_given_id(test_id, **kwargs)


class GlooTest(RankTest):
    """Ranks on the CPU, forked from one process that has imported what they need."""

    world_size = 4

    @classmethod
    def setUpClass(cls) -> None:
        cls._use_start_method("forkserver")
        multiprocessing.set_forkserver_preload(_PRELOADED)
        super().setUpClass()

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    @classmethod
    def device_type(cls) -> str:
        return "cpu"


class NcclTest(RankTest):
    """One GPU a rank, with NCCL or RCCL; skipped on a machine with fewer GPUs than ranks.

    Under torchrun its processes are the ranks; otherwise each class starts its own.
    """

    world_size = 4

    @classmethod
    def backend_str(cls) -> str:
        return "cpu:gloo,cuda:nccl"  # Gloo for what is offloaded to the CPU

    @classmethod
    def device_type(cls) -> str:
        return "cuda"

    @classmethod
    def setUpClass(cls) -> None:
        cls._use_start_method("spawn")  # a process that has used CUDA must not be forked
        super().setUpClass()
        if (num_gpus := torch.cuda.device_count()) < cls.world_size:
            raise unittest.SkipTest(
                f"needs {cls.world_size} GPUs, one a rank; this machine has {num_gpus}"
            )
        if not dist.is_torchelastic_launched():
            return
        if (num_ranks := int(os.environ["WORLD_SIZE"])) != cls.world_size:
            raise unittest.SkipTest(f"needs {cls.world_size} ranks; torchrun started {num_ranks}")
        cls.rank = int(os.environ["RANK"])
        if not dist.is_initialized():
            cls._set_device(cls.rank)
            dist.init_process_group(cls.backend_str(), timeout=cls.timeout)
            atexit.register(dist.destroy_process_group)

    def setUp(self) -> None:
        if dist.is_torchelastic_launched():
            super(MultiProcContinuousTest, self).setUp()  # without starting ranks
        else:
            super().setUp()

    def tearDown(self) -> None:
        super().tearDown()
        if dist.is_torchelastic_launched():
            self._release()

    @classmethod
    def _init_pg(cls, rank: int, world_size: int, rdvz_file: str | None) -> None:
        cls._set_device(rank)
        super()._init_pg(rank, world_size, rdvz_file)

    @classmethod
    def _run_test_given_id(cls, test_id: str, **kwargs: object) -> None:
        super()._run_test_given_id(test_id, **kwargs)
        cls._release()

    @staticmethod
    def _set_device(rank: int) -> None:
        # Not left to the first mesh: it respects whatever device a tensor was put on before.
        torch.cuda.set_device(rank)
        # Tests compare bits. cuBLAS reproduces them across streams with a fixed workspace only,
        # and a switch that reduces (NVLS) adds in no fixed order.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

    @staticmethod
    def _release() -> None:
        """Destroy the test's process groups: every mesh made communicators, on the device."""
        scenarios.forget_meshes()
        gc.collect()
        torch.cuda.synchronize()
        # A dict: in order of creation, the same on every rank of a group.
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)


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
