"""The CPU backend: its device, its attention, and that it keeps to itself."""

import gc
import subprocess
import sys
import weakref

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torchtitan.models.common.attention import (
    FlexAttention,
    get_causal_mask_mod,
    get_efficient_causal_mask_mod_for_packed_document,
)

from titan_lifecycle import cpu_backend
from titan_lifecycle.cpu_backend.overrides import _dense_mask, dense_flex_attention


def run_python(code):
    """Run ``code`` in a fresh interpreter: what is tested happens at import."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_changes_nothing():
    run_python("""
import sys, torch
before = dict(vars(torch.cpu))
import titan_lifecycle, titan_lifecycle.cpu_backend, titan_lifecycle.cli, titan_lifecycle.run.worker
assert not any(name.split(".")[0] == "torchtitan" for name in sys.modules)
assert vars(torch.cpu) == before
import torchtitan.tools.utils as utils
assert utils.device_module is not torch.cpu and utils.device_type == "cuda"
""")


def test_activate_gives_torchtitan_a_device():
    run_python("""
import torch
before = dict(vars(torch.cpu))
from titan_lifecycle import cpu_backend
cpu_backend.activate()
cpu_backend.activate()
from torchtitan.components.metrics import build_device_memory_monitor
from torchtitan.distributed import utils
assert vars(torch.cpu) == before
assert utils.device_type == "cpu"

import resource
peak = lambda: build_device_memory_monitor().get_peak_stats().max_reserved_gib
kept = torch.ones(2**28, dtype=torch.uint8)  # 0.25 GiB
monitor = build_device_memory_monitor()
before = monitor.get_peak_stats().max_reserved_gib
assert abs(before - resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20) < 0.05
torch.ones(2**29, dtype=torch.uint8)  # 0.5 GiB, freed at once
assert 0.45 < monitor.get_peak_stats().max_reserved_gib - before < 0.6
monitor.reset_peak_stats()
assert abs(monitor.get_peak_stats().max_reserved_gib - before) < 0.1
assert 1 < monitor.device_capacity_gib < 100_000

import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.barrier(device_ids=[utils.device_module.current_device()])
""")


def test_activate_refuses_when_a_device_has_been_taken():
    run_python("""
import torchtitan.components.metrics
from titan_lifecycle import cpu_backend
try:
    cpu_backend.activate()
except RuntimeError as error:
    assert "torchtitan.components.metrics" in str(error), error
else:
    raise AssertionError("not refused")
""")


def test_a_torchtitan_without_what_is_replaced_is_refused_by_name():
    run_python("""
import torchtitan.tools.utils as utils
del utils.get_peak_flops
from titan_lifecycle import cpu_backend
try:
    cpu_backend.activate()
except ImportError as error:
    assert "it lacks torchtitan.tools.utils.get_peak_flops" in str(error), error
else:
    raise AssertionError("not refused")
""")


@pytest.mark.parametrize(
    ("device", "without", "with_accelerator"),
    [("auto", "cpu", "cuda"), ("cpu", "cpu", "cpu"), ("cuda", "cuda", "cuda")],
)
def test_resolve_device(device, without, with_accelerator, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cpu_backend.resolve_device(device) == without
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cpu_backend.resolve_device(device) == with_accelerator


BATCH, LENGTH, HEADS, HEAD_DIM = 2, 32, 4, 8


@pytest.fixture
def block_mask():
    # Two documents in each row, of other lengths in the second.
    positions = torch.tensor([[*range(10), *range(22)], [*range(25), *range(7)]])
    causal = get_causal_mask_mod()
    document = get_efficient_causal_mask_mod_for_packed_document(positions)

    def both(b, h, q, k):
        return causal(b, h, q, k) & document(b, h, q, k)

    return create_block_mask(both, BATCH, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)


@pytest.fixture
def attention():
    return dense_flex_attention(FlexAttention.Config()).build()


def inputs(num_kv_heads=HEADS, value_dim=HEAD_DIM):
    torch.manual_seed(0)
    shapes = ((HEADS, HEAD_DIM), (num_kv_heads, HEAD_DIM), (num_kv_heads, value_dim))
    return [torch.randn(BATCH, LENGTH, *shape, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("num_kv_heads", [HEADS, 2])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_dense_attention_is_flex_attention(attention, block_mask, num_kv_heads, scale):
    q, k, v = inputs(num_kv_heads)
    enable_gqa = num_kv_heads != HEADS
    out = attention(q, k, v, attention_masks=block_mask, scale=scale, enable_gqa=enable_gqa)
    expected = flex_attention(
        *(t.detach().transpose(1, 2) for t in (q, k, v)),
        block_mask=block_mask,
        scale=scale,
        enable_gqa=enable_gqa,
    ).transpose(1, 2)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("num_kv_heads", [HEADS, 2])
def test_out_transform_gets_the_log_sum_exp(attention, block_mask, num_kv_heads):
    q, k, v = inputs(num_kv_heads)
    enable_gqa = num_kv_heads != HEADS
    out, lse = attention(
        q,
        k,
        v,
        attention_masks=block_mask,
        enable_gqa=enable_gqa,
        out_transform=lambda out, lse: (out, lse),
    )
    expected, aux = flex_attention(
        *(t.detach().transpose(1, 2) for t in (q, k, v)),
        block_mask=block_mask,
        enable_gqa=enable_gqa,
        return_aux=AuxRequest(lse=True),
    )
    torch.testing.assert_close(out, expected.transpose(1, 2))
    torch.testing.assert_close(lse, aux.lse.transpose(1, 2))
    # Both paths have to be differentiable, and agree.
    (explicit,) = torch.autograd.grad(out.square().sum(), q)
    plain = attention(q, k, v, attention_masks=block_mask, enable_gqa=enable_gqa)
    torch.testing.assert_close(torch.autograd.grad(plain.square().sum(), q)[0], explicit)


def test_a_document_does_not_see_the_one_before(attention, block_mask):
    q, k, v = inputs()
    out = attention(q, k, v, attention_masks=block_mask)
    (grad,) = torch.autograd.grad(out[0, 10:].sum(), v)
    assert not grad[0, :10].any()
    assert grad[0, 10:].any()


def test_layers_share_a_dense_mask_as_long_as_the_block_mask_lives():
    block_mask = create_block_mask(get_causal_mask_mod(), 1, None, 16, 16, device="cpu")
    dense = weakref.ref(_dense_mask(block_mask))
    assert dense() is _dense_mask(block_mask)
    del block_mask
    gc.collect()
    assert dense() is None


def test_score_mod_is_refused(attention, block_mask):
    with pytest.raises(ValueError, match="has no score_mod"):
        attention(*inputs(), attention_masks=block_mask, score_mod=lambda s, *_: s)


@pytest.mark.parametrize("param_init", ["{'weight': torch.nn.init.normal_}", "None"])
def test_a_sharded_parameter_is_drawn_as_if_it_were_whole(param_init):
    """With an initializer, and without one, where torchtitan calls ``reset_parameters``."""
    run_python(f"""
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.models.common import Linear
from titan_lifecycle.cpu_backend.parameters import _draw_whole_parameters

dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
config = Linear.Config(in_features=3, out_features=4, param_init={param_init})
with torch.device("meta"):
    whole, sharded = config.build(), config.build()
fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
_draw_whole_parameters(sharded)
for module in (whole, sharded):
    module.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        module.init_states()
assert torch.equal(sharded.weight.to_local(), whole.weight[2:])
""")
