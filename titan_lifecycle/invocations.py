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

Classes of FSDP2 are replaced on the instances, by subclasses, and only where something is
registered: a tree without callbacks or policy runs torch's code alone.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, Literal, cast, get_args

import torch
import torch.nn as nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from titan_lifecycle.fsdp_lifecycle import (
    is_in_scope,
    is_manually_finalized,
    missing_names,
    states_of_tree,
    unsupported_torch,
)

try:
    from torch.distributed.fsdp._common_utils import collect_grad_tensors
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState, is_bw
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, FSDPStateContext
except ImportError as error:
    raise ImportError(unsupported_torch(str(error))) from error

__all__ = [
    "RepeatedUnits",
    "disable_forward_prefetch_in_backward",
    "register_lifecycle_callbacks",
    "set_repeated_units",
]

RepeatedUnits = Literal["release", "retain"]
"""What happens to a unit's gathered weights between its invocations in one forward or backward."""

PRIVATE_NAMES: dict[Any, tuple[str, ...]] = {
    torch._C: ("_current_autograd_node", "_current_graph_task_id", "_will_engine_execute_node"),
    torch._C._autograd: ("_get_sequence_nr", "_top_saved_tensors_default_hooks"),
    FSDPState: (
        "_cast_forward_inputs",
        "_force_complete_incomplete_states",
        "_fsdp_param_groups",
        "_register_pre_backward_hook",
        "_reset_iter_state",
        "_root_post_backward_final_callback",
        "_root_pre_forward",
        "_state_ctx",
        "_states_to_backward_prefetch",
        "_states_to_forward_prefetch",
        "_training_state",
        "finalize_backward",
    ),
    FSDPStateContext: ("iter_forward_root", "manual_backward_finalization_active"),
    FSDPParamGroup: (
        "_all_gather_result",
        "_backward_prefetch",
        "_post_forward_indices",
        "_record_post_forward",
        "_register_post_backward_hook",
        "_training_state",
        "comm_ctx",
        "finalize_backward",
        "post_backward",
        "pre_forward",
        "reshard",
        "use_training_state",
    ),
}

if missing := missing_names(PRIVATE_NAMES):
    raise ImportError(unsupported_torch(f"it lacks {', '.join(missing)}"))


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


@dataclass(eq=False, slots=True)
class _GroupRecord:
    """What is kept about one FSDP group."""

    group: FSDPParamGroup
    state: FSDPState
    callbacks: OrderedDict[int, _Callbacks] = field(default_factory=OrderedDict)
    repeated_units: RepeatedUnits | None = None
    # In this forward, and in the one before; evaluations are not learned from.
    num_invocations: int = 0
    last_num_invocations: int = 0
    # The invocation whose forward, whose start of backward, and whose end of backward is under way.
    in_forward: _Invocation | None = None
    beginning: _Invocation | None = None
    completing: _Invocation | None = None
    # Whether the invocation whose backward completed last is followed by another one's.
    is_used_again_in_backward: bool = False
    # Weights that the policy would have released, and gradients that it would have reduced.
    holds_weights: bool = False
    holds_gradients: bool = False
    pending: list[_Invocation] = field(default_factory=list)
    accumulated: set[int] = field(default_factory=set)
    is_ready: bool = False
    gradient_hooks: dict[int, Any] = field(default_factory=dict)

    @property
    def fqn(self) -> str:
        return self.group._module_fqn or "<root>"

    @property
    def tracker(self) -> _Tracker:
        return _tracker_of(self.state)

    @property
    def is_used(self) -> bool:
        return bool(self.callbacks) or self.repeated_units is not None

    @property
    def retains(self) -> bool:
        return self.repeated_units == "retain"

    def call(self, moment: Literal["pre_backward", "post_backward"], index: int) -> None:
        for callbacks in [*self.callbacks.values()]:
            if (callback := getattr(callbacks, moment)) is not None:
                callback(self.fqn, index)

    def trainable(self) -> list[nn.Parameter]:
        """The unsharded parameters that require grad; empty before the first gather."""
        return [
            p._unsharded_param
            for p in self.group.fsdp_params
            if p.sharded_param.requires_grad and hasattr(p, "_unsharded_param")
        ]

    def is_invoked_again_in_forward(self) -> bool:
        """By the count of the forward before; beyond that count, until the forward's end."""
        count, expected = self.num_invocations, self.last_num_invocations
        return count < expected or (count > expected and count > 1)

    def watch_gradients(self) -> None:
        if any(callbacks.grads_ready for callbacks in self.callbacks.values()):
            for parameter in self.trainable():
                if id(parameter) not in self.gradient_hooks:
                    # Weakly: the hook is the parameter's, which is the group's, and autograd's part
                    # of that cycle is not collected.
                    hook = partial(_accumulated, weakref.ref(self.group))
                    self.gradient_hooks[id(parameter)] = (
                        parameter.register_post_accumulate_grad_hook(hook)
                    )


