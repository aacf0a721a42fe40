"""Each invocation of an FSDP unit: completion, readiness, repetition, recomputation.

[Note: Completion and readiness]
A unit may be invoked several times in one forward (a block shared by several prediction depths, an
embedding looked up once per depth) and again during the backward (activation checkpointing). FSDP2
keeps one training state per group and does not tell these apart. Here every invocation of a forward
has a record, and three moments are kept apart:

- An invocation's backward *begins* when the gradient of one of its outputs arrives, or when it is
  recomputed.
- It is *complete* when no node of this backward will read its full weights again. With inputs that
  require grad that is FSDP's own post-backward node on them: of the nodes that are due on a device,
  autograd runs the one created last, so whatever the invocation created has run by then. Where no
  input requires grad there is no such node, and a module's backward hook would fire too early
  (``P.square() * x`` reads the saved ``P`` after the gradient of the output has passed); such an
  invocation is complete at the end of the backward.
- A group is *ready* when its trainable parameters have every contribution: each accumulated by this
  backward, and no invocation left that is to be recomputed in a graph of its own (reentrant
  checkpointing). Parameters that take no part are settled by the end of the backward.

A schedule that splits backwards runs the second half, the weight gradients, long after the first.
Autograd's final callback has come and gone by then; the records of the first half stay open until
``pipeline.observe_split_backwards`` closes them, or the schedule finalizes the step.

[Note: Recomputed invocations]
A recomputed forward has to be matched with the invocation it repeats. Autograd gives every node a
sequence number when it is created. The node that asks for the recomputation was created after the
first forward of its checkpointed segment began (non-reentrant), or just before it (reentrant: the
checkpoint is itself that node). So the pending invocation with the largest sequence number up to
that node's lies in the segment, and the n-th recomputed call of a unit is its n-th in there. Where
checkpoints are nested that may fail; what is left then is the last invocation not complete.

[Note: Listening, repair, retention]
Three things are separate, and each is done only where it was asked for:

- *Listening*: callbacks. FSDP2's policies, its order of prefetches and its collectives stay.
- *Repair* (``set_repeated_units``, with either policy): FSDP2 mistakes a unit's next recomputation
  for one of the invocation whose backward has just completed, and then never reduces it; it reduces
  at each completion after a microbatch without reduction; and it prefetches what no invocation
  needs. Here the last invocation to complete reduces, prefetch follows invocations, and a forward
  that is recomputed prefetches nothing.
- *Retention* (``"retain"``): weights stay gathered between invocations.

Repair and retention set FSDP2's policy by value before one of its hooks, and set it back after it.
How the hooks are surrounded: [Note: Listening to FSDP2] in ``listening``.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any, Literal, cast, get_args

import torch
import torch.nn as nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from titan_lifecycle import private_names
from titan_lifecycle.fsdp_lifecycle.listening import (
    Listener,
    Tree,
    Unit,
    post_backward_node,
    tree_of,
    unit_of,
)
from titan_lifecycle.fsdp_lifecycle.policy import GroupPolicy
from titan_lifecycle.fsdp_lifecycle.private import (
    FSDPParamGroup,
    FSDPState,
    TrainingState,
    fsdp_modules,
    group_fqn,
    is_bw,
    is_manually_finalized,
    trainable_parameters,
)

__all__ = [
    "RepeatedUnits",
    "register_lifecycle_callbacks",
    "set_repeated_units",
]

RepeatedUnits = Literal["release", "retain"]
"""What happens to a unit's gathered weights between its invocations in one forward or backward."""

private_names.check("autograd")

logger = logging.getLogger("titan_lifecycle")


PreBackward = Callable[[str, int], None]
"""Called with a group's FQN and the index of the invocation in its forward, from 0."""

PostBackward = Callable[[str, int], None]
"""As ``PreBackward``."""

GradsReady = Callable[[str], None]
"""Called with a group's FQN."""


@dataclass(frozen=True, slots=True)
class _Callbacks:
    pre_backward: PreBackward | None
    post_backward: PostBackward | None
    grads_ready: GradsReady | None


