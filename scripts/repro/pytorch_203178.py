"""pytorch/pytorch#203178: a pipeline's metadata inference leaves FSDP gradients in the first step.

A stage that was not told its shapes learns them from a probe: a real forward and backward before
the first microbatch, and again when it switches between training and evaluation. Then it clears
``param.grad``. But here the loss runs a backward of its own, through lm_head alone, and leaves the
reduction to the schedule: its gradients sit on the unsharded parameters. They enter the first
step. One stage on two CPU ranks.

Exits 1 while this is so, 0 once it is not. With --fixed it goes through titan_lifecycle.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

UPSTREAM = "register_metadata_inference_cleanup"  # if upstream leaves it to be registered


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.decoder, self.lm_head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.decoder(x)  # lm_head runs in the loss

    def loss(self, hidden, target):
        """As a chunked loss of one chunk does: lm_head -> loss -> backward, up to ``hidden``."""
        leaf = hidden.detach().requires_grad_()
        loss = (self.lm_head(leaf) - target).square().sum()
        if not torch.is_grad_enabled():
            return loss
        loss.backward()
        return (hidden * leaf.grad).sum()  # its gradient is leaf.grad


def observe(rank, folder, check):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    # The same on both ranks, so that the mean gradient is a rank's own; two microbatches.
    x, target = torch.ones(4, 8), torch.zeros(4, 8)
    model = Model()
    model.loss(model(x), target).backward()
    expected = model.lm_head.weight.grad
    model.zero_grad()

    fully_shard(model.lm_head, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    weight = model.lm_head.weight

    def loss_fn(hidden, target):
        model.lm_head.set_requires_gradient_sync(False)  # the schedule reduces
        return model.loss(hidden, target)

    stage = PipelineStage(model, 0, 1, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=loss_fn, scale_grads=False)
    if "--fixed" in sys.argv:
        from titan_lifecycle import register_metadata_inference_cleanup

        register_metadata_inference_cleanup(schedule)
    elif hasattr(stage, UPSTREAM):
        getattr(stage, UPSTREAM)(model.reset_iter_state)

    for name in ("first step", "second step", "step after an evaluation"):
        if "evaluation" in name:
            with torch.no_grad():
                schedule.eval(x, target=target)
        schedule.step(x, target=target)
        ratio = (weight.grad.full_tensor().norm() / expected.norm()).item()
        check(abs(ratio - 1) < 1e-4, f"{name}: lm_head's gradient is {ratio:.2f} x expected")
        model.zero_grad()
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
