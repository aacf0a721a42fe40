"""pytorch/pytorch#203176: FSDP2 takes the end of every autograd pass for the end of a backward.

A chunked loss detaches the hidden states, runs lm_head -> loss -> backward on them (the inner
backward; here one chunk), then one backward through the decoder (the outer). On two CPU ranks:

1. The inner backward reduces what is pending in groups outside its scope.
2. Of a grouped [norm, lm_head] only lm_head runs again, and that forward is never completed: above
   a frozen decoder lm_head is not trained; an evaluation leaves it gathered and a stale marker.

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

FIXED = "--fixed" in sys.argv
if FIXED:
    from titan_lifecycle import fsdp_partial_backwards


class ReduceScatters(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.c10d._reduce_scatter_base_.default
        return func(*args, **(kwargs or {}))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder, self.norm, self.lm_head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return self.norm(self.decoder(x))  # lm_head runs in the loss


def run_head(lm_head, hidden, **scope):
    """The inner forward and backward; returns the gradient that the outer backward starts from."""
    hidden = hidden.detach().requires_grad_(hidden.requires_grad)
    with fsdp_partial_backwards(lm_head, **scope) if FIXED else contextlib.nullcontext() as hooks:
        if FIXED:
            hooks.before_last_forward()
        logits = lm_head(hidden)
        if FIXED:
            logits = hooks.after_forward(logits)
        if torch.is_grad_enabled():
            logits.square().sum().backward()
    return hidden.grad


def observe(rank, folder, check):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    x = torch.ones(4, 8)  # on both ranks, so that the mean gradient is a rank's own

    # 1. Three groups. Two microbatches, whose gradients are to be reduced once, after the second.
    model = Model()
    for module in (model.decoder, model.norm, model.lm_head, model):
        fully_shard(module, mesh=mesh)
    with ReduceScatters() as step:
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            hidden = model(x)
            with ReduceScatters() as inner:
                grad = run_head(model.lm_head, hidden)
            hidden.backward(grad)
    check(
        inner.count <= 1, f"reduce-scatters of the inner backward: {inner.count}, expected 0 or 1"
    )
    check(step.count == 3, f"reduce-scatters of the step: {step.count}, expected 3, one a group")

    # 2. Frozen decoder, grouped [norm, lm_head]. ``weight`` is what an optimizer holds.
    model = Model()
    loss = model.lm_head(model(x)).square().sum()
    (expected,) = torch.autograd.grad(loss, model.lm_head.weight)
    for module in (model.decoder, model.norm):
        module.requires_grad_(False)
    for modules in (model.decoder, [model.norm, model.lm_head], model):
        fully_shard(modules, mesh=mesh)
    weight = model.lm_head.weight
    run_head(model.lm_head, model(x), outer_backward_follows=False)
    grad = torch.zeros(8, 8) if weight.grad is None else weight.grad.full_tensor()
    ratio = (grad.norm() / expected.norm()).item()
    text = f"frozen decoder: lm_head's gradient is {ratio:.2f} x expected"
    check(torch.allclose(grad, expected), text)

    # An evaluation. ``iter_forward_root`` left behind makes the next forward skip its root setup.
    model.lm_head.reshard()
    with torch.no_grad():
        run_head(model.lm_head, model(x), run_backward=False)
    gathered = not isinstance(model.lm_head.weight, DTensor)
    stale = model._get_fsdp_state()._state_ctx.iter_forward_root is not None
    text = f"after evaluation: lm_head gathered {gathered}, stale marker {stale}, expected neither"
    check(not gathered and not stale, text)
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