@dataclass(eq=False, slots=True)
class _Invocation:
    """One invocation of a group in a forward of its root, until a backward has completed it."""

    record: _GroupRecord
    index: int
    forward: int
    sequence_nr: int
    # Equal for the invocations of one checkpointed segment; None outside of checkpointing.
    segment: tuple[str, int] | None
    # False while its graph does not exist yet: reentrant checkpointing builds it in the backward.
    has_graph: bool
    post_forward_index: int | None = None
    begun: bool = False
    complete: bool = False


@dataclass(eq=False)
class _GroupRecord:
    """What is kept about one FSDP group."""

    group: FSDPParamGroup
    unit: Unit
    callbacks: OrderedDict[int, _Callbacks] = field(default_factory=OrderedDict)
    repeated_units: RepeatedUnits | None = None
    # In this forward, and in the one before; evaluations are not learned from.
    num_invocations: int = 0
    last_num_invocations: int = 0
    # The invocations whose forward, and end of backward are under way.
    in_forward: _Invocation | None = None
    leaving: _Invocation | None = None
    completing: _Invocation | None = None
    # Weights that the policy would have released, and gradients that it would have reduced.
    holds_weights: bool = False
    holds_gradients: bool = False
    # The group's policy while another one is set for one of FSDP's hooks.
    policy: GroupPolicy | None = None
    pending: list[_Invocation] = field(default_factory=list)
    accumulated: set[int] = field(default_factory=set)
    is_ready: bool = False
    # While a scope is open, and the invocation as which it counts.
    is_in_scope: bool = False
    scoped: _Invocation | None = None
    gradient_hooks: dict[int, Any] = field(default_factory=dict)

    @property
    def fqn(self) -> str:
        return group_fqn(self.group)

    @property
    def tracker(self) -> _Tracker:
        assert self.unit.tree is not None
        return self.unit.tree.shared(_Tracker)

    @property
    def is_in_use(self) -> bool:
        return bool(self.callbacks) or self.repeats

    @property
    def repeats(self) -> bool:
        """Whether repetition and recomputation of the unit are repaired."""
        return self.repeated_units is not None

    def call(self, moment: Literal["pre_backward", "post_backward"], index: int) -> None:
        for callbacks in [*self.callbacks.values()]:
            if (callback := getattr(callbacks, moment)) is not None:
                callback(self.fqn, index)

    def watch_gradients(self) -> None:
        if any(callbacks.grads_ready for callbacks in self.callbacks.values()):
            for parameter in trainable_parameters(self.group):
                if id(parameter) not in self.gradient_hooks:
                    # Weakly: the hook is the parameter's, which is the group's, and autograd's part
                    # of that cycle is not collected.
                    hook = partial(_accumulated, weakref.ref(self))
                    self.gradient_hooks[id(parameter)] = (
                        parameter.register_post_accumulate_grad_hook(hook)
                    )

    # Around FSDP's hooks #

    def set_policy(self, **changes: Any) -> None:
        """Set these policies, beside those set already, until :meth:`restore`."""
        current = GroupPolicy.capture(self.group)
        self.policy = self.policy or current
        replace(current, **changes).restore(self.group)

    def restore(self) -> None:
        if self.policy is not None:
            self.policy.restore(self.group)
            self.policy = None

    def leave_forward(self, outputs: Sequence[torch.Tensor]) -> None:
        self.leaving, self.in_forward = self.in_forward, None
        if self.repeats and not is_bw():
            self.holds_weights = self._keeps_weights_in_forward()
            if self.holds_weights:
                self.set_policy(post_forward_mesh_info=None)
        if self.leaving is not None:
            for tensor in outputs:
                tensor.register_hook(partial(_begin, self.leaving))

    def left_forward(self, outputs: Sequence[torch.Tensor]) -> None:
        self.restore()
        invocation, self.leaving = self.leaving, None
        takes_part = invocation is not None and bool(
            outputs or not invocation.has_graph or invocation.begun
        )
        if invocation is not None:
            # FSDP puts a recomputed forward into no order.
            if self.group._post_forward_indices and not is_bw():
                invocation.post_forward_index = self.group._post_forward_indices[-1]
            for tensor in outputs if self.repeats else ():
                tensor.register_hook(partial(_begun, invocation))
            if not takes_part:
                self.tracker.drop(invocation)
        if self.repeats and not takes_part and not is_bw():
            self._leave_prefetch_order()

    def _leave_prefetch_order(self) -> None:
        """Take the forward that has just ended back out of the order of prefetches.

        No backward of it comes: it would only make another one prefetch what is not needed.
        """
        group, order = self.group, self.group.comm_ctx.post_forward_order
        if order and order[-1] is group and group._post_forward_indices[-1:] == [len(order) - 1]:
            order.pop()
            group._post_forward_indices.pop()

    def release_after_forward(self) -> None:
        """Release held weights as the end of a forward does, by the group's policy."""
        if self.holds_weights:
            self.holds_weights = False
            before, self.group._training_state = self.group._training_state, TrainingState.FORWARD
            self.group.reshard()
            self.group._training_state = before

    def begin_post_backward(self, invocation: _Invocation) -> None:
        """FSDP's post-backward of ``invocation`` comes next."""
        self.completing = invocation
        tracker = self.tracker
        others = tracker.others_pending(invocation)
        if not tracker.is_split:
            tracker.complete(invocation)
        if not self.repeats:
            return
        # One reduction, after the last of them. There is something to reduce where invocations are
        # recomputed, each in a graph of its own, and after a microbatch without reduction.
        self.holds_gradients = bool(others) and self.group.reduce_grads
        if self.holds_gradients:
            self.set_policy(reduce_grads=False)
        if self.group.reshard_after_backward:
            self.holds_weights = bool(others) and self.repeated_units == "retain"
            if self.holds_weights:
                self.set_policy(reshard_after_backward=False)

    def end_post_backward(self) -> None:
        self.restore()
        state = self.unit.state
        if self.repeats and all(
            group._training_state == self.group._training_state for group in self.unit.groups
        ):
            # Or FSDP mistakes the unit's next recomputation for one of this invocation, puts no
            # post-backward node into its graph, and never reduces what it accumulates.
            state._training_state = TrainingState.IDLE
        self.completing = None
        self.tracker.check_ready(self)

    def _keeps_weights_in_forward(self) -> bool:
        if self.repeated_units != "retain":
            return False
        # By the count of the forward before; beyond that count, until the forward's end.
        count, expected = self.num_invocations, self.last_num_invocations
        return count < expected or (count > expected and count > 1)

    def before_end(self) -> None:
        if self.holds_gradients:
            # The end of the backward then runs the group's post-backward again, which reduces, or
            # leaves that to manual finalization.
            self.holds_gradients = False
            self.group._training_state = TrainingState.IDLE

    def after_end(self) -> None:
        """Release weights that were kept, or prefetched and not used."""
        if not self.repeats:
            return
        was_unsharded = self.group.is_unsharded
        self.group.wait_for_unshard()
        was_prefetched = self.group.is_unsharded and not was_unsharded
        if was_prefetched or self.holds_weights:
            self.holds_weights = False
            self.group.reshard()

    # Around a scope #

    def enter_scope(self) -> None:
        self.is_in_scope = True
        self.in_forward = self.tracker.invoke(self)
        self.watch_gradients()

    def begin_scope_backward(self) -> None:
        if self.scoped is None:
            self.scoped, self.in_forward = self.in_forward, None
        if self.scoped is not None and not self.scoped.begun:
            self.scoped.begun = True
            self.call("pre_backward", self.scoped.index)

    def leave_scope(self) -> None:
        invocation = self.scoped or self.in_forward
        self.scoped = self.in_forward = None
        self.is_in_scope = False
        # The outer backward may contribute to the same parameters, as to a tied embedding.
        self.accumulated.clear()
        if invocation is not None:
            if invocation.begun:
                self.tracker.complete(invocation)
            self.tracker.drop(invocation)

    def reset(self) -> None:
        self.restore()
        self.in_forward = self.leaving = self.completing = None
        self.holds_weights = self.holds_gradients = self.is_ready = False
        self.is_in_scope, self.scoped = False, None
        # Every rank resets, and each may have failed elsewhere: none may expect anything.
        self.num_invocations = self.last_num_invocations = 0
        self.accumulated.clear()


