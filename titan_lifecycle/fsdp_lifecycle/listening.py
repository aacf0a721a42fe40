"""How FSDP2 is listened to: plain hooks right before and right after its own.

[Note: Listening to FSDP2]
FSDP2 does its work in a forward pre-hook and a forward hook on a unit's modules, in a tensor hook
on the unit's outputs, in an autograd node on its inputs, and in a callback at the end of the
backward. Each of them can be surrounded without a change to FSDP2:

- a :class:`Unit` puts one hook before and one after each of FSDP's two forward hooks, wherever
  these stand among the hooks of others;
- a tensor hook that is registered before FSDP's forward hook runs, runs before FSDP's own, and one
  that is registered after it runs after;
- :func:`post_backward_node` finds the node, which takes hooks of its own;
- the :class:`Tree` queues its callback in a tensor hook that runs before FSDP's, so that it runs
  before FSDP's, and from there another one, which runs after.

Listening changes nothing. A listener that does change something sets FSDP's policy by value before
one of FSDP's hooks, and sets it back after: see ``invocations``. The hooks are removed when nobody
listens any more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch
import torch.nn as nn
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from titan_lifecycle.fsdp_lifecycle.private import (
    FSDPParamGroup,
    FSDPState,
    TrainingState,
    collect_grad_tensors,
    forward_hook_id,
    fsdp_modules,
    is_bw,
    modules_of,
)

__all__ = [
    "Listener",
    "Tree",
    "Unit",
    "disable_forward_prefetch_in_backward",
    "end_backward",
    "existing_unit",
    "is_resting",
    "listeners_in_scope",
    "post_backward_node",
    "rest",
    "tree_of",
    "unit_of",
    "wake",
]

_L = TypeVar("_L", bound="Listener")

# The attribute of an FSDP state under which its unit is kept: both go together.
_UNIT = "titan_lifecycle_unit"


class Listener:
    """Hears what the units of a tree do, and what the tree does. By default it does nothing."""

    is_in_use = True
    """Whether anybody still asks for this listener."""
    mutes_forward_prefetch = False
    """Whether a forward of the unit that is recomputed is to prefetch nothing."""

    def join(self, tree: Tree) -> None:
        """The root's first forward has settled which units are a tree."""

    def close(self) -> None:
        """Nobody listens any more."""

    # Of a unit. `outputs` are those that require grad #

    def before_forward(self, unit: Unit) -> None:
        """A forward begins, also one that is recomputed."""

    def recomputed(self, unit: Unit) -> None:
        """A forward begins that is recomputed after its backward has begun."""

    def gathered(self, unit: Unit, inputs: Sequence[torch.Tensor]) -> None:
        """FSDP has gathered the weights for a forward, and put its nodes on the inputs."""

    def leaving_forward(self, unit: Unit, outputs: Sequence[torch.Tensor]) -> None:
        """FSDP is about to release the weights and to put its tensor hooks on the outputs."""

    def left_forward(self, unit: Unit, outputs: Sequence[torch.Tensor]) -> None:
        """It has done so."""

    def enter_scope(self, unit: Unit) -> None:
        """A partial-backwards scope has gathered the weights."""

    def begin_scope_backward(self, unit: Unit) -> None:
        """An inner backward of the scope may begin."""

    def leave_scope(self, unit: Unit) -> None:
        """No inner backward follows; FSDP's post-backward comes next."""

    # Of the tree #

    def begin_forward(self) -> None:
        """The root's forward begins, and no backward is under way."""

    def end_forward(self) -> None:
        """It has ended."""

    def before_end(self) -> None:
        """Autograd is done; FSDP's own end of the backward comes next."""

    def after_end(self) -> None:
        """FSDP has ended the backward."""

    def before_finalization(self) -> None:
        """The caller finalizes the step."""

    def after_finalization(self) -> None:
        """It has done so."""

    def reset(self) -> None:
        """The iteration was reset."""


