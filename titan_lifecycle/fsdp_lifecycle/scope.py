"""FSDP2 rests inside the scope of several forwards, each with a backward of its own.

[Note: Partial backwards and FSDP finalization]
FSDP2 mistakes the end of every autograd pass for the end of a backward: the pass's pre-backward
hook queues a final callback, which reshards and reduces every group under the root. A chunked loss
runs N *inner* backwards through the head alone, which stop at detached hidden states, then one
*outer* backward through the decoder. Inside a scope FSDP2 has nothing to do, so it rests:

1. On entry the units that own the module's parameters are gathered, and FSDP's own forward hooks
   on them are replaced in place by hooks that only cast. No inner pass gets a pre-backward hook, so
   none queues a callback: gradients accumulate on the unsharded parameters, in the reduce dtype.
2. Before the last inner forward the scope issues the one all-gather that the unit's pre-backward
   would have prefetched for the outer backward. It overlaps with the last chunk.
3. On exit each group has one post-backward: it reduces if this scope owns the reduction (the table
   in :func:`fsdp_partial_backwards`), and otherwise leaves the gradients pending for whoever does.
   Where no outer backward follows, FSDP's final callback runs instead, and ends the iteration.

A backward through another FSDP unit of the tree would start by asking the root whether its final
callback is queued. Inside the scope that question raises: see :class:`_RefusesBackward`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, get_args

import spmd_types as spmd
import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle

from titan_lifecycle.fsdp_lifecycle.listening import (
    end_backward,
    existing_unit,
    is_resting,
    listeners_in_scope,
    rest,
    wake,
)
from titan_lifecycle.fsdp_lifecycle.policy import GroupPolicy
from titan_lifecycle.fsdp_lifecycle.private import (
    DDPMeshInfo,
    FSDPParamGroup,
    FSDPState,
    TrainingState,
    forward_hook_id,
    fsdp_modules,
    is_bw,
    is_manually_finalized,
    module_name,
    module_state_mapping,
    modules_of,
    pending_groups,
    spmd_no_typecheck,
    trainable_parameters,
)

__all__ = [
    "PartialBackwardHooks",
    "Reduction",
    "complete_fsdp_grouped_forward",
    "fsdp_partial_backwards",
]

Reduction = Literal["compatible", "coalesced"]
"""Who reduces the head when an outer backward follows and nothing is pending."""

_Output = TypeVar("_Output")


class PartialBackwardHooks:
    """What :func:`fsdp_partial_backwards` yields. This base class does nothing.

    A module that is not FSDP gets the base class, so that callers need no branch on FSDP.
    """

    def before_last_forward(self) -> None:
        """Call right before the last inner forward of the scope, once."""

    def after_forward(self, output: _Output) -> _Output:
        """Call with each inner forward's output and use what it returns.

        Args:
            output: A tensor, or a tuple of tensors. Several forwards that share one backward may
                be passed together, as one tuple, or one by one.
        """
        return output


class _RefusesBackward:
    """Stands for the root's "is a final callback queued?" while a scope is open.

    FSDP's pre-backward asks that first, on every unit of the tree. The hooks of the scope's own
    units rest, so only a backward that does not belong into the scope ever asks.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __bool__(self) -> bool:
        raise RuntimeError(
            f"a backward through other FSDP units was started inside the fsdp_partial_backwards "
            f"scope of '{self._name}', whose gradients it would lose. An inner backward stops at "
            "inputs that are detached; run the outer backward after the `with` block. Then call "
            "reset_iteration(root) before the next step"
        )