class _UnitRecords(Listener):
    """The records of one unit's groups, as the unit tells them what it does."""

    def __init__(self, unit: Unit) -> None:
        self._state = unit.state
        self.records = [_GroupRecord(group, unit) for group in unit.groups]
        # The user's list while it is out of use.
        self._backward_prefetch: list[FSDPState] | None = None

    @property
    def is_in_use(self) -> bool:  # type: ignore[override]  # derived
        return any(record.is_in_use for record in self.records)

    @property
    def mutes_forward_prefetch(self) -> bool:  # type: ignore[override]  # derived
        return any(record.repeats for record in self.records)

    def join(self, tree: Tree) -> None:
        tree.shared(_Tracker)

    def close(self) -> None:
        for record in self.records:
            for hook in record.gradient_hooks.values():
                hook.remove()

    def before_forward(self, unit: Unit) -> None:
        for record in self.records:
            record.restore()
            record.in_forward = record.tracker.invoke(record)

    def recomputed(self, unit: Unit) -> None:
        for record in self.records:
            record.tracker.invoke(record)

    def gathered(self, unit: Unit, inputs: Sequence[torch.Tensor]) -> None:
        for record in self.records:
            record.watch_gradients()
            node = post_backward_node(record.group, inputs)
            if node is not None and record.in_forward is not None:
                node.register_prehook(partial(_completes, record.in_forward))
                node.register_hook(partial(_has_completed, record.in_forward))

    def leaving_forward(self, unit: Unit, outputs: Sequence[torch.Tensor]) -> None:
        for record in self.records:
            record.leave_forward(outputs)

    def left_forward(self, unit: Unit, outputs: Sequence[torch.Tensor]) -> None:
        # In reverse, so that each may leave the prefetch order as the last in it.
        for record in reversed(self.records):
            record.left_forward(outputs)

    def enter_scope(self, unit: Unit) -> None:
        for record in self.records:
            record.enter_scope()

    def begin_scope_backward(self, unit: Unit) -> None:
        for record in self.records:
            record.begin_scope_backward()

    def leave_scope(self, unit: Unit) -> None:
        for record in self.records:
            record.leave_scope()

    def order_prefetch(self, record: _GroupRecord, invocation: _Invocation) -> None:
        """FSDP's pre-backward of ``invocation`` comes next, and prefetches for it."""
        state, indices = self._state, record.group._post_forward_indices
        if self._backward_prefetch is None and state._states_to_backward_prefetch:
            # A list of modules cannot say which invocation of them comes next.
            self._backward_prefetch = state._states_to_backward_prefetch
            state._states_to_backward_prefetch = []
        if invocation.post_forward_index in indices:
            # FSDP takes the last one for this invocation's place in the forward's order.
            indices.remove(invocation.post_forward_index)
            indices.append(invocation.post_forward_index)

    def restore_prefetch(self) -> None:
        if self._backward_prefetch is not None:
            self._state._states_to_backward_prefetch = self._backward_prefetch
            self._backward_prefetch = None

    def reset(self) -> None:
        self.restore_prefetch()
        for record in self.records:
            record.reset()