# A forward with gradients enabled whose backward never comes leaves its records; the oldest go.
_MAX_PENDING_FORWARDS = 1024


class _Tracker:
    """The records of one FSDP tree; see [Note: Completion and readiness]."""

    def __init__(self, states: Iterable[FSDPState]) -> None:
        self.states = [_tracked(state) for state in states]
        self.context_class: type[FSDPStateContext[FSDPState]] = FSDPStateContext
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

    def records(self) -> Iterable[_GroupRecord]:
        for state in self.states:
            yield from _records_of(state)

    # The forward #

    def begin_forward(self) -> None:
        self.forward += 1
        self.is_evaluation = not torch.is_grad_enabled() and not _in_reentrant_checkpoint()
        if not self.is_evaluation:
            # What has not begun by now, as a prediction that is in no loss, hardly will.
            self._take(self.after_backward)
            self.after_backward.clear()
        if len(self.pending) > _MAX_PENDING_FORWARDS:
            self._take([next(iter(self.pending))])
        for record in self.records():
            record.num_invocations = 0

    def end_forward(self) -> None:
        for record in self.records():
            if record.num_invocations and not self.is_evaluation:
                record.last_num_invocations = record.num_invocations
            if record.holds_weights:
                record.num_invocations = record.last_num_invocations
                with record.group.use_training_state(TrainingState.FORWARD):
                    record.group.reshard()

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

    def takes_no_part(self, invocation: _Invocation) -> None:
        """Nothing that requires grad came out of it: no backward reaches it, and no prefetch."""
        self._drop(invocation)
        group = invocation.record.group
        order = group.comm_ctx.post_forward_order
        if invocation.post_forward_index == len(order) - 1:
            order.pop()
            group._post_forward_indices.pop()

    # The backward #

    def begin(self, invocation: _Invocation) -> None:
        invocation.record.beginning = invocation
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
        if record.is_ready or self.is_split or is_in_scope(record.state):
            return
        if not record.accumulated.issuperset(map(id, record.trainable())):
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

    def begin_end(self) -> None:
        """Autograd is done; FSDP's own end of the backward comes next."""
        for record in self.records():
            if record.holds_gradients:
                record.holds_gradients = False
                # FSDP then takes its post-backward for not run yet, and reduces, or leaves it to
                # manual finalization.
                record.group._training_state = TrainingState.IDLE

    def end_pass(self) -> None:
        """An inner pass of a partial-backwards scope has ended, and no backward."""
        self.is_split = None
        for record in self.records():
            # The outer backward may contribute to the same parameters, as to a tied embedding.
            record.accumulated.clear()
        for forward in self.in_backward & self.pending.keys():
            for invocation in self.pending[forward]:
                if invocation.begun:
                    self.complete(invocation)

    def end(self) -> None:
        """The backward has ended, except for weight gradients that are computed later."""
        for record in self.records():
            if record.holds_weights:
                record.group.reshard()
            _release_unused_prefetch(record.group)
        if not self.is_split:
            begun = self.in_backward & self.pending.keys()
            self.close([i for forward in sorted(begun) for i in self.pending[forward]])

    def close(self, invocations: list[_Invocation]) -> None:
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
        for record in self.records():
            if not record.is_ready:
                self._call_ready(record)
            record.accumulated.clear()
            record.is_ready = False

    def take_split(self) -> list[_Invocation]:
        """The invocations whose input gradients have been computed, to be closed later."""
        taken = self._take(self.in_backward)
        self.in_backward.clear()
        self.is_split = None
        return taken

    def _drop(self, invocation: _Invocation) -> None:
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
        for record in self.records():
            record.in_forward = record.beginning = record.completing = None
            record.holds_weights = record.holds_gradients = record.is_ready = False
            # Every rank resets, and each may have failed elsewhere: none may expect anything.
            record.num_invocations = record.last_num_invocations = 0
            record.accumulated.clear()


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
    reduced. The inner passes of an ``fsdp_partial_backwards`` scope are invocations each; the
    backward that ends is the outer one, or the scope's last where none follows. Groups of one state
    (a mesh per parameter) share an FQN, and call each for itself. Under a schedule
    that splits backwards, see ``pipeline.observe_split_backwards``. An exception in a callback
    ends the backward; ``reset_iteration`` recovers from it.

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
    - ``None``: torch's own code again, if nothing else is registered.

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