@dataclass(frozen=True, slots=True)
class _Unit:
    """What owns a module's parameters, looked up once a module.

    Everything of FSDP's is held weakly: the module is the key under which this is kept.
    """

    name: str
    states: tuple[weakref.ref[FSDPState], ...]
    # One module of each state, as a target of public calls.
    modules: tuple[weakref.ref[nn.Module], ...]
    # Whether the root is the module itself or in it: no outer backward comes through that root,
    # as what comes before the module is not FSDP, or has another root.
    contains_root: bool
    # FSDP's own forward hooks on the unit: where each is, its id, and what stands for it at rest.
    forward_hooks: tuple[tuple[weakref.ref[dict[int, Any]], int, Callable[..., Any]], ...]
    # The same (before forward, after forward) of states whose hooks are on a module that contains
    # this one, which then goes without any.
    hooks_outside: tuple[tuple[Callable[..., Any], Callable[..., Any]], ...]
    # Whether gradients may accumulate in a wider dtype than the one they are computed in.
    widens_gradients: bool

    @classmethod
    def of(cls, module: nn.Module, managed: list[FSDPModule]) -> _Unit:
        """The unit of ``module``, which consists of the states of ``managed``."""
        inside = set(module.modules())
        modules: dict[FSDPState, list[FSDPModule]] = {}
        for m in managed:
            modules[m._get_fsdp_state()] = modules_of(m._get_fsdp_state())
        forward_hooks, hooks_outside = [], []
        for state, of_state in modules.items():
            casts = _casting_hooks(state)
            for m in cast(list[Any], of_state):
                for hooks, cast_hook in zip(
                    (m._forward_pre_hooks, m._forward_hooks), casts, strict=True
                ):
                    hook_id = forward_hook_id(hooks, state)
                    forward_hooks.append((weakref.ref(hooks), hook_id, cast_hook))
            if inside.isdisjoint(cast(list[nn.Module], of_state)):
                hooks_outside.append(casts)
        states = list(modules)
        groups = [group for state in states for group in state._fsdp_param_groups]
        root = states[0]._state_ctx.all_states[0]
        return cls(
            module_name(managed[0]),
            tuple(weakref.ref(state) for state in states),
            tuple(weakref.ref(cast(nn.Module, of_state[0])) for of_state in modules.values()),
            any(cast(nn.Module, m) in inside for m in modules.get(root, ())),
            tuple(forward_hooks),
            tuple(hooks_outside),
            any(
                param.mp_policy.param_dtype or param.mp_policy.reduce_dtype
                for group in groups
                for param in group.fsdp_params
            ),
        )


def _casting_hooks(state: FSDPState) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The parts of FSDP's hooks before and after a forward that cast inputs and outputs."""
    this = weakref.proxy(state)

    def cast_inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return this._cast_forward_inputs(args, kwargs)

    def cast_output(module: nn.Module, args: Any, output: Any) -> Any:
        return this._cast_output_dtype(output)

    return cast_inputs, cast_output


class _RestingHooks:
    """FSDP's own forward hooks on a unit, out of use until :meth:`wake`.

    Each is replaced in place by one that only casts, as the unit's mixed-precision policy says.
    All other hooks keep their place, also those that are registered or removed meanwhile.
    """

    def __init__(self, module: nn.Module, unit: _Unit) -> None:
        self._replaced: list[tuple[dict[int, Any], int, Any, Any]] = []
        for hooks_ref, hook_id, resting in unit.forward_hooks:
            hooks = hooks_ref()
            if hooks is not None and hook_id in hooks:
                self._replaced.append((hooks, hook_id, hooks[hook_id], resting))
                hooks[hook_id] = resting
        self._added: list[RemovableHandle] = []
        for cast_inputs, cast_output in unit.hooks_outside:
            self._added += [
                module.register_forward_pre_hook(cast_inputs, prepend=True, with_kwargs=True),
                module.register_forward_hook(cast_output),
            ]

    def wake(self) -> None:
        for hooks, hook_id, original, resting in self._replaced:
            if hooks.get(hook_id) is resting:
                hooks[hook_id] = original
        for handle in self._added:
            handle.remove()