# A forward with gradients enabled whose backward never comes leaves its records; the oldest go.
_MAX_PENDING_FORWARDS = 1024


class _Tracker(Listener):
    """The records of one FSDP tree; see [Note: Completion and readiness]."""

    def __init__(self, tree: Tree) -> None:
        # Of all units: which invocation is recomputed may show only by another unit's.
        self.units = [_records_of(unit) or _UnitRecords(unit) for unit in tree.units]
        for unit, records in zip(tree.units, self.units, strict=True):
            if records not in unit.listeners:
                unit.listeners.append(records)
        self.records = [record for unit in self.units for record in unit.records]
        self.forward = 0
        # By forward, the invocations whose backward has not ended, in their order.
        self.pending: dict[int, list[_Invocation]] = {}
        self.is_evaluation = False
        # Of non-reentrant checkpoints, by the hook each puts in place for its forward.
        self._segments: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._num_segments = 0
        # Microbatches whose weight gradients are still to be computed.
        self.open_microbatches: dict[int, list[_Invocation]] = {}
        # The forwards whose backward is under way, and those of which one has ended.
        self.in_backward: set[int] = set()
        self.after_backward: set[int] = set()
        # Whether the weight gradients of this backward are computed later; None: not known yet.
        self.is_split: bool | None = None
        self._recomputation: tuple[int, int] | None = None
        self._num_recomputed: dict[int, int] = {}
        self._has_forgotten = False

    @property
    def is_in_use(self) -> bool:  # type: ignore[override]  # derived
        # A forward may still wait for its backward.
        return bool(self.pending.keys() - self.after_backward)

    # The forward #

    def begin_forward(self) -> None:
        self.forward += 1
        self.is_evaluation = not torch.is_grad_enabled() and not _in_reentrant_checkpoint()
        if not self.is_evaluation:
            # What has not begun by now, as a prediction that is in no loss, hardly will.
            self._take(self.after_backward)
            self.after_backward.clear()
        if len(self.pending) > _MAX_PENDING_FORWARDS:
            self._forget_oldest_forward()
        for record in self.records:
            record.num_invocations = 0

    def end_forward(self) -> None:
        for record in self.records:
            if record.num_invocations and not self.is_evaluation:
                record.last_num_invocations = record.num_invocations
            record.release_after_forward()

    def _forget_oldest_forward(self) -> None:
        oldest = next(iter(self.pending))
        if not self._has_forgotten:
            self._has_forgotten = True
            logger.warning(
                "%d forwards of an FSDP root with gradients enabled wait for a backward; the "
                "lifecycle callbacks of the oldest ones will not be called. Run forwards that have "
                "no backward under torch.no_grad()",
                len(self.pending),
            )
        self._take([oldest])

    def invoke(self, record: _GroupRecord) -> _Invocation | None:
        """A unit's forward starts; returns its invocation, or None where no backward follows."""
        if is_bw():
            invocation = self._recomputed(record)
            if invocation is not None:
                self.begin(invocation)
            return invocation
        record.num_invocations += 1
        sequence_nr = torch._C._autograd._get_sequence_nr()
        segment: tuple[str, int] | None = None
        if not torch.is_grad_enabled():
            if self.is_evaluation or not _in_reentrant_checkpoint():
                return None  # no backward follows
            segment = ("reentrant", sequence_nr)
        elif hooks := torch._C._autograd._top_saved_tensors_default_hooks(True):
            self._num_segments += 1
            segment = ("non-reentrant", self._segments.setdefault(hooks[0], self._num_segments))
        return self._add(
            _Invocation(
                record,
                record.num_invocations - 1,
                self.forward,
                sequence_nr,
                segment,
                has_graph=torch.is_grad_enabled(),
            )
        )

    def _add(self, invocation: _Invocation) -> _Invocation:
        self.pending.setdefault(invocation.forward, []).append(invocation)
        invocation.record.pending.append(invocation)
        return invocation

    def _recomputed(self, record: _GroupRecord) -> _Invocation | None:
        """See [Note: Recomputed invocations]."""
        node = torch._C._current_autograd_node()
        if node is None:
            return None  # in a callback at the end of the backward
        node_sequence_nr: int = node._sequence_nr()
        recomputation = (torch._C._current_graph_task_id(), node_sequence_nr)
        if recomputation != self._recomputation:
            self._recomputation = recomputation
            self._num_recomputed.clear()
        n = self._num_recomputed.get(id(record), 0)
        self._num_recomputed[id(record)] = n + 1

        # A reentrant checkpoint's node is made just before the forward of its segment.
        before = [
            i
            for forward in self.pending.values()
            for i in forward
            if i.segment is not None and i.sequence_nr <= node_sequence_nr + (not i.has_graph)
        ]
        if before:
            anchor = max(before, key=lambda i: (not i.complete, i.forward, i.sequence_nr))
            calls = [
                i
                for i in record.pending
                if i.forward == anchor.forward and i.segment == anchor.segment
            ]
            if n < len(calls):
                return calls[n]
        whole = ("whole", node_sequence_nr)
        known = [i for i in record.pending if i.segment != whole]
        # A checkpoint within a checkpoint: its nodes are of the backward, and it may come twice.
        if rest := [i for i in known if not i.has_graph and not i.complete]:
            return max(rest, key=lambda i: (not self.has_ended(i), i.forward, i.index))
        if known:
            return None  # non-reentrant: its own graph says when it begins
        # A reentrant checkpoint that is not torch's: its first forward looked like an evaluation.
        return self._add(
            _Invocation(record, n, self.forward, node_sequence_nr, whole, has_graph=False)
        )

    def has_ended(self, invocation: _Invocation) -> bool:
        """Whether a backward of its forward has ended, and none is under way."""
        forward = invocation.forward
        return forward in self.after_backward and forward not in self.in_backward

    # The backward #

    def begin(self, invocation: _Invocation) -> None:
        self.in_backward.add(invocation.forward)
        if invocation.begun:
            return
        invocation.begun = True
        if invocation not in invocation.record.pending:
            self._add(invocation)  # a late backward, after another forward
        if self.is_split is None:
            self.is_split = _leaves_weight_gradients(invocation)
        invocation.record.call("pre_backward", invocation.index)

    def complete(self, invocation: _Invocation) -> None:
        if not invocation.complete:
            invocation.complete = True
            invocation.record.call("post_backward", invocation.index)

    def others_pending(self, invocation: _Invocation) -> list[_Invocation]:
        """Other invocations of its group in the same forward that are not complete."""
        return [
            i
            for i in invocation.record.pending
            if i.forward == invocation.forward and i is not invocation and not i.complete
        ]

    def check_ready(self, record: _GroupRecord) -> None:
        """Call ``grads_ready`` if no contribution of this backward is missing."""
        if record.is_ready or self.is_split or record.is_in_scope:
            return
        if not record.accumulated.issuperset(map(id, trainable_parameters(record.group))):
            return
        if any(
            not i.has_graph and not i.complete and not self.has_ended(i) for i in record.pending
        ):
            return
        self._call_ready(record)

    def _call_ready(self, record: _GroupRecord) -> None:
        record.is_ready = True
        for callbacks in [*record.callbacks.values()]:
            if callbacks.grads_ready is not None:
                callbacks.grads_ready(record.fqn)

    def before_end(self) -> None:
        for record in self.records:
            record.before_end()

    def after_end(self) -> None:
        """The backward has ended, except for weight gradients that are computed later."""
        for record in self.records:
            record.after_end()
        if not self.is_split:
            begun = self.in_backward & self.pending.keys()
            self.complete_all([i for forward in sorted(begun) for i in self.pending[forward]])

    def complete_all(self, invocations: list[_Invocation]) -> None:
        """The backward of ``invocations`` has ended, weight gradients included."""
        self.is_split = None
        # In reverse, as a backward goes.
        for invocation in reversed(invocations):
            if invocation.begun:
                self.complete(invocation)
            # Another backward may come, of another loss or of the same retained graph.
            invocation.begun = invocation.complete = False
        self.after_backward |= self.in_backward
        self.in_backward.clear()
        for record in self.records:
            if not record.is_ready:
                self._call_ready(record)
            record.accumulated.clear()
            record.is_ready = False

    def after_finalization(self) -> None:
        if self.is_split:
            self.in_backward.update(self.pending)
            self.complete_all(self.take_split())

    def take_split(self) -> list[_Invocation]:
        """The invocations whose input gradients have been computed, to be closed later."""
        taken = self._take(self.in_backward)
        self.in_backward.clear()
        self.is_split = None
        return taken

    def drop(self, invocation: _Invocation) -> None:
        forward = self.pending.get(invocation.forward, [])
        if invocation in forward:
            forward.remove(invocation)
            invocation.record.pending.remove(invocation)
        if not forward:
            self.pending.pop(invocation.forward, None)

    def _take(self, forwards: Iterable[int]) -> list[_Invocation]:
        taken = [i for forward in sorted(forwards) for i in self.pending.pop(forward, [])]
        for invocation in taken:
            invocation.record.pending.remove(invocation)
        return taken

    def reset(self) -> None:
        self._take(list(self.pending))
        self.open_microbatches.clear()
        self.in_backward.clear()
        self.after_backward.clear()
        self.is_split = None
        for unit in self.units:
            unit.reset()


