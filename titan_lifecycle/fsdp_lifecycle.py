"""FSDP2's lifecycle around partial backwards: the only module that touches private FSDP2 state.

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

[Note: Observed trees]
What ``invocations`` knows of a tree, it is told: :func:`observe` replaces FSDP2's classes on the
instances, by subclasses that report to a :class:`GroupObserver` and a :class:`TreeObserver` and ask
them. Once neither is in use the next forward gives torch's classes back, so that a tree without
observers runs torch's code alone. No upstream change is known that would replace this part.

The upstream changes that would replace this module are pytorch/pytorch#203176 (scoped partial
backwards, completion of repeated grouped forwards), #203177 (policy snapshot and restore by
value) and #203178 (FSDP reset after pipeline metadata inference).
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, get_args

import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle


def unsupported_torch(what: str, part: str = "FSDP2") -> str:
    """The message for a torch whose private contract is not the one relied upon."""
    return (
        f"titan_lifecycle does not know the {part} of torch {torch.__version__}: {what}. Supported "
        "are torch 2.15 and 2.16; install one of them, or a titan_lifecycle release that supports "
        "this torch."
    )


try:
    from torch.distributed import _spmd_no_typecheck
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp._common_utils import collect_grad_tensors
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        DDPMeshInfo,
        FSDPMeshInfo,
        TrainingState,
        is_bw,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, FSDPStateContext
except ImportError as error:
    raise ImportError(unsupported_torch(str(error))) from error

__all__ = [
    "PartialBackwardHooks",
    "Reduction",
    "complete_fsdp_grouped_forward",
    "disable_forward_prefetch_in_backward",
    "fsdp_partial_backwards",
]

Reduction = Literal["compatible", "coalesced"]
"""Who reduces the head when an outer backward follows and nothing is pending."""

_Output = TypeVar("_Output")

# Every private name this module relies on, and no other. ``FSDPModule``'s own methods are public.
_PRIVATE_NAMES: dict[type, tuple[str, ...]] = {
    FSDPModule: ("_get_fsdp_state",),
    FSDPState: (
        "_auto_reshard_after_forward",
        "_cast_forward_inputs",
        "_cast_output_dtype",
        "_force_complete_incomplete_states",
        "_fsdp_param_groups",
        "_modules_to_run_forward",
        "_post_forward",
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
    FSDPStateContext: (
        "all_states",
        "iter_forward_root",
        "manual_backward_finalization",
        "manual_backward_finalization_active",
        "post_backward_final_callback_queued",
    ),
    FSDPParamGroup: (
        "_backward_prefetch",
        "_module_fqn",
        "_partial_reduce_output",
        "_post_backward_pending",
        "_post_forward_indices",
        "_record_post_forward",
        "_register_post_backward_hook",
        "_set_unsharded_grad_dtypes",
        "_training_state",
        "all_reduce_grads",
        "comm_ctx",
        "fsdp_params",
        "is_unsharded",
        "mesh_info",
        "modules",
        "post_backward",
        "post_forward_mesh_info",
        "pre_forward",
        "reduce_grads",
        "reshard",
        "reshard_after_backward",
        "wait_for_unshard",
    ),
    FSDPParam: ("_orig_size", "_unsharded_param", "mp_policy", "sharded_param"),
}


def missing_private_names() -> list[str]:
    """Private FSDP2 names this module relies on and the installed torch lacks."""
    return missing_names(_PRIVATE_NAMES)


def missing_names(required: Mapping[Any, tuple[str, ...]]) -> list[str]:
    """The names in ``required`` that their class or module lacks, as ``Class.name``.

    An instance attribute counts as present when the class annotates it or assigns it in
    ``__init__``.
    """
    missing = []
    for cls, names in required.items():
        code = getattr(getattr(cls, "__init__", None), "__code__", None)
        known = {
            *dir(cls),
            *cls.__dict__.get("__annotations__", ()),
            *(code.co_names if code else ()),
        }
        missing += [f"{cls.__name__}.{name}" for name in names if name not in known]
    return missing


def _check_private_contract() -> None:
    if missing := missing_private_names():
        raise ImportError(unsupported_torch(f"it lacks {', '.join(missing)}"))


_check_private_contract()


@dataclass(frozen=True, slots=True)
class GroupPolicy:
    """One group's communication policy, captured and restored by value.

    torch's setters cannot restore: ``set_requires_gradient_sync`` overwrites the separate
    all-reduce flag of HSDP, and ``set_reshard_after_forward`` takes only a bool and ends the
    "not set by the user" policy for good. Waits for pytorch/pytorch#203177.
    """

    reduce_grads: bool
    all_reduce_grads: bool
    reshard_after_backward: bool
    # ``None`` keeps the weights after forward; the group's own mesh frees them; another mesh
    # reshards to that size (an integer ``reshard_after_forward``).
    post_forward_mesh_info: Any

    @classmethod
    def capture(cls, group: FSDPParamGroup) -> GroupPolicy:
        return cls(
            group.reduce_grads,
            group.all_reduce_grads,
            group.reshard_after_backward,
            group.post_forward_mesh_info,
        )

    def restore(self, group: FSDPParamGroup) -> None:
        group.reduce_grads = self.reduce_grads
        group.all_reduce_grads = self.all_reduce_grads
        group.reshard_after_backward = self.reshard_after_backward
        group.post_forward_mesh_info = self.post_forward_mesh_info


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
            modules[m._get_fsdp_state()] = _modules_of(m._get_fsdp_state())
        forward_hooks, hooks_outside = [], []
        for state, of_state in modules.items():
            casts = _casting_hooks(state)
            for m in cast(list[Any], of_state):
                for hooks, cast_hook in zip(
                    (m._forward_pre_hooks, m._forward_hooks), casts, strict=True
                ):
                    hook_id = next((i for i, h in hooks.items() if _is_hook_of(h, state)), None)
                    if hook_id is None:
                        raise RuntimeError(
                            unsupported_torch(f"{type(m).__name__} has no forward hooks of FSDP")
                        )
                    forward_hooks.append((weakref.ref(hooks), hook_id, cast_hook))
            if inside.isdisjoint(cast(list[nn.Module], of_state)):
                hooks_outside.append(casts)
        states = list(modules)
        groups = [group for state in states for group in state._fsdp_param_groups]
        root = states[0]._state_ctx.all_states[0]
        return cls(
            _module_name(managed[0]),
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


def _is_hook_of(hook: Any, state: FSDPState) -> bool:
    """Whether a forward hook is a method of ``state``, or a function that wraps one."""
    while hook is not None and getattr(hook, "__self__", None) is not state:
        hook = getattr(hook, "__wrapped__", None)
    return hook is not None


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
        self._observers = [o for g in self._groups if (o := group_observer(g)) is not None]
        # Groups whose next inner backward may create gradients; later ones add to them.
        self._without_gradients = self._groups if unit.widens_gradients else []
        self._run_backward = run_backward
        self._policies = [(group, GroupPolicy.capture(group)) for group in self._groups]
        self._is_manually_finalized = _is_manually_finalized(context)
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
                    and not _pending(self._groups)
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
        for observer in self._observers:
            observer.begin_scope_backward()
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
            with record_function(f"lifecycle::unshard ({self._name})"), _spmd_no_typecheck():
                for fsdp_module in self._modules:
                    fsdp_module.unshard()
        for observer in self._observers:
            observer.enter_scope()
        if self._observers or spmd.is_type_checking():
            # There is nothing left to gather: it restores types and tells observers.
            for group in self._groups:
                before = group._training_state
                group.pre_forward(module, (), {})
                group._training_state = before
        self._resting = _RestingHooks(module, unit)
        self._refusal = _RefusesBackward(self._name)
        if not self._is_enclosed:
            cast(Any, self._context).post_backward_final_callback_queued = self._refusal
        _states_in_scope.update(self._states)
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
                self._states[0]._root_post_backward_final_callback()
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
        _states_in_scope.difference_update(self._states)
        for group, policy in self._policies:
            policy.restore(group)
        for observer in self._observers:
            observer.leave_scope()
        if not self._run_backward:
            with record_function(f"lifecycle::reshard ({self._name})"), _spmd_no_typecheck():
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


_states_in_scope: weakref.WeakSet[FSDPState] = weakref.WeakSet()


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
        if _without_unit.get(module) == len(_module_state_mapping):
            return None
        managed = [*_fsdp_modules([module])]
        around = _fsdp_modules_around(module)
        if around and not all(_covers(managed, p) for p in module.parameters()):
            # The closest one owns what no unit in the module does, together with its group.
            owner = min(around, key=lambda m: sum(1 for _ in cast(nn.Module, m).modules()))
            managed.append(owner)
        if not managed:
            _without_unit[module] = len(_module_state_mapping)
            return None
        _initialize(module, managed, around)
        unit = _units[module] = _Unit.of(module, managed)
    return unit


def _fsdp_modules_around(module: nn.Module) -> list[FSDPModule]:
    """The FSDP modules that contain ``module``, wherever they are."""
    inside = set(module.modules())
    return [
        m
        for m in [*_module_state_mapping]
        if isinstance(m, FSDPModule) and m not in inside and any(x is module for x in m.modules())
    ]


def _modules_of(state: FSDPState) -> list[FSDPModule]:
    """The modules that share ``state``, in the order in which FSDP got them."""
    return [
        m
        for m in [*_module_state_mapping]
        if isinstance(m, FSDPModule) and m._get_fsdp_state() is state
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
        root._root_pre_forward(module, (), {})
        root._state_ctx.iter_forward_root = None
        return
    raise RuntimeError(
        f"fsdp_partial_backwards on '{_module_name(managed[0])}' before any forward of its FSDP "
        "root: the root's first forward initializes FSDP; run the model before the scope"
    )


def _check_can_enter(name: str, states: list[FSDPState], *, run_backward: bool) -> None:
    context = states[0]._state_ctx
    if any(state._state_ctx is not context for state in states):
        raise RuntimeError(
            f"fsdp_partial_backwards on a module whose parameters belong to several FSDP roots, "
            f"'{name}' among them: open a scope on each root's part"
        )
    if any(state in _states_in_scope for state in states):
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
    if run_backward and _is_manually_finalized(context):
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
    with record_function(f"lifecycle::complete_grouped_forward ({_module_name(module)})"):
        completed: _Output = state._post_forward(module, (), output)
    return completed


def reset_root(module: nn.Module) -> None:
    """Bring an FSDP root back to the start of an iteration; see ``pipeline.reset_iteration``.

    Nothing is done for a module that is not FSDP, or has never run.

    Raises:
        RuntimeError: ``module`` is an FSDP module but not the root.
    """
    # torch's reset needs what the root's first forward sets up.
    if not isinstance(module, FSDPModule) or not module._get_fsdp_state()._state_ctx.all_states:
        return
    module.reset_iter_state()
    module.set_manual_backward_finalization(False)


class ProbeGuard:
    """Keeps the initialization of a pipeline stage from changing FSDP's state.

    torch clears ``param.grad`` when it is done, also that of a finished step. With dynamic shapes
    it also runs a probe, a real forward and backward: created before it, this lets no group reduce,
    and :meth:`restore` after it, also when it failed, drops the iteration state it left, unsharded
    gradients among it. Waits for pytorch/pytorch#203178.
    """

    def __init__(self, root: nn.Module, *, runs_probe: bool) -> None:
        self._root = root
        self._runs_probe = runs_probe
        groups = _all_groups([root])
        # While a group is gathered, the module holds its unsharded parameters and not the sharded
        # ones, which own the reduced gradients.
        sharded = [p.sharded_param for group in groups for p in group.fsdp_params]
        self._gradients = [(p, p.grad) for p in {*sharded, *root.parameters()}]
        # Not the whole policy: the root's first forward may be the probe's, and it settles whether
        # the root reshards.
        self._reduces = [(group, group.reduce_grads) for group in groups]
        if runs_probe:
            for parameter, _ in self._gradients:
                parameter.grad = None
            for group, _ in self._reduces:
                group.reduce_grads = False

    def restore(self) -> None:
        try:
            if self._runs_probe:
                reset_root(self._root)
        finally:
            for group, reduces in self._reduces:
                group.reduce_grads = reduces
            for parameter, gradient in self._gradients:
                parameter.grad = gradient


@contextmanager
def preserved_policies(models: Iterable[nn.Module]) -> Iterator[None]:
    """Restore every FSDP group's policy on leaving, by value, whatever the block sets.

    Reduction, all-reduce, reshard after forward (also to a mesh, also "not set by the user") and
    after backward. Waits for pytorch/pytorch#203177.
    """
    policies = [(group, GroupPolicy.capture(group)) for group in _all_groups(models)]
    states = {module._get_fsdp_state() for module in _fsdp_modules(models)}
    automatic = [(state, state._auto_reshard_after_forward) for state in states]
    try:
        yield
    finally:
        for group, policy in policies:
            policy.restore(group)
        for state, value in automatic:
            state._auto_reshard_after_forward = value
            if value and state._state_ctx.all_states[:1] == [state]:
                # Its first forward, which may have been in the block, made it keep its weights.
                for group in state._fsdp_param_groups:
                    group.post_forward_mesh_info = None


def groups_with_pending_gradients(root: nn.Module) -> list[str]:
    """FQNs of the groups whose gradients wait for a reduction, unsharded or as partial sums."""
    return [group_fqn(group) for group in _pending(_all_groups([root]))]


def fsdp_process_groups(models: Iterable[nn.Module]) -> list[dist.ProcessGroup]:
    """The distinct process groups over which the FSDP groups in ``models`` communicate."""
    found: list[dist.ProcessGroup | None] = []
    for group in _all_groups(models):
        mesh_info = group.mesh_info
        if isinstance(mesh_info, FSDPMeshInfo):
            found += [mesh_info.shard_process_group, mesh_info.reduce_scatter_process_group]
        if isinstance(mesh_info, DDPMeshInfo):
            found.append(mesh_info.replicate_process_group)
    return list({id(pg): pg for pg in found if pg is not None}.values())


def unsharded_gradient_bytes(models: Iterable[nn.Module]) -> dict[str, int]:
    """Bytes of each FSDP group's unsharded gradients on this rank, by the group's first parameter.

    What deferring the reduction keeps alive between microbatches: every trainable parameter whole,
    in the dtype it is reduced in. Works before the first forward, also on the meta device.
    """
    sizes: dict[str, int] = {}
    for model in models:
        names = {param: name for name, param in model.named_parameters()}
        for group in _all_groups([model]):
            trainable = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
            if trainable:
                sizes[names[trainable[0].sharded_param]] = sum(
                    math.prod(p._orig_size)
                    * (p.mp_policy.reduce_dtype or p.sharded_param.dtype).itemsize
                    for p in trainable
                )
    return sizes


def disable_forward_prefetch_in_backward(module: nn.Module) -> None:
    """Keep forwards that are recomputed in a backward from prefetching in forward order.

    With ``set_modules_to_forward_prefetch`` and checkpointing outside of the units, FSDP2 gathers
    units whose backward is already over. Recomputed weights stay gathered for their backward, and
    the next forward prefetches again. Applies to ``module`` and every FSDP module in it; nothing is
    done for a module without any.
    """
    for child in _fsdp_modules([module]):
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
    states = dict.fromkeys(m._get_fsdp_state() for m in _fsdp_modules([cast(nn.Module, module)]))
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
    return _is_manually_finalized(cast(_ObservedGroup, group).state._state_ctx)


def group_fqn(group: FSDPParamGroup) -> str:
    """The FQNs of the group's modules, known after the root's first forward."""
    return group._module_fqn or "<root>"


def trainable_parameters(group: FSDPParamGroup) -> list[nn.Parameter]:
    """The unsharded parameters that require grad; empty before the first gather."""
    return [
        p._unsharded_param
        for p in group.fsdp_params
        if p.sharded_param.requires_grad and hasattr(p, "_unsharded_param")
    ]


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


class ResidencyMonitor:
    """While entered, keeps the peak bytes of gathered weights and of unsharded gradients.

    Read from the groups' real tensors on this rank, whenever a group has been gathered and
    whenever one is about to be reduced or to keep its gradients: the moments at which either is
    largest. For measurements; it looks at every group each time.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._groups = _all_groups(models)
        self.reset()

    def reset(self) -> None:
        self.peak_weight_bytes = 0
        self.peak_gradient_bytes = 0

    def sample(self) -> None:
        self.peak_weight_bytes = max(self.peak_weight_bytes, self.weight_bytes())
        self.peak_gradient_bytes = max(self.peak_gradient_bytes, self.gradient_bytes())

    def weight_bytes(self) -> int:
        """Bytes of the weights that are gathered now."""
        return sum(
            parameter.nbytes
            for group in self._groups
            if group.is_unsharded
            for parameter in _unsharded_parameters(group)
        )

    def gradient_bytes(self) -> int:
        """Bytes of the unsharded gradients that exist now."""
        return sum(
            parameter.grad.nbytes
            for group in self._groups
            for parameter in _unsharded_parameters(group)
            if parameter.grad is not None
        )

    def __enter__(self) -> ResidencyMonitor:
        for group in self._groups:
            # On the instance, so that leaving it is a deletion.
            group.wait_for_unshard = self._then_sample(group.wait_for_unshard)  # type: ignore[method-assign]
            group.post_backward = self._sample_then(group.post_backward)  # type: ignore[method-assign]
        return self

    def __exit__(self, *exc_info: object) -> None:
        for group in self._groups:
            del group.wait_for_unshard, group.post_backward

    def _then_sample(self, method: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            method(*args)
            self.sample()

        return call

    def _sample_then(self, method: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            self.sample()
            method(*args)

        return call


def _unsharded_parameters(group: FSDPParamGroup) -> list[nn.Parameter]:
    # Absent until the group has been gathered once.
    return [p._unsharded_param for p in group.fsdp_params if hasattr(p, "_unsharded_param")]


def _all_groups(models: Iterable[nn.Module]) -> list[FSDPParamGroup]:
    """Every FSDP group in ``models``, once, in module order."""
    groups = {id(group): group for module in _fsdp_modules(models) for group in _groups(module)}
    return list(groups.values())


def _fsdp_modules(models: Iterable[nn.Module]) -> Iterator[FSDPModule]:
    for model in models:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                yield module


def _groups(module: FSDPModule) -> list[FSDPParamGroup]:
    return module._get_fsdp_state()._fsdp_param_groups


def _module_name(module: FSDPModule) -> str:
    """The FQNs of the modules of ``module``'s group, known after the root's first forward."""
    fqns = [group._module_fqn for group in _groups(module) if group._module_fqn]
    return fqns[0] if fqns else type(module).__name__.removeprefix("FSDP")


def _is_manually_finalized(context: FSDPStateContext[FSDPState]) -> bool:
    """Whether the caller, a pipeline's schedule, finalizes the backward under way or to come."""
    # The mode is latched when the first backward starts.
    if context.manual_backward_finalization_active is not None:
        return context.manual_backward_finalization_active
    return context.manual_backward_finalization


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


def _pending(groups: Iterable[FSDPParamGroup]) -> list[FSDPParamGroup]:
    """Groups in which earlier microbatches left gradients unsharded, or as HSDP partial sums."""
    return [g for g in groups if g._post_backward_pending or g._partial_reduce_output is not None]