class _Scope(PartialBackwardHooks):
    """An open scope of an FSDP module; see [Note: Partial backwards and FSDP finalization]."""

    def __init__(
        self,
        module: nn.Module,
        unit: _Unit,
        states: list[FSDPState],
        *,
        run_backward: bool,
        outer_backward_follows: bool,
        reduction: Reduction,
    ) -> None:
        self._name = unit.name
        self._modules = [cast(FSDPModule, module()) for module in unit.modules]
        self._states = states
        self._groups = [group for state in states for group in state._fsdp_param_groups]
        self._context = context = states[0]._state_ctx
        self._listeners = listeners_in_scope(states)
        # Groups whose next inner backward may create gradients; later ones add to them.
        self._without_gradients = self._groups if unit.widens_gradients else []
        self._run_backward = run_backward
        self._policies = [(group, GroupPolicy.capture(group)) for group in self._groups]
        self._is_manually_finalized = is_manually_finalized(context)
        # Within the outer backward, or a scope on another unit: its end reduces what this scope
        # leaves pending.
        self._is_enclosed = context.post_backward_final_callback_queued is not False
        self._outer_backward_follows = outer_backward_follows and not unit.contains_root
        # Decided by flags, not by gradients, so that every rank decides alike.
        self._reduces = (
            not self._is_enclosed
            and not self._is_manually_finalized
            and (
                not self._outer_backward_follows
                or (
                    reduction == "compatible"
                    and all(policy.reduce_grads for _, policy in self._policies)
                    and not pending_groups(self._groups)
                )
            )
        )
        self._is_open = False
        self._last_forward_announced = False
        self._last_forward_done = False
        self._enter(module, unit)

    # The protocol #

    def before_last_forward(self) -> None:
        self._check_open("before_last_forward()")
        if self._last_forward_announced:
            raise RuntimeError(
                f"before_last_forward() was called twice in the fsdp_partial_backwards scope of "
                f"'{self._name}'; call it once, right before the last inner forward"
            )
        self._last_forward_announced = True
        if self._run_backward and self._outer_backward_follows and not self._is_enclosed:
            self._prefetch_for_outer_backward()

    def after_forward(self, output: _Output) -> _Output:
        self._check_open("after_forward()")
        self._last_forward_done = self._last_forward_announced
        if not self._run_backward:
            return output
        for listener, heard in self._listeners:
            listener.begin_scope_backward(heard)
        if self._without_gradients:
            self._without_gradients = [
                g for g in self._without_gradients if not _accumulates_in_place(g)
            ]
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(self._check_backward_inside_scope)
        return output

    def _check_open(self, what: str) -> None:
        if not self._is_open:
            raise RuntimeError(
                f"{what} was called after the fsdp_partial_backwards scope of '{self._name}' was "
                "left; call it inside the `with` block"
            )

    def _check_backward_inside_scope(self, grad: torch.Tensor) -> None:
        if not self._is_open:
            raise RuntimeError(
                f"backward of an output of '{self._name}' after its fsdp_partial_backwards scope "
                "was left, when its weights may be resharded; run each inner backward inside the "
                "`with` block, or run that forward outside of it"
            )

    # Entry #

    def _enter(self, module: nn.Module, unit: _Unit) -> None:
        if not all(group.is_unsharded for group in self._groups):
            with record_function(f"lifecycle::unshard ({self._name})"), spmd_no_typecheck():
                for fsdp_module in self._modules:
                    fsdp_module.unshard()
        for listener, heard in self._listeners:
            listener.enter_scope(heard)
        if spmd.is_type_checking():
            # There is nothing left to gather: it restores types.
            for group in self._groups:
                before = group._training_state
                group.pre_forward(module, (), {})
                group._training_state = before
        self._resting = _RestingHooks(module, unit)
        self._refusal = _RefusesBackward(self._name)
        if not self._is_enclosed:
            cast(Any, self._context).post_backward_final_callback_queued = self._refusal
        rest(self._states)
        self._is_open = True

    def _prefetch_for_outer_backward(self) -> None:
        """Issue what the units' pre-backward would have, a chunk before it is needed."""
        explicit = self._states[0]._states_to_backward_prefetch
        groups = [group for state in reversed(explicit) for group in state._fsdp_param_groups[:1]]
        if not explicit and self._groups:
            order = self._groups[0].comm_ctx.post_forward_order
            # A unit that also ran in the decoder's forward, for its norm, is the last in the order.
            # Its own pre-backward prefetches, in the outer backward.
            groups = [group for group in order[-1:] if group not in self._groups]
        for group in groups:
            cast(FSDPModule, group.modules[0]).unshard(async_op=True)  # its whole state

    # Exit #

    def complete(self) -> None:
        """End the scope where nothing has failed."""
        self._check_complete()
        self.close()
        if not self._run_backward:
            return
        if self._reduces and not self._outer_backward_follows:
            with record_function(f"lifecycle::finalize ({self._name})"):
                self._context.manual_backward_finalization_active = False
                end_backward(self._states[0])
        else:
            self._post_backward()

    def close(self) -> None:
        """Give everything back, also after an exception."""
        if not self._is_open:
            return
        self._is_open = False
        self._resting.wake()
        if cast(Any, self._context).post_backward_final_callback_queued is self._refusal:
            self._context.post_backward_final_callback_queued = False
        wake(self._states)
        for group, policy in self._policies:
            policy.restore(group)
        for listener, heard in self._listeners:
            listener.leave_scope(heard)
        if not self._run_backward:
            with record_function(f"lifecycle::reshard ({self._name})"), spmd_no_typecheck():
                for group in self._groups:
                    # A backward under way still reads the weights of a unit that it has begun.
                    if group._training_state != TrainingState.PRE_BACKWARD:
                        group.reshard()

    def _check_complete(self) -> None:
        if not self._last_forward_done:
            what = (
                "before_last_forward() was called, but no forward followed it with after_forward()"
                if self._last_forward_announced
                else "before_last_forward() was never called"
            )
            raise RuntimeError(
                f"{what} in the fsdp_partial_backwards scope of '{self._name}'; call "
                "before_last_forward() right before the last inner forward and pass every "
                "forward's output through after_forward()"
            )

    def _post_backward(self) -> None:
        """One post-backward a group: reduced here, or left pending for whoever owns it."""
        with record_function(f"lifecycle::finalize ({self._name})"):
            for group, policy in reversed(self._policies):
                backward_has_begun = group._training_state == TrainingState.PRE_BACKWARD
                group.reduce_grads = policy.reduce_grads and self._reduces
                # The schedule releases the weights under manual finalization, and a unit's own
                # backward those of a unit that it has begun.
                group.reshard_after_backward = policy.reshard_after_backward and not (
                    self._is_manually_finalized or backward_has_begun
                )
                try:
                    group.post_backward()
                finally:
                    policy.restore(group)
                # Or the end of the outer backward would find this group's post-backward done.
                group._training_state = (
                    TrainingState.PRE_BACKWARD if backward_has_begun else TrainingState.IDLE
                )