def register_lifecycle_callbacks(
    module: nn.Module,
    *,
    pre_backward: PreBackward | None = None,
    post_backward: PostBackward | None = None,
    grads_ready: GradsReady | None = None,
) -> RemovableHandle:
    """Be told what the backward does with ``module``'s FSDP groups and those in it.

    - ``pre_backward(fqn, invocation)``: before this backward first uses the group's weights for
      that invocation, a recomputation of it included.
    - ``post_backward(fqn, invocation)``: no node of this backward will read the full weights of
      that invocation again; once per invocation that takes part in the backward. Where no input
      requires grad this is at the end of the backward.
    - ``grads_ready(fqn)``: every contribution to the group's trainable parameters in this backward
      is accumulated; once per backward, at its end where a parameter takes no part.

    Neither order of the last two is promised, for one group or between groups. The weights may be
    gone at ``post_backward`` where FSDP's policy releases them; gradients live on until they are
    reduced. An ``fsdp_partial_backwards`` scope is one invocation, however many its inner passes;
    the backward that ends is the outer one, or the scope itself where none follows. Groups of one
    state (a mesh per parameter) share an FQN, and call each for itself. Under a schedule that
    splits backwards, see ``pipeline.observe_split_backwards``. An exception in a callback ends the
    backward; ``reset_iteration`` recovers from it.

    Args:
        module: An FSDP root, or a unit; before the first forward or after it.

    Returns:
        A handle; its ``remove()`` takes the callbacks back.

    Raises:
        TypeError: ``module`` is not an FSDP module.
        ValueError: No callback is given, or ``module`` holds no FSDP group.
    """
    callbacks = _Callbacks(pre_backward, post_backward, grads_ready)
    if callbacks == _Callbacks(None, None, None):
        raise ValueError(
            "register_lifecycle_callbacks needs at least one of pre_backward, post_backward and "
            "grads_ready"
        )
    first, *others = _records_in(module, "register_lifecycle_callbacks")
    handle = RemovableHandle(first.callbacks, extra_dict=[r.callbacks for r in others])
    for record in (first, *others):
        record.callbacks[handle.id] = callbacks
    return handle


