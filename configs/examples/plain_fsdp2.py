"""A chunked loss on plain FSDP2: torchrun --nproc-per-node 2 plain_fsdp2.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from titan_lifecycle import fsdp_partial_backwards


class Model(nn.Sequential):
    def forward(self, tokens):  # to the hidden states; the head, self[2], is the loss's
        return self[1](self[0](tokens))


dist.init_process_group("gloo")
torch.manual_seed(0)
model = Model(nn.Embedding(512, 64), nn.Linear(64, 64), nn.Linear(64, 512))
for module in (*model, model):
    fully_shard(module)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
tokens = torch.randint(512, (4, 65), generator=torch.Generator().manual_seed(dist.get_rank()))
for step in range(5):
    hidden = model(tokens[:, :-1])
    chunks = [chunk.detach().requires_grad_() for chunk in hidden.chunk(4, dim=1)]
    total, targets = 0.0, tokens[:, 1:].chunk(4, dim=1)
    with fsdp_partial_backwards(model[2]) as hooks:
        for chunk, labels in zip(chunks, targets, strict=True):
            if chunk is chunks[-1]:
                hooks.before_last_forward()
            logits = hooks.after_forward(model[2](chunk)).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / 256
            loss.backward()  # an inner backward, through the head alone
            total += loss.item()
    hidden.backward(torch.cat([chunk.grad for chunk in chunks], dim=1))  # the outer backward
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step + 1}: loss {total:.4f}")
dist.destroy_process_group()
