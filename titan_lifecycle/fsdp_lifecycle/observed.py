"""FSDP trees that report what they do, and ask.

[Note: Observed trees]
What ``invocations`` knows of a tree, it is told: :func:`observe` replaces FSDP2's classes on the
instances, by subclasses that report to a :class:`GroupObserver` and a :class:`TreeObserver` and ask
them. Once neither is in use the next forward gives torch's classes back, so that a tree without
observers runs torch's code alone. No upstream change is known that would replace this part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from titan_lifecycle.fsdp_lifecycle.private import (
    FSDPParamGroup,
    FSDPState,
    FSDPStateContext,
    TrainingState,
    collect_grad_tensors,
    fsdp_modules,
    is_bw,
    is_manually_finalized,
)


def disable_forward_prefetch_in_backward(module: nn.Module) -> None:
    """Keep forwards that are recomputed in a backward from prefetching in forward order.

    With ``set_modules_to_forward_prefetch`` and checkpointing outside of the units, FSDP2 gathers
    units whose backward is already over. Recomputed weights stay gathered for their backward, and
    the next forward prefetches again. Applies to ``module`` and every FSDP module in it; nothing is
    done for a module without any.
    """
    for child in fsdp_modules([module]):
        state = child._get_fsdp_state()
        if isinstance(state, _ObservedState):
            state.unobserved = _subclass(_RecomputingState, state.unobserved)
        else:
            state.__class__ = _subclass(_RecomputingState, type(state))


class GroupObserver(ABC):
    """Hears what one group does, and decides what it keeps; see [Note: Observed trees]."""

    is_in_use: bool
    """Whether anybody asked for this observer."""
    orders_prefetch: bool
    """Whether prefetch in the backward follows invocations, and not the user's lists."""
    holds_weights: bool
    """Whether a release of the weights was put off."""
    holds_gradients: bool
    """Whether a reduction of the gradients was put off."""

    @abstractmethod
    def close(self) -> None:
        """The group is observed no longer."""

    @abstractmethod
    def enter_forward(self) -> None:
        """A forward begins, also one that is recomputed."""

    @abstractmethod
    def recompute(self) -> None:
        """A forward is recomputed whose backward has begun."""

    @abstractmethod
    def gathered(self) -> None:
        """The unsharded parameters are there."""

    @abstractmethod
    def completion_hook(self) -> Callable[[Any], None] | None:
        """What to call before the post-backward node of the forward under way; None to ignore."""

    @abstractmethod
    def expects_backward(self) -> bool:
        """Whether the forward under way belongs into the order by which a backward prefetches."""

    @abstractmethod
    def set_place(self, index: int) -> None:
        """The place of the forward under way in that order."""

    @abstractmethod
    def place_of_backward(self) -> int | None:
        """The place of the invocation whose backward begins."""

    @abstractmethod
    def leave_forward(self, outputs: Iterable[torch.Tensor]) -> None:
        """The forward has ended with these outputs that require grad."""

    @abstractmethod
    def enter_scope(self) -> None:
        """A partial-backwards scope on the group has gathered its weights."""

    @abstractmethod
    def begin_scope_backward(self) -> None:
        """An inner backward of the scope may begin."""

    @abstractmethod
    def leave_scope(self) -> None:
        """No inner backward follows."""

    @abstractmethod
    def begin_post_backward(self, *, reduces: bool) -> bool:
        """A post-backward begins; returns whether it is to put off its reduction."""

    @abstractmethod
    def end_post_backward(self) -> None:
        """It has ended."""

    @abstractmethod
    def keeps_weights(self, *, in_forward: bool) -> bool:
        """Whether to put off the release of weights after a forward or a backward."""


class TreeObserver(ABC):
    """Hears what a tree does as a whole."""

    @classmethod
    @abstractmethod
    def of_group(cls, group: FSDPParamGroup) -> GroupObserver:
        """A new observer of ``group``."""

    @abstractmethod
    def __init__(self, groups: list[GroupObserver]) -> None: ...

    @property
    @abstractmethod
    def expects_backward(self) -> bool:
        """Whether a forward waits for its backward."""

    @abstractmethod
    def begin_forward(self) -> None: ...

    @abstractmethod
    def end_forward(self) -> None: ...

    @abstractmethod
    def begin_end(self) -> None:
        """Autograd is done; FSDP's own end of the backward comes next."""

    @abstractmethod
    def end(self) -> None:
        """The backward has ended."""

    @abstractmethod
    def finalized(self) -> None:
        """The caller has finalized the step."""

    @abstractmethod
    def reset(self) -> None:
        """The iteration was reset."""