def set_repeated_units(module: nn.Module, policy: RepeatedUnits | None) -> None:
    """Keep or release gathered weights between the invocations of ``module`` and units in it.

    - ``"release"``: as FSDP2 does, each invocation gathers on demand.
    - ``"retain"``: a unit that is invoked again in the same forward stays gathered from its first
      invocation to its last, and in the backward until the last invocation to run has completed:
      one all-gather in the forward and one in the backward. How often a unit is invoked is taken
      from the forward before. With fewer invocations it is released at the end of the forward, with
      more of them it is gathered once more, and then kept to the end. Where an invocation is in no
      loss, the backward keeps it to its end, too.
    - ``None``: torch's own behaviour again.

    Either way prefetch in the backward follows the order of invocations, and what was prefetched is
    used, or released when the backward ends. FSDP's own policies stay in force: a unit that is not
    to be resharded is not. With ``fsdp_partial_backwards`` the scope keeps its units gathered.

    Raises:
        TypeError: ``module`` is not an FSDP module.
        ValueError: ``policy`` is neither of the two, or ``module`` holds no FSDP group.
    """
    if policy is not None and policy not in get_args(RepeatedUnits):
        raise ValueError(
            f"policy must be one of {', '.join(map(repr, get_args(RepeatedUnits)))} and None, got "
            f"{policy!r}"
        )
    for record in _records_in(module, "set_repeated_units"):
        record.repeated_units = policy