@contextmanager
def fsdp_partial_backwards(
    module: nn.Module,
    *,
    run_backward: bool = True,
    outer_backward_follows: bool = True,
    reduction: Reduction = "compatible",
) -> Iterator[PartialBackwardHooks]:
    """Scope several forwards of ``module``, each followed by its own backward, as one FSDP unit.

    Flow:

    1. On entry the group(s) that own ``module``'s parameters are gathered, once, and FSDP's hooks
       on them rest: the group of ``module`` itself, of a module that contains it, or of the root.
    2. Each inner forward's output goes through ``hooks.after_forward``; each inner backward stops
       at detached inputs and touches no other group: weights prefetched for the outer backward
       stay gathered, pending gradients stay pending, the prefetch order is kept. A use of the
       weights that is not a forward of ``module`` counts as any other.
    3. On exit every policy is what it was on entry, also after an exception, and the group is
       reduced by whoever owns its reduction:

    ======================================================== ======================= ==========
    situation                                                reduced by              reductions
    ======================================================== ======================= ==========
    manual finalization (a pipeline owns the step)           the schedule            1 a step
    the caller's sync is off                                 nobody yet              0
    no outer backward follows                                this scope              1
    sync on, earlier microbatches' gradients pending         the outer backward      1
    sync on, nothing pending, ``reduction="compatible"``     this scope, then outer  2
    sync on, nothing pending, ``reduction="coalesced"``      the outer backward      1
    the outer backward is under way                          the outer backward      1
    a scope on another unit of the root encloses this one    as the enclosing one    1
    ``run_backward=False``                                   nobody                  0
    ======================================================== ======================= ==========

    Gathered weights are released at the exit if ``reshard_after_backward`` says so, and after an
    evaluation always. Under manual finalization the schedule releases them.

    The outer backward belongs after the ``with`` block. Started inside, it raises.

    Composition:

    - FSDP2: single-module groups, grouped ``fully_shard([norm, lm_head])``, tied
      ``[tok_embeddings, norm, lm_head]``, a head that the root or another unit owns, several groups
      in one state (a mesh per parameter). Other forward hooks of the module run as before.
    - HSDP: the replica all-reduce follows its own flag throughout. Partial sums that wait for it
      count as pending gradients.
    - ``replicate()``: as FSDP, with an all-reduce in place of the reduce-scatter.
    - Mixed precision: inputs and outputs of ``module`` are cast as its unit's policy says, and
      gradients accumulate in the reduce dtype.
    - Pipelines: see the first row; valid from the first microbatch on.
    - Evaluation: ``run_backward=False``; no marker is left for the next forward.
    - Lifecycle callbacks see a scope as one invocation of its unit.

    Args:
        module: The module that runs several times, for example ``lm_head``. If FSDP owns none of
            its parameters, nothing is done and the hooks do nothing.
        run_backward: Whether inner backwards run. ``False`` for an evaluation.
        outer_backward_follows: Whether another backward through the root comes after the scope
            and owns finalization. ``False`` when all that feeds ``module`` is frozen.
        reduction: ``"compatible"`` reduces in the scope, as torchtitan's wrapper does, bit for
            bit; ``"coalesced"`` leaves it to the outer backward, one reduction for the group.

    Raises:
        ValueError: ``reduction`` is neither of the two.
        RuntimeError: No forward has run through the FSDP root yet; a scope on this module's group
            is already open; the group's forward is under way, or an earlier step failed and was not
            reset; under manual finalization only HSDP's all-reduce is deferred;
            ``before_last_forward()`` was called twice or, on a normal exit, never; the outer
            backward was started inside; a backward of an inner output after the exit.
    """
    if reduction not in get_args(Reduction):
        raise ValueError(
            f"reduction must be one of {', '.join(map(repr, get_args(Reduction)))}, "
            f"got {reduction!r}"
        )
    unit = _unit_of(module)
    if unit is None:
        yield PartialBackwardHooks()
        return
    states = [cast(FSDPState, state()) for state in unit.states]
    _check_can_enter(unit.name, states, run_backward=run_backward)
    scope = _Scope(
        module,
        unit,
        states,
        run_backward=run_backward,
        outer_backward_follows=outer_backward_follows,
        reduction=reduction,
    )
    try:
        yield scope
        scope.complete()
    finally:
        scope.close()