class Unit:
    """One FSDP state, with hooks around FSDP's own while anybody listens."""

    def __init__(self, state: FSDPState) -> None:
        self.state = state
        self.listeners: list[Listener] = []
        self.tree: Tree | None = None
        # Whether a recomputed forward prefetches nothing: what comes after it in the order of
        # forwards has completed its backward, and would be gathered for nothing.
        self.mutes_forward_prefetch = False
        self._muted: list[FSDPState] | None = None
        self._is_entering = False
        self._leaving: tuple[Sequence[Unit], Sequence[torch.Tensor]] = ((), ())
        self._modules = [cast(nn.Module, module) for module in modules_of(state)]
        self._handles: list[RemovableHandle] = []
        self._hears_all = False
        self._surround("_forward_pre_hooks", self._before_forward, self._gathered)

    @property
    def groups(self) -> list[FSDPParamGroup]:
        return self.state._fsdp_param_groups

    def add(self, listener: Listener) -> None:
        self.listeners.append(listener)
        self.hear_all()
        if self.tree is not None:
            listener.join(self.tree)

    def hear_all(self) -> None:
        if not self._hears_all:
            self._hears_all = True
            self._surround("_forward_hooks", self._leaving_forward, self._left_forward)

    def close(self) -> None:
        """Remove the hooks, unless a recomputed forward still has to be kept from prefetching."""
        self.listeners.clear()
        self.tree = None
        kept = 2 * len(self._modules) if self.mutes_forward_prefetch else 0
        for handle in self._handles[kept:]:
            handle.remove()
        del self._handles[kept:]
        self._hears_all = False
        if not kept:
            delattr(self.state, _UNIT)

    def restore(self) -> None:
        """Give FSDP back what was set for one of its hooks, which may have raised."""
        if self._muted is not None:
            self.state._states_to_forward_prefetch, self._muted = self._muted, None

    def _surround(self, kind: str, before: Callable[..., None], after: Callable[..., None]) -> None:
        for module in self._modules:
            hooks: OrderedDict[int, Any] = getattr(module, kind)
            anchor = forward_hook_id(hooks, self.state)
            for hook, offset in ((before, 0), (after, 1)):
                hook = torch.compiler.disable(hook)
                if kind == "_forward_pre_hooks":
                    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
                else:
                    handle = module.register_forward_hook(hook)
                self._handles.append(handle)
                order = [*hooks][:-1]
                order.insert(order.index(anchor) + offset, handle.id)
                for hook_id in order:
                    hooks.move_to_end(hook_id)

    # The hooks #

    # Closing the tree in `_before_forward` removes `_gathered` from the call under way, which still
    # calls it, but without the keyword arguments it had asked for.
    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        state = self.state
        if state in _resting:
            return
        self.restore()
        if state._states_to_forward_prefetch and is_bw() and self._is_muted():
            self._muted, state._states_to_forward_prefetch = state._states_to_forward_prefetch, []
        if self.tree is None:
            if not self.listeners:
                return
            # FSDP does so next. It settles which units are a tree.
            state._lazy_init()
            Tree(state)
        tree = cast(Tree, self.tree)
        if state._training_state == TrainingState.PRE_BACKWARD:
            for listener in self.listeners:
                listener.recomputed(self)
        elif state._training_state != TrainingState.FORWARD:
            if state._state_ctx.iter_forward_root is None and not is_bw() and not tree.begin(self):
                return
            self._is_entering = True
            for listener in self.listeners:
                listener.before_forward(self)

    def _gathered(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        if self.state in _resting:
            return
        self.restore()
        if self._is_entering:
            self._is_entering = False
            inputs = collect_grad_tensors((args, kwargs)) if torch.is_grad_enabled() else ()
            for listener in self.listeners:
                listener.gathered(self, inputs)

    def _leaving_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.tree is not None and self.state not in _resting and self._completes(module):
            self.leave(output)

    def _left_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.tree is not None and self.state not in _resting:
            self.have_left()

    def leave(self, output: Any) -> None:
        """The forward completes with ``output``."""
        tree = cast(Tree, self.tree)
        tensors = collect_grad_tensors(output) if torch.is_grad_enabled() else ()
        units = [self, *tree.incomplete()] if tree.forward_root is self else [self]
        self._leaving = (units, tensors)
        for tensor in tensors:
            tensor.register_hook(tree.expect_end)
        for unit in units:
            for listener in unit.listeners:
                listener.leaving_forward(unit, tensors)

    def have_left(self) -> None:
        (units, tensors), self._leaving = self._leaving, ((), ())
        # In reverse, so that each may take back what FSDP has put last into the prefetch order.
        for unit in reversed(units):
            for listener in unit.listeners:
                listener.left_forward(unit, tensors)
        tree = cast(Tree, self.tree)
        if tree.forward_root is self and self.state._state_ctx.iter_forward_root is None:
            tree.end()

    def _is_muted(self) -> bool:
        return self.mutes_forward_prefetch or any(
            listener.mutes_forward_prefetch for listener in self.listeners
        )

    def _completes(self, module: nn.Module) -> bool:
        """Whether FSDP's forward hook on ``module`` ends the forward of the whole unit."""
        if self.state._training_state == TrainingState.PRE_BACKWARD:
            return False
        return len(self._modules) == 1 or self.state._modules_to_run_forward == {module}


class Tree:
    """The units under one FSDP root, from its first forward on while anybody listens."""

    def __init__(self, state: FSDPState) -> None:
        self._context = state._state_ctx
        self.units = [unit_of(s) for s in self._context.all_states]
        self.listeners: list[Listener] = []
        self.forward_root: Unit | None = None
        self._expects_end = False
        self._root = self.units[0]._modules[0]
        for unit in self.units:
            unit.tree = self
            unit.hear_all()
        for unit in self.units:
            for listener in [*unit.listeners]:
                listener.join(self)
        self._call_around("finalize_backward", "before_finalization", "after_finalization")
        self._call_around("reset_iter_state", None, "reset")
        if (root := self._context.iter_forward_root) is not None:
            # The forward is under way: it went through units to which nobody listened.
            self.forward_root = unit_of(root)
            self._tell("begin_forward")

    def shared(self, kind: Callable[[Tree], _L]) -> _L:
        """The tree's one listener of this kind, made when it is first asked for."""
        found: _L | None = self.listener(kind)
        if found is None:
            found = kind(self)
            self.listeners.append(found)
        return found

    def listener(self, kind: Callable[[Tree], _L]) -> _L | None:
        return cast("_L | None", next((x for x in self.listeners if type(x) is kind), None))

    def incomplete(self) -> list[Unit]:
        """The other units whose forward FSDP completes at the end of the root's."""
        return [u for u in reversed(self.units) if u.state._modules_to_run_forward]

    def begin(self, root: Unit) -> bool:
        """The forward of ``root`` begins; returns whether anybody still listens."""
        everybody = [*self.listeners, *(x for unit in self.units for x in unit.listeners)]
        if not any(listener.is_in_use for listener in everybody):
            self._close()
            return False
        if self._expects_end and not self._context.post_backward_final_callback_queued:
            # A backward has failed, and another reset than this package's followed it.
            self._tell("reset")
        self.forward_root = root
        self._tell("begin_forward")
        return True

    def end(self) -> None:
        self.forward_root = None
        self._tell("end_forward")

    def expect_end(self, grad: torch.Tensor) -> None:
        """A tensor hook: be called at the end of this backward, before FSDP and after it."""
        if not self._expects_end:
            self._expects_end = True
            Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._expects_end = False
        self._tell("before_end")
        Variable._execution_engine.queue_callback(lambda: self._tell("after_end"))

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Around an end of the backward that is not autograd's."""
        self._tell("before_end")
        yield
        self._tell("after_end")

    def _tell(self, what: str) -> None:
        if what == "reset":
            self._expects_end, self.forward_root = False, None
            for unit in self.units:
                unit.restore()
        for listener in [*self.listeners]:
            getattr(listener, what)()

    def _call_around(self, name: str, before: str | None, after: str) -> None:
        """Hear when the root's method ``name`` is called, which no hook of torch tells."""
        method = getattr(self._root, name)

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                self._tell(before)
            result = method(*args, **kwargs)
            self._tell(after)
            return result

        # On the instance, so that closing the tree is a deletion.
        setattr(self._root, name, call)

    def _close(self) -> None:
        for name in ("finalize_backward", "reset_iter_state"):
            self._root.__dict__.pop(name, None)
        for unit in self.units:
            for listener in unit.listeners:
                listener.close()
            unit.close()


def unit_of(state: FSDPState) -> Unit:
    """The unit of ``state``, with its hooks; a new one if nobody listened so far."""
    unit = existing_unit(state)
    if unit is None:
        unit = Unit(state)
        setattr(state, _UNIT, unit)
    return unit


def existing_unit(state: FSDPState) -> Unit | None:
    return cast("Unit | None", state.__dict__.get(_UNIT))


def tree_of(state: FSDPState) -> Tree | None:
    """The tree of ``state``, if anybody listens to it."""
    unit = existing_unit(state)
    return None if unit is None else unit.tree


def end_backward(state: FSDPState) -> None:
    """Run FSDP's end of the backward of the tree of ``state``."""
    tree = tree_of(state)
    if tree is None:
        state._root_post_backward_final_callback()
        return
    with tree.ending():
        state._root_post_backward_final_callback()


def post_backward_node(group: FSDPParamGroup, inputs: Sequence[torch.Tensor]) -> Node | None:
    """FSDP's node on the inputs of a forward of ``group``; None if it has put none there."""
    node: Any = inputs[0].grad_fn if inputs else None
    # One node for each group of the unit, the last group's outermost. Each holds its group.
    while node is not None and (owner := getattr(node, "param_group", None)) is not None:
        if owner is group:
            return cast(Node, node)
        node = next((function for function, _ in node.next_functions if function), None)
    return None


def disable_forward_prefetch_in_backward(module: nn.Module) -> None:
    """Keep forwards that are recomputed in a backward from prefetching in forward order.

    With ``set_modules_to_forward_prefetch`` and checkpointing outside of the units, FSDP2 gathers
    units whose backward is already over. Recomputed weights stay gathered for their backward, and
    the next forward prefetches again. Applies to ``module`` and every FSDP module in it; nothing is
    done for a module without any.
    """
    for child in fsdp_modules([module]):
        unit_of(child._get_fsdp_state()).mutes_forward_prefetch = True


# The states whose hooks rest while a scope is open.
_resting: set[FSDPState] = set()


def is_resting(state: FSDPState) -> bool:
    return state in _resting


def rest(states: Iterable[FSDPState]) -> None:
    _resting.update(states)


def wake(states: Iterable[FSDPState]) -> None:
    _resting.difference_update(states)


def listeners_in_scope(states: Iterable[FSDPState]) -> list[tuple[Listener, Unit]]:
    """Who is to hear of a scope that is about to open on ``states``, each with its unit."""
    found: list[tuple[Listener, Unit]] = []
    for state in states:
        unit = existing_unit(state)
        if unit is None or not (unit.listeners or unit.tree):
            continue
        tree = unit.tree or Tree(state)
        if tree.units == [unit]:
            # A head that is a root of its own has no forward but those inside of scopes.
            if not tree.begin(unit):
                continue
            tree.end()
        found += [(listener, unit) for listener in unit.listeners]
    return found