def disable_forward_prefetch_in_backward(module: nn.Module) -> None:
    """Keep forwards that are recomputed in a backward from prefetching in forward order.

    With ``set_modules_to_forward_prefetch`` and checkpointing outside of the units, FSDP2 gathers
    units whose backward is already over. Recomputed weights stay gathered for their backward, and
    the next forward prefetches again. Applies to ``module`` and every FSDP module in it; nothing is
    done for a module without any.
    """
    for child in module.modules():
        if isinstance(child, FSDPModule):
            state = child._get_fsdp_state()
            if isinstance(state, _TrackedState):
                state.untracked = _subclass(_RecomputingState, state.untracked)
            elif not isinstance(state, _RecomputingState):
                state.__class__ = _subclass(_RecomputingState, type(state))


class _RecomputingState(FSDPState):
    """Issues no forward prefetch while a backward runs.

    A recomputed forward runs in reverse order of blocks: what comes after it in forward order has
    completed its backward, and would be gathered for nothing.
    """

    @property
    def _states_to_forward_prefetch(self) -> list[FSDPState]:
        return [] if is_bw() else self.__dict__["_states_to_forward_prefetch"]

    @_states_to_forward_prefetch.setter
    def _states_to_forward_prefetch(self, states: list[FSDPState]) -> None:
        self.__dict__["_states_to_forward_prefetch"] = states


class _TrackedState(_RecomputingState):
    untracked: type[FSDPState]

    def _root_pre_forward(self, *args: Any, **kwargs: Any) -> Any:
        # A recomputed forward may also be the first of its tree, and begins nothing.
        begins = self._state_ctx.iter_forward_root is None and not is_bw()
        if begins and _untrack_if_unused(self):
            return self._root_pre_forward(*args, **kwargs)
        result = super()._root_pre_forward(*args, **kwargs)
        # Not before: the root's first forward settles which states are a tree.
        tracker = _tracker_of(self)
        if begins:
            tracker.begin_forward()
        return result

    def _force_complete_incomplete_states(self, output: Any) -> Any:
        # Called at the end of the forward of the module that began it.
        output = super()._force_complete_incomplete_states(output)
        if not is_bw():
            _tracker_of(self).end_forward()
        return output

    def _cast_forward_inputs(self, *args: Any, **kwargs: Any) -> Any:
        if self._training_state == TrainingState.PRE_BACKWARD:
            # Recomputed after its backward has begun: FSDP goes no further.
            for record in _records_of(self):
                record.tracker.invoke(record)
        return super()._cast_forward_inputs(*args, **kwargs)

    def _register_pre_backward_hook(self, output: Any) -> Any:
        tensors = collect_grad_tensors(output) if torch.is_grad_enabled() else ()
        for record in reversed([*_records_of(self)]):
            invocation, record.in_forward = record.in_forward, None
            if invocation is None:
                continue
            for tensor in tensors:
                tensor.register_hook(partial(_begin, invocation))
            if not tensors and invocation.has_graph and not invocation.begun:
                record.tracker.takes_no_part(invocation)
        return super()._register_pre_backward_hook(output)

    def _root_post_backward_final_callback(self) -> None:
        tracker = _tracker_of(self)
        if is_in_scope(self):
            super()._root_post_backward_final_callback()
            tracker.end_pass()
            return
        tracker.begin_end()
        super()._root_post_backward_final_callback()
        tracker.end()

    @property
    def _states_to_backward_prefetch(self) -> list[FSDPState]:
        if any(record.repeated_units for record in _records_of(self)):
            # A list of modules cannot say which invocation of them comes next.
            return []
        states: list[FSDPState] = self.__dict__["_states_to_backward_prefetch"]
        return states

    @_states_to_backward_prefetch.setter
    def _states_to_backward_prefetch(self, states: list[FSDPState]) -> None:
        self.__dict__["_states_to_backward_prefetch"] = states

    def finalize_backward(self, **kwargs: Any) -> None:
        super().finalize_backward(**kwargs)
        tracker = _tracker_of(self)
        if tracker.is_split:
            tracker.in_backward.update(tracker.pending)
            tracker.close(tracker.take_split())

    def _reset_iter_state(self) -> None:
        super()._reset_iter_state()
        _tracker_of(self).reset()