_units: weakref.WeakKeyDictionary[nn.Module, _Unit] = weakref.WeakKeyDictionary()
# Modules without, by the number of modules that FSDP and its like managed when that was found.
_without_unit: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def _unit_of(module: nn.Module) -> _Unit | None:
    """What owns parameters of ``module``, with the FSDP units in it; None if FSDP has no part."""
    if (unit := _units.get(module)) is None:
        if _without_unit.get(module) == len(module_state_mapping):
            return None
        managed = [*fsdp_modules([module])]
        around = _fsdp_modules_around(module)
        if around and not all(_covers(managed, p) for p in module.parameters()):
            # The closest one owns what no unit in the module does, together with its group.
            owner = min(around, key=lambda m: sum(1 for _ in cast(nn.Module, m).modules()))
            managed.append(owner)
        if not managed:
            _without_unit[module] = len(module_state_mapping)
            return None
        _initialize(module, managed, around)
        unit = _units[module] = _Unit.of(module, managed)
    return unit


def _fsdp_modules_around(module: nn.Module) -> list[FSDPModule]:
    """The FSDP modules that contain ``module``, wherever they are."""
    inside = set(module.modules())
    return [
        m
        for m in [*module_state_mapping]
        if isinstance(m, FSDPModule) and m not in inside and any(x is module for x in m.modules())
    ]


def _covers(managed: list[FSDPModule], parameter: nn.Parameter) -> bool:
    """Whether one of ``managed`` has ``parameter`` among its own."""
    return any(parameter is p for m in managed for p in cast(nn.Module, m).parameters())


