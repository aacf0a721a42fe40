"""torchtitan components replaced on CPU ranks, through torchtitan's own ``@override``.

Only `titan_lifecycle.cpu_backend.adapt` names these, in ``override.imports``. torchtitan is not
typed as far as mypy can see, hence the ignores.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torchtitan.config.override import derive, override
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

# The layers of a model share one BlockMask per microbatch, so they share its dense form too.
_dense_masks: weakref.WeakKeyDictionary[BlockMask, torch.Tensor] = weakref.WeakKeyDictionary()


def _dense_mask(block_mask: BlockMask) -> torch.Tensor:
    """``block_mask`` as a bool tensor of shape (B, 1, L, L_kv), true where attention is allowed."""
    mask = _dense_masks.get(block_mask)
    if mask is None:
        batch, heads, q_len, kv_len = block_mask.shape
        mask = create_mask(
            block_mask.mask_mod, batch, heads, q_len, kv_len, block_mask.kv_indices.device
        )
        _dense_masks[block_mask] = mask
    return mask


def _attention_with_lse(
    q_BNLH: torch.Tensor,
    k_BNLH: torch.Tensor,
    v_BNLH: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and the log-sum-exp of its scores, which SDPA does not return."""
    # Query heads of one key/value head are neighbours.
    groups = q_BNLH.shape[1] // k_BNLH.shape[1]
    k_BNLH = k_BNLH.repeat_interleave(groups, dim=1)
    v_BNLH = v_BNLH.repeat_interleave(groups, dim=1)
    scores = q_BNLH @ k_BNLH.transpose(-2, -1) * (scale or q_BNLH.shape[-1] ** -0.5)
    scores = scores.float().masked_fill(~mask, float("-inf"))
    lse_BNL = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse_BNL.unsqueeze(-1)).to(v_BNLH.dtype)
    return weights @ v_BNLH, lse_BNL


class DenseFlexAttention(FlexAttention):
    """`FlexAttention` with its mask made dense: flex_attention has no backward on the CPU.

    The mask is computed from the same ``mask_mod``, so packed documents stay separate. Context
    parallelism and the sharding configs find the inputs by the names of the parameters.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: BlockMask,
        score_mod: Callable[..., torch.Tensor] | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if score_mod is not None:
            raise ValueError(
                "the CPU backend's attention has no score_mod; run this model on a GPU"
            )
        mask = _dense_mask(attention_masks)
        q_BNLH, k_BNLH, v_BNLH = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
        if out_transform is not None:
            out_BNLH, lse_BNL = _attention_with_lse(q_BNLH, k_BNLH, v_BNLH, mask, scale)
            return out_transform(out_BNLH.transpose(1, 2), lse_BNL.transpose(1, 2))
        out_BNLH = F.scaled_dot_product_attention(
            q_BNLH, k_BNLH, v_BNLH, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
        return out_BNLH.transpose(1, 2)


@override(target=FlexAttention.Config, exact=True, description="dense attention on the CPU")  # type: ignore[misc]
def dense_flex_attention(config: FlexAttention.Config) -> DenseFlexAttention.Config:
    replacement: DenseFlexAttention.Config = derive(config, DenseFlexAttention.Config)
    return replacement


class GlooTokenDispatcher(AllToAllTokenDispatcher):
    """Expert parallelism's token exchange through the one all-to-all that Gloo does unevenly.

    With the spmd_types backend torchtitan exchanges lists of tensors, and ProcessGroupGloo
    demands equal sizes in a list (``alltoall: invalid tensor size``). It does take split sizes of
    a single tensor.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        pass

    def _dispatch_token_exchange(
        self,
        routed_input_ND: torch.Tensor,
        pg: ProcessGroup,
        output_splits: list[int],
        input_splits: list[int],
    ) -> torch.Tensor:
        return all_to_all_single_autograd(routed_input_ND, output_splits, input_splits, pg)

    def _combine_token_exchange(
        self,
        routed_output_RD: torch.Tensor,
        pg: ProcessGroup,
        input_splits: list[int],
        output_splits: list[int],
    ) -> torch.Tensor:
        return all_to_all_single_autograd(routed_output_RD, input_splits, output_splits, pg)


@override(target=AllToAllTokenDispatcher.Config, exact=True, description="uneven Gloo all-to-all")  # type: ignore[misc]
def gloo_token_dispatcher(config: AllToAllTokenDispatcher.Config) -> GlooTokenDispatcher.Config:
    replacement: GlooTokenDispatcher.Config = derive(config, GlooTokenDispatcher.Config)
    return replacement


class SameDtypeGptOssExperts(GptOssGroupedExperts):
    """gpt_oss's experts, returning the dtype they are given.

    They compute in bfloat16 and return it, which the token dispatcher can only scatter into
    activations of the same dtype; on the CPU those are float32.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        out_RD: torch.Tensor = super().forward(x_RD, num_tokens_per_expert_E)
        return out_RD.type_as(x_RD)


@override(target=GptOssGroupedExperts.Config, exact=True, description="experts keep the dtype")  # type: ignore[misc]
def same_dtype_gpt_oss_experts(
    config: GptOssGroupedExperts.Config,
) -> SameDtypeGptOssExperts.Config:
    replacement: SameDtypeGptOssExperts.Config = derive(config, SameDtypeGptOssExperts.Config)
    return replacement