class _TrackedGroup(FSDPParamGroup):
    record: _GroupRecord

    def pre_forward(self, *args: Any, **kwargs: Any) -> Any:
        record = self.record
        if self._training_state != TrainingState.FORWARD:
            record.in_forward = record.tracker.invoke(record)
        result = super().pre_forward(*args, **kwargs)
        record.watch_gradients()
        return result

    def _register_post_backward_hook(self, args: Any, kwargs: Any) -> Any:
        new_args, new_kwargs = super()._register_post_backward_hook(args, kwargs)
        invocation = self.record.in_forward
        if (
            invocation is not None
            and torch.is_grad_enabled()
            and collect_grad_tensors((args, kwargs))
        ):
            # All outputs of FSDP's post-backward node.
            node = collect_grad_tensors((new_args, new_kwargs))[0].grad_fn
            assert node is not None
            node.register_prehook(partial(_completes, invocation))
        return new_args, new_kwargs

    def _record_post_forward(self) -> None:
        invocation = self.record.in_forward
        if invocation is None:
            # No backward follows, and the next one would prefetch by this order.
            return
        super()._record_post_forward()
        invocation.post_forward_index = self._post_forward_indices[-1]

    def _backward_prefetch(self) -> None:
        invocation = self.record.beginning
        index = invocation.post_forward_index if invocation is not None else None
        if index in self._post_forward_indices:
            # FSDP takes the last one for this invocation's place in the forward's order.
            self._post_forward_indices.remove(index)
            self._post_forward_indices.append(index)
        super()._backward_prefetch()

    def post_backward(self, *unused: Any) -> None:
        record = self.record
        invocation, record.completing = record.completing, None
        # None: FSDP settles what no node of the graph has settled, or it was not matched.
        others = record.tracker.others_pending(invocation) if invocation is not None else []
        record.is_used_again_in_backward = bool(others)
        if invocation is not None and not record.tracker.is_split:
            record.tracker.complete(invocation)
        record.holds_gradients = bool(others) and self.reduce_grads
        if record.holds_gradients:
            # One reduction, after the last of them. There is something to reduce where invocations
            # are recomputed, each in a graph of its own, and after a microbatch without reduction.
            self.reduce_grads = False
        try:
            super().post_backward()
        finally:
            if record.holds_gradients:
                self.reduce_grads = True
        if all(r.group._training_state == self._training_state for r in _records_of(record.state)):
            # Or FSDP takes the unit's next recomputation for one of this invocation, puts no
            # post-backward node into its graph, and never reduces what it accumulates.
            record.state._training_state = TrainingState.IDLE
        if invocation is not None:
            record.tracker.check_ready(record)

    def reshard(self) -> None:
        record = self.record
        if record.retains:
            if self._training_state == TrainingState.FORWARD:
                record.holds_weights = record.is_invoked_again_in_forward()
            elif self._training_state == TrainingState.POST_BACKWARD:
                record.holds_weights = record.is_used_again_in_backward
            else:
                record.holds_weights = False
            if record.holds_weights:
                return
        super().reshard()


class SplitBackwards:
    """The microbatches of one FSDP root whose input gradients are there and weight gradients not.

    For ``pipeline.observe_split_backwards``.
    """

    def __init__(self, root: FSDPModule) -> None:
        self._root = root

    @contextmanager
    def whole(self) -> Iterator[None]:
        if (tracker := self._tracker()) is not None:
            tracker.is_split = False
        yield

    @contextmanager
    def input_gradients(self, microbatch: int) -> Iterator[None]:
        tracker = self._tracker()
        if tracker is None:
            yield
            return
        tracker.is_split = True
        yield
        tracker.open_microbatches[microbatch] = tracker.take_split()

    @contextmanager
    def weight_gradients(self, microbatch: int) -> Iterator[None]:
        tracker = self._tracker()
        if tracker is None:
            yield
            return
        # The many small passes of this part end no backward.
        tracker.is_split = True
        yield
        # The first stage computes both parts now.
        tracker.close(tracker.open_microbatches.pop(microbatch, []) + tracker.take_split())

    def _tracker(self) -> _Tracker | None:
        context = self._root._get_fsdp_state()._state_ctx
        return context.tracker if isinstance(context, _TrackedContext) else None


class _TrackedContext(FSDPStateContext[FSDPState]):
    tracker: _Tracker


_subclasses: dict[Any, Any] = {}