def observe(module: FSDPModule, kind: type[TreeObserver]) -> list[GroupObserver]:
    """Observers of every group in ``module``, new ones or those there are; empty without groups."""
    states = dict.fromkeys(m._get_fsdp_state() for m in fsdp_modules([cast(nn.Module, module)]))
    if not any(state._fsdp_param_groups for state in states):
        return []
    return [observer for state in states for observer in _observers(_observed(state, kind))]


def tree_observer(root: FSDPModule) -> TreeObserver | None:
    """The observer of ``root``'s tree, if it has one yet."""
    context = root._get_fsdp_state()._state_ctx
    return context.observer if isinstance(context, _ObservedContext) else None


def tree_observer_of(group: FSDPParamGroup) -> TreeObserver:
    """The observer of the tree of an observed group."""
    return _observer_of(cast(_ObservedGroup, group).state)


def group_observer(group: FSDPParamGroup | None) -> GroupObserver | None:
    """The observer of ``group``, unless it is gone or no longer observed."""
    return group.observer if isinstance(group, _ObservedGroup) else None


def is_group_manually_finalized(group: FSDPParamGroup) -> bool:
    """Whether the caller finalizes the backward of an observed group."""
    return is_manually_finalized(cast(_ObservedGroup, group).state._state_ctx)


def release_after_forward(group: FSDPParamGroup) -> None:
    """Release weights as the end of a forward does, by the group's policy."""
    before, group._training_state = group._training_state, TrainingState.FORWARD
    group.reshard()
    group._training_state = before


def release_after_backward(group: FSDPParamGroup) -> None:
    """Release weights that were kept, or prefetched and not used."""
    was_unsharded = group.is_unsharded
    group.wait_for_unshard()
    was_prefetched = group.is_unsharded and not was_unsharded
    if was_prefetched or cast(_ObservedGroup, group).observer.holds_weights:
        group.reshard()


def leave_prefetch_order(group: FSDPParamGroup, index: int | None) -> None:
    """Take the group's forward at ``index`` back out of the order, if it is the last in it."""
    order = group.comm_ctx.post_forward_order
    if index == len(order) - 1:
        order.pop()
        group._post_forward_indices.pop()


def repeat_post_backward(group: FSDPParamGroup) -> None:
    """Let the end of the backward take the post-backward for not run yet: it then reduces, or
    leaves that to manual finalization."""
    group._training_state = TrainingState.IDLE


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


class _ObservedState(_RecomputingState):
    unobserved: type[FSDPState]
    kind: type[TreeObserver]

    def _root_pre_forward(self, *args: Any, **kwargs: Any) -> Any:
        # A recomputed forward may also be the first of its tree, and begins nothing.
        begins = self._state_ctx.iter_forward_root is None and not is_bw()
        if begins and _unobserve_if_unused(self):
            return self._root_pre_forward(*args, **kwargs)
        result = super()._root_pre_forward(*args, **kwargs)
        # Not before: the root's first forward settles which states are a tree.
        observer = _observer_of(self)
        if begins:
            observer.begin_forward()
        return result

    def _force_complete_incomplete_states(self, output: Any) -> Any:
        # Called at the end of the forward of the module that began it.
        output = super()._force_complete_incomplete_states(output)
        if not is_bw():
            _observer_of(self).end_forward()
        return output

    def _cast_forward_inputs(self, *args: Any, **kwargs: Any) -> Any:
        if self._training_state == TrainingState.PRE_BACKWARD:
            # Recomputed after its backward has begun: FSDP goes no further.
            for observer in _observers(self):
                observer.recompute()
        return super()._cast_forward_inputs(*args, **kwargs)

    def _register_pre_backward_hook(self, output: Any) -> Any:
        tensors = collect_grad_tensors(output) if torch.is_grad_enabled() else ()
        # In reverse, so that each may leave the prefetch order as the last in it.
        for observer in reversed([*_observers(self)]):
            observer.leave_forward(tensors)
        return super()._register_pre_backward_hook(output)

    def _root_post_backward_final_callback(self) -> None:
        observer = _observer_of(self)
        observer.begin_end()
        super()._root_post_backward_final_callback()
        observer.end()

    @property
    def _states_to_backward_prefetch(self) -> list[FSDPState]:
        if any(observer.orders_prefetch for observer in _observers(self)):
            # A list of modules cannot say which invocation of them comes next.
            return []
        states: list[FSDPState] = self.__dict__["_states_to_backward_prefetch"]
        return states

    @_states_to_backward_prefetch.setter
    def _states_to_backward_prefetch(self, states: list[FSDPState]) -> None:
        self.__dict__["_states_to_backward_prefetch"] = states

    def finalize_backward(self, **kwargs: Any) -> None:
        super().finalize_backward(**kwargs)
        _observer_of(self).finalized()

    def _reset_iter_state(self) -> None:
        super()._reset_iter_state()
        _observer_of(self).reset()