@contextmanager
def part_of_backward(
    root: FSDPModule, microbatch: int, part: Literal["whole", "input", "weight"]
) -> Iterator[None]:
    """Around a microbatch's backward, or around the part that computes its input or its weight
    gradients. For ``pipeline.observe_split_backwards``."""
    tree = tree_of(root._get_fsdp_state())
    tracker: _Tracker | None = None if tree is None else tree.listener(_Tracker)
    if tracker is None:
        yield
        return
    # The many small passes of the second part end no backward, either.
    tracker.is_split = part != "whole"
    yield
    if part == "input":
        tracker.open_microbatches[microbatch] = tracker.take_split()
    elif part == "weight":
        # The first stage computes both parts now.
        tracker.complete_all(tracker.open_microbatches.pop(microbatch, []) + tracker.take_split())


def _in_reentrant_checkpoint() -> bool:
    """Whether what runs now without a graph will run again, with one, in the backward."""
    frame: FrameType | None = sys._getframe()
    code = CheckpointFunction.forward.__code__
    while frame is not None:
        if frame.f_code is code and any(frame.f_locals[code.co_varnames[0]].needs_input_grad):
            return True
        frame = frame.f_back
    return False


def _accumulated(reference: weakref.ref[_GroupRecord], parameter: torch.Tensor) -> None:
    record = reference()
    if record is not None and record.unit.tree is not None:
        record.accumulated.add(id(parameter))
        record.tracker.check_ready(record)