def _subclass(mixin: type, cls: type) -> Any:
    """``mixin`` in front of ``cls``, FSDP2's own class or a subclass (``replicate()`` has one)."""
    if issubclass(mixin, cls):
        return mixin
    if issubclass(cls, mixin):
        return cls
    if (mixin, cls) not in _subclasses:
        _subclasses[mixin, cls] = type(
            f"{mixin.__name__.removeprefix('_')}{cls.__name__}", (mixin, cls), {}
        )
    return _subclasses[mixin, cls]


def _in_reentrant_checkpoint() -> bool:
    """Whether what runs now without a graph will run again, with one, in the backward."""
    frame: FrameType | None = sys._getframe()
    code = CheckpointFunction.forward.__code__
    while frame is not None:
        if frame.f_code is code and any(frame.f_locals[code.co_varnames[0]].needs_input_grad):
            return True
        frame = frame.f_back
    return False


def _accumulated(group: weakref.ref[FSDPParamGroup], parameter: torch.Tensor) -> None:
    if isinstance(tracked := group(), _TrackedGroup):
        tracked.record.accumulated.add(id(parameter))
        tracked.record.tracker.check_ready(tracked.record)


def _begin(invocation: _Invocation, grad: torch.Tensor) -> None:
    invocation.record.tracker.begin(invocation)


def _completes(invocation: _Invocation, grads: Any) -> None:
    invocation.record.completing = invocation


def _leaves_weight_gradients(invocation: _Invocation) -> bool | None:
    """Whether the autograd pass under way computes none of the group's gradients.

    A schedule's pass for input gradients does so. Elsewhere a parameter may just be unused.
    """
    record = invocation.record
    if not is_manually_finalized(record.state._state_ctx):
        return False
    trainable = record.trainable()
    if not trainable or not invocation.has_graph:
        return None  # the next one to begin tells
    nodes = [get_gradient_edge(parameter).node for parameter in trainable]
    return not any(torch._C._will_engine_execute_node(node) for node in nodes)


def _release_unused_prefetch(group: FSDPParamGroup) -> None:
    if group._all_gather_result is not None:
        group.wait_for_unshard()
        group.reshard()


def _tracked(state: FSDPState) -> FSDPState:
    if not isinstance(state, _TrackedState):
        untracked = type(state)
        state.__class__ = _subclass(_TrackedState, untracked)
        cast(_TrackedState, state).untracked = untracked
    for group in state._fsdp_param_groups:
        if not isinstance(group, _TrackedGroup):
            group.__class__ = _TrackedGroup
            cast(_TrackedGroup, group).record = _GroupRecord(group, state)
    return state


def _records_of(state: FSDPState) -> Iterator[_GroupRecord]:
    for group in state._fsdp_param_groups:
        yield cast(_TrackedGroup, group).record


def _untrack_if_unused(state: FSDPState) -> bool:
    """Give the tree of ``state`` back to torch's classes, if nothing is registered any more."""
    context = state._state_ctx
    if not isinstance(context, _TrackedContext):
        return False
    tracker = context.tracker
    if tracker.pending.keys() - tracker.after_backward or any(
        record.is_used for record in tracker.records()
    ):
        return False
    for tracked in tracker.states:
        for record in _records_of(tracked):
            for hook in record.gradient_hooks.values():
                hook.remove()
            cast(Any, record.group).__class__ = FSDPParamGroup
            del cast(Any, record.group).record
        tracked.__class__ = cast(_TrackedState, tracked).untracked
    del cast(Any, context).tracker
    cast(Any, context).__class__ = tracker.context_class
    return True


def _tracker_of(state: FSDPState) -> _Tracker:
    context = state._state_ctx
    if not isinstance(context, _TrackedContext):
        tracker = _Tracker(states_of_tree(state) or [state])
        tracker.context_class = type(context)
        cast(Any, context).__class__ = _subclass(_TrackedContext, type(context))
        cast(_TrackedContext, context).tracker = tracker
        return tracker
    return context.tracker


def _records_in(module: nn.Module, function: str) -> list[_GroupRecord]:
    if not isinstance(module, FSDPModule):
        raise TypeError(
            f"{function} takes an FSDP module, got {type(module).__name__}; apply fully_shard first"
        )
    states = dict.fromkeys(
        child._get_fsdp_state() for child in module.modules() if isinstance(child, FSDPModule)
    )
    if not any(state._fsdp_param_groups for state in states):
        raise ValueError(f"{function}: no parameters are sharded in this {type(module).__name__}")
    return [record for state in states for record in _records_of(_tracked(state))]
