"""pytorch/pytorch#203177: an FSDP policy that a library changes for a while cannot be put back.

The user chose a policy. A library (a chunked loss, an evaluation) needs another one for a while
and then wants back what was there. No getter tells it, so it sets True. On two CPU ranks:

1. ``set_requires_gradient_sync(True)`` overwrites HSDP's separate all-reduce flag.
2. ``set_reshard_after_forward(True)`` ends the root's automatic policy, to keep its weights.
3. An integer ``reshard_after_forward``, which ``fully_shard`` takes, is refused by the setter.

Exits 1 while any of this is so, 0 once none is. With --fixed it goes through titan_lifecycle.
"""

import contextlib
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class Collectives(TorchDispatchMode):
    all_gathers = all_reduces = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.all_gathers += func is torch.ops.c10d._allgather_base_.default
        self.all_reduces += func is torch.ops.c10d.allreduce_.default
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def library(model, reshard_after_forward=True):
    """Without communication, weights kept; then back, to ``reshard_after_forward`` at best."""
    if "--fixed" in sys.argv:
        from titan_lifecycle.fsdp_lifecycle import preserved_policies
    else:
        preserved_policies = contextlib.nullcontext
    with preserved_policies([model]):
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_forward(False)
        yield
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_forward(reshard_after_forward)


def step(model):
    with Collectives() as collectives:
        model(torch.ones(4, 8)).sum().backward()
    return collectives


def observe(rank, folder, check):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    fsdp = init_device_mesh("cpu", (2,))
    hsdp = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))

    # 1. The user defers the all-reduce, to a later microbatch.
    model = fully_shard(nn.Linear(8, 8), mesh=hsdp)
    model.set_requires_all_reduce(False)
    step(model)
    with library(model):
        pass
    count = step(model).all_reduces
    check(count == 0, f"all-reduces after set_requires_all_reduce(False): {count}, expected 0")

    # 2. The user left the root's policy to FSDP: its weights stay gathered until its backward.
    model = fully_shard(nn.Linear(8, 8), mesh=fsdp)
    before = step(model).all_gathers
    with library(model):
        pass
    after = step(model).all_gathers
    check(after == before, f"all-gathers of a step: {after}, expected {before} as before")

    # 3. The user gave the number of ranks to reshard to after forward.
    model = fully_shard(nn.Linear(8, 8), mesh=fsdp, reshard_after_forward=2)
    step(model)
    refusal = None
    try:
        with library(model, reshard_after_forward=2):
            pass
    except ValueError as error:
        refusal = error
    model(torch.ones(4, 8))
    resharded = isinstance(model.weight, DTensor)
    text = f"reshard_after_forward=2 reshards: {resharded}, expected True; setter: {refusal}"
    check(resharded, text)
    dist.destroy_process_group()


# The same in each of these programs: one is read, sent and run alone.
if __name__ == "__main__":
    found = []

    def check(ok, text):
        found.append(ok)
        print("ok " if ok else "GAP", text, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        # Forked, as importing torch again takes longer than all the rest.
        args = (1, folder, lambda ok, text: None)
        other = mp.get_context("fork").Process(target=observe, args=args, daemon=True)
        other.start()
        observe(0, folder, check)
        other.join()
    print("the gap is closed" if all(found) else "the gap is open")
    sys.exit(not all(found))