def _begin(invocation: _Invocation, grad: torch.Tensor) -> None:
    """A tensor hook before FSDP's pre-backward."""
    record = invocation.record
    if record.unit.tree is not None:
        record.tracker.begin(invocation)
        if record.repeats:
            _unit_records(record.unit).order_prefetch(record, invocation)


def _begun(invocation: _Invocation, grad: torch.Tensor) -> None:
    """A tensor hook after FSDP's pre-backward."""
    _unit_records(invocation.record.unit).restore_prefetch()


def _completes(invocation: _Invocation, grads: Any) -> None:
    """A hook before FSDP's post-backward node."""
    if invocation.record.unit.tree is not None:
        invocation.record.begin_post_backward(invocation)


def _has_completed(invocation: _Invocation, *grads: Any) -> None:
    """A hook after FSDP's post-backward node."""
    if invocation.record.completing is invocation:
        invocation.record.end_post_backward()


def _leaves_weight_gradients(invocation: _Invocation) -> bool | None:
    """Whether the autograd pass under way computes none of the group's gradients.

    A schedule's pass for input gradients does so. Elsewhere a parameter may just be unused.
    """
    group = invocation.record.group
    if not is_manually_finalized(invocation.record.unit.state._state_ctx):
        return False
    trainable = trainable_parameters(group)
    if not trainable or not invocation.has_graph:
        return None  # the next one to begin tells
    nodes = [get_gradient_edge(parameter).node for parameter in trainable]
    return not any(torch._C._will_engine_execute_node(node) for node in nodes)


def _records_in(module: nn.Module, function: str) -> list[_GroupRecord]:
    if not isinstance(module, FSDPModule):
        raise TypeError(
            f"{function} takes an FSDP module, got {type(module).__name__}; apply fully_shard first"
        )
    states = dict.fromkeys(m._get_fsdp_state() for m in fsdp_modules([cast(nn.Module, module)]))
    if not any(state._fsdp_param_groups for state in states):
        raise ValueError(f"{function}: no parameters are sharded in this {type(module).__name__}")
    return [record for state in states for record in _unit_records(unit_of(state)).records]


def _unit_records(unit: Unit) -> _UnitRecords:
    """The records of ``unit``, made when they are first asked for."""
    records = _records_of(unit)
    if records is None:
        records = _UnitRecords(unit)
        unit.add(records)
    return records


def _records_of(unit: Unit) -> _UnitRecords | None:
    return next((found for found in unit.listeners if isinstance(found, _UnitRecords)), None)
