"""The FSDP2 lifecycle; the only package that touches private FSDP2 state.

Where what is:

- ``private``: FSDP2's classes and what is read of them, checked at import;
- ``policy``: a group's communication policy, captured and restored by value;
- ``scope``: :func:`fsdp_partial_backwards`, see [Note: Partial backwards and FSDP finalization];
- ``invocations``: callbacks and repeated units, see [Note: Completion and readiness];
- ``listening``: how FSDP2 is listened to, see [Note: Listening to FSDP2];
- ``residency``: bytes of gathered weights and unsharded gradients;
- ``probe``: resets, and pipeline stages that infer their metadata.

The upstream changes that would replace parts of it are pytorch/pytorch#203176 (scoped partial
backwards, completion of repeated grouped forwards), #203177 (policy snapshot and restore by
value) and #203178 (FSDP reset after pipeline metadata inference).
"""

from titan_lifecycle.fsdp_lifecycle.listening import disable_forward_prefetch_in_backward
from titan_lifecycle.fsdp_lifecycle.policy import GroupPolicy, preserved_policies
from titan_lifecycle.fsdp_lifecycle.private import (
    fsdp_process_groups,
    groups_with_pending_gradients,
    unsharded_gradient_bytes,
)
from titan_lifecycle.fsdp_lifecycle.probe import ProbeGuard, reset_root
from titan_lifecycle.fsdp_lifecycle.residency import ResidencyMonitor
from titan_lifecycle.fsdp_lifecycle.scope import (
    PartialBackwardHooks,
    Reduction,
    complete_fsdp_grouped_forward,
    fsdp_partial_backwards,
)

__all__ = [
    "GroupPolicy",
    "PartialBackwardHooks",
    "ProbeGuard",
    "Reduction",
    "ResidencyMonitor",
    "complete_fsdp_grouped_forward",
    "disable_forward_prefetch_in_backward",
    "fsdp_partial_backwards",
    "fsdp_process_groups",
    "groups_with_pending_gradients",
    "preserved_policies",
    "reset_root",
    "unsharded_gradient_bytes",
]