class _ObservedGroup(FSDPParamGroup):
    observer: GroupObserver
    state: FSDPState

    def pre_forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._training_state != TrainingState.FORWARD:
            self.observer.enter_forward()
        result = super().pre_forward(*args, **kwargs)
        self.observer.gathered()
        return result

    def _register_post_backward_hook(self, args: Any, kwargs: Any) -> Any:
        new_args, new_kwargs = super()._register_post_backward_hook(args, kwargs)
        if torch.is_grad_enabled() and collect_grad_tensors((args, kwargs)):
            # All outputs of FSDP's post-backward node.
            node = collect_grad_tensors((new_args, new_kwargs))[0].grad_fn
            assert node is not None
            if (hook := self.observer.completion_hook()) is not None:
                node.register_prehook(hook)
        return new_args, new_kwargs

    def _record_post_forward(self) -> None:
        if self.observer.expects_backward():
            super()._record_post_forward()
            self.observer.set_place(self._post_forward_indices[-1])

    def _backward_prefetch(self) -> None:
        index = self.observer.place_of_backward()
        if index in self._post_forward_indices:
            # FSDP takes the last one for this invocation's place in the forward's order.
            self._post_forward_indices.remove(index)
            self._post_forward_indices.append(index)
        super()._backward_prefetch()

    def post_backward(self, *unused: Any) -> None:
        holds_gradients = self.observer.begin_post_backward(reduces=self.reduce_grads)
        if holds_gradients:
            self.reduce_grads = False
        try:
            super().post_backward()
        finally:
            if holds_gradients:
                self.reduce_grads = True
        if all(g._training_state == self._training_state for g in self.state._fsdp_param_groups):
            # Or FSDP takes the unit's next recomputation for one of this invocation, puts no
            # post-backward node into its graph, and never reduces what it accumulates.
            self.state._training_state = TrainingState.IDLE
        self.observer.end_post_backward()

    def reshard(self) -> None:
        in_forward = self._training_state == TrainingState.FORWARD
        if in_forward or self._training_state == TrainingState.POST_BACKWARD:
            self.observer.holds_weights = self.observer.keeps_weights(in_forward=in_forward)
        else:
            self.observer.holds_weights = False
        if not self.observer.holds_weights:
            super().reshard()


class _ObservedContext(FSDPStateContext[FSDPState]):
    observer: TreeObserver
    unobserved: type[Any]


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


def _observed(state: FSDPState, kind: type[TreeObserver]) -> _ObservedState:
    if not isinstance(state, _ObservedState):
        unobserved = type(state)
        state.__class__ = _subclass(_ObservedState, unobserved)
        state = cast(_ObservedState, state)
        state.unobserved, state.kind = unobserved, kind
    for group in state._fsdp_param_groups:
        if not isinstance(group, _ObservedGroup):
            group.__class__ = _ObservedGroup
            group = cast(_ObservedGroup, group)
            group.state, group.observer = state, kind.of_group(group)
    return state


def _observers(state: FSDPState) -> Iterator[GroupObserver]:
    for group in state._fsdp_param_groups:
        yield cast(_ObservedGroup, group).observer


def _observer_of(state: FSDPState) -> TreeObserver:
    """The tree's observer; with the first one asked for, the whole tree is observed."""
    context: Any = state._state_ctx
    if not isinstance(context, _ObservedContext):
        kind = cast(_ObservedState, state).kind
        # Before the root's first forward there are none.
        states = context.all_states or [state]
        observer = kind([o for s in states for o in _observers(_observed(s, kind))])
        unobserved = type(context)
        context.__class__ = _subclass(_ObservedContext, unobserved)
        context.observer, context.unobserved = observer, unobserved
    found: TreeObserver = context.observer
    return found


def _unobserve_if_unused(state: FSDPState) -> bool:
    """Give the tree of ``state`` back to torch's classes, if no observer is in use any more."""
    context: Any = state._state_ctx
    if not isinstance(context, _ObservedContext) or context.observer.expects_backward:
        return False
    states = context.all_states or [state]
    if any(observer.is_in_use for s in states for observer in _observers(s)):
        return False
    for observed in states:
        for group in observed._fsdp_param_groups:
            cast(_ObservedGroup, group).observer.close()
            cast(Any, group).__class__ = FSDPParamGroup
            del cast(Any, group).observer, cast(Any, group).state
        observed.__class__ = cast(_ObservedState, observed).unobserved
    context.__class__ = context.unobserved
    del cast(Any, context).observer, cast(Any, context).unobserved
    return True
