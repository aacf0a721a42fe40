"""A pipeline of two FSDP2 stages by hand: torchrun --nproc-per-node 2 pipeline.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from titan_lifecycle import register_metadata_inference_cleanup, reset_iteration

dist.init_process_group("gloo")
torch.manual_seed(0)
# With more ranks each stage is sharded over several.
mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
rank = mesh["pp"].get_local_rank()
parts = [nn.Sequential(nn.Embedding(512, 64), nn.Linear(64, 64)), nn.Linear(64, 512)]
part = fully_shard(parts[rank], mesh=mesh["dp"])
optimizer = torch.optim.AdamW(part.parameters(), lr=0.01)


def loss_fn(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


# The stage is not told its shapes: it learns them from a probe, a forward and backward that would
# leave FSDP's gradients behind.
stage = PipelineStage(part, rank, 2, torch.device("cpu"), group=mesh.get_group("pp"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_fn)
register_metadata_inference_cleanup(schedule)
data = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
tokens = torch.randint(512, (8, 65), generator=data)
for step in range(5):
    losses = []
    try:
        if rank == 0:
            schedule.step(tokens[:, :-1])
        else:
            schedule.step(target=tokens[:, 1:], losses=losses)
    except Exception:
        reset_iteration(schedule)  # the step can be tried again
        raise
    optimizer.step()
    optimizer.zero_grad()
    if losses and mesh["dp"].get_local_rank() == 0:
        print(f"step {step + 1}: loss {torch.stack(losses).mean():.4f}")
dist.destroy_process_group()