def _initialize(module: nn.Module, managed: list[FSDPModule], around: list[FSDPModule]) -> None:
    """Initialize FSDP as the root's first forward would, where ``module`` is its own root."""
    # A state has an empty context of its own until its root is initialized.
    if all(m._get_fsdp_state()._state_ctx.all_states for m in managed):
        return
    if isinstance(module, FSDPModule) and not around:
        root = module._get_fsdp_state()
        root._lazy_init()
        return
    raise RuntimeError(
        f"fsdp_partial_backwards on '{module_name(managed[0])}' before any forward of its FSDP "
        "root: the root's first forward initializes FSDP; run the model before the scope"
    )


def _check_can_enter(name: str, states: list[FSDPState], *, run_backward: bool) -> None:
    context = states[0]._state_ctx
    if any(state._state_ctx is not context for state in states):
        raise RuntimeError(
            f"fsdp_partial_backwards on a module whose parameters belong to several FSDP roots, "
            f"'{name}' among them: open a scope on each root's part"
        )
    if any(is_resting(state) for state in states):
        raise RuntimeError(
            f"nested fsdp_partial_backwards scopes on the FSDP group of '{name}': leave the outer "
            "scope first, or run all passes in it"
        )
    if any(s._modules_to_run_forward or s._training_state == TrainingState.FORWARD for s in states):
        raise RuntimeError(
            f"fsdp_partial_backwards on '{name}' while the forward of its FSDP group is under way: "
            "call the loss after the model's forward has returned, not inside of it. If an earlier "
            "step failed in its forward, call reset_iteration(root) before the next one"
        )
    if context.post_backward_final_callback_queued is True and not is_bw():
        raise RuntimeError(
            f"fsdp_partial_backwards on '{name}' after a backward that failed before its end; call "
            "reset_iteration(root) before the next step"
        )
    if run_backward and is_manually_finalized(context):
        groups = [group for state in states for group in state._fsdp_param_groups]
        _check_no_partial_reduction(groups, name)


def _accumulates_in_place(group: FSDPParamGroup) -> bool:
    """Let backwards add to gradients in the reduce dtype in place, once these are there.

    Until then autograd casts what it accumulates. FSDP's post-backward undoes this.
    """
    there = all(parameter.grad is not None for parameter in trainable_parameters(group))
    if there:
        group._set_unsharded_grad_dtypes(defer_upcast=True)
    return there


def complete_fsdp_grouped_forward(module: nn.Module, output: _Output) -> _Output:
    """Complete the forward of ``module``'s group with the output of ``module`` alone.

    A group of several modules, ``fully_shard([norm, lm_head])``, runs its post-forward when the
    last member has run. Where only one member runs (a chunk of ``lm_head``), this runs it: the
    weights are released by the group's policy, a pre-backward hook is put on ``output``, and no
    marker is left for the next forward. Nothing is done for a module that is not FSDP, for a group
    of one, and for a group whose forward is complete. Waits for pytorch/pytorch#203176.

    Args:
        module: The member that ran.
        output: Its output, a tensor or a tuple of tensors (several calls completed together).

    Returns:
        The output to use in place of ``output``.
    """
    if not isinstance(module, FSDPModule):
        return output
    state = module._get_fsdp_state()
    if not state._modules_to_run_forward:
        return output
    state._modules_to_run_forward.clear()
    with record_function(f"lifecycle::complete_grouped_forward ({module_name(module)})"):
        unit = existing_unit(state)
        if unit is not None and unit.tree is not None:
            unit.leave(output)
        completed: _Output = state._post_forward(module, (), output)
        if unit is not None and unit.tree is not None:
            unit.have_left()
    return completed


def _check_no_partial_reduction(groups: list[FSDPParamGroup], name: str) -> None:
    if any(
        group._partial_reduce_output is not None
        or (
            group.reduce_grads
            and not group.all_reduce_grads
            and isinstance(group.mesh_info, DDPMeshInfo)
        )
        for group in groups
    ):
        raise RuntimeError(
            f"HSDP with only the all-reduce deferred, set for '{name}', does not work under manual "
            "finalization: a pipeline reduces and all-reduces together. Call "
            "set_requires_all_reduce(True), and defer both over several schedule steps with "
            "finalize_gradients=False"
        )
