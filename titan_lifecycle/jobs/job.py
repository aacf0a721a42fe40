"""Job files: a TOML overlay on a torchtitan registry config.

The ``[job]`` table says which config function to start from and how to run it; every other key
is a field of the ``Trainer.Config`` that the function returns. Precedence, highest first: command
line, job file, device defaults, registry function. One setting follows from the others where nobody
gives it: CUDA graphs are disabled for a job that cannot be captured.

Reading happens in two steps, because torchtitan picks its device when it is imported:
``read_header`` needs no torchtitan, and after it the CPU backend can be activated; ``load_job``
then imports the config function. All errors are ``JobError``, raised before anything is spawned.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from titan_lifecycle.jobs import overlay, topology
from titan_lifecycle.jobs.errors import JobError, attempt, nearest
from titan_lifecycle.jobs.renamed_keys import pointer
from titan_lifecycle.jobs.render_toml import REGISTRY, render_toml
from titan_lifecycle.jobs.toml_file import TomlFile

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

Device = Literal["auto", "cpu", "cuda"]

COMMAND_LINE = "command line"
DEVICE_DEFAULTS = "cpu backend"
PLUGIN = "titan_lifecycle"
_NO_GRAPHS = "training.disable_cuda_graphs"


@dataclass(frozen=True, slots=True)
class JobHeader:
    """The ``[job]`` table of a job file.

    ``module`` and ``config`` are torchtitan's ``--module`` and ``--config``; ``nproc_per_node``
    is the number of workers to start on this node when not already under torchrun.
    """

    file: TomlFile
    module: str
    config: str
    nproc_per_node: int = 1
    device: Device = "auto"

    @property
    def path(self) -> Path:
        return self.file.path


@dataclass(frozen=True, slots=True)
class Job:
    """A job ready to run: ``config`` is overlaid and validated."""

    header: JobHeader
    config: Trainer.Config
    sources: Mapping[str, str]
    """Dotted path of every field to where its value comes from: ``registry``, ``cpu backend``,
    ``titan_lifecycle``, ``configs/x.toml:12`` or ``command line``."""
    device: str
    """``cpu`` or ``cuda``."""
    world_size: int
    """Ranks on all nodes."""
    loss_rank: int
    """The global rank that reports the loss."""
    num_pipeline_stages: int
    """Stages on all pipeline ranks; 1 without a pipeline."""


def read_header(path: str | Path) -> JobHeader:
    """Read the job file and its ``[job]`` table, without importing torchtitan or torch."""
    file = TomlFile.read(Path(path))
    table = file.document.get("job")
    if table is None:
        raise JobError(f"{path}: a job file needs a [job] table with module and config")
    if not isinstance(table, dict):
        raise JobError(f"{file.where(('job',))}: 'job' must be a table; write [job]")
    kinds = {"module": "a string", "config": "a string"}
    kinds |= {"nproc_per_node": "an integer of at least 1"}
    kinds |= {"device": "one of " + ", ".join(map(repr, get_args(Device)))}
    for key, value in table.items():
        where = file.where(("job", key))
        if key not in kinds:
            if advice := pointer(f"job.{key}"):
                raise JobError(f"{where}: 'job.{key}' {advice}")
            hint = f"{nearest(key, kinds)} Expected one of {', '.join(kinds)}"
            raise JobError(f"{where}: unknown key 'job.{key}'{hint}")
        valid = {
            "module": isinstance(value, str) and bool(value),
            "config": isinstance(value, str) and bool(value),
            "nproc_per_node": type(value) is int and value >= 1,  # true is an int to isinstance
            "device": value in get_args(Device),
        }
        if not valid[key]:
            raise JobError(f"{where}: 'job.{key}' must be {kinds[key]}; found {value!r}")
    for key in ("module", "config"):
        if key not in table:
            raise JobError(f"{file.where(('job',))}: [job] needs '{key}', as torchtitan's --{key}")
    return JobHeader(file=file, **table)


def load_job(
    source: str | Path | JobHeader,
    cli_args: Sequence[str] = (),
    *,
    device: str = "cpu",
    device_defaults: Mapping[str, Any] | None = None,
    transform: Callable[[Trainer.Config], Trainer.Config] | None = None,
    settle: Callable[[Trainer.Config], Trainer.Config] | None = None,
    world_size: int | None = None,
) -> Job:
    """Build and validate the config of a job.

    Args:
        source: A job file, or the header read from it.
        cli_args: Overrides in torchtitan's spelling, ``--training.steps 20``.
        device: What the job runs on.
        device_defaults: Dotted path to value, for what the device needs; the job file wins.
        transform: Applied to the registry's config before anything is laid over it, to turn it
            into a subclass with more fields.
        settle: Applied to the valid config at the end, to decide what depends on several fields.
        world_size: The number of ranks, where it is known; by default what [job] and the degrees
            ask for.

    Raises:
        JobError: the job is wrong. A usage error in ``cli_args`` is tyro's own: a message on
            stderr and ``SystemExit(2)``.
    """
    header = source if isinstance(source, JobHeader) else read_header(source)
    registry_config = config = _registry_config(header)
    if transform is not None:
        config = transform(config)
    changes = dict.fromkeys(_changed(registry_config, config), PLUGIN)

    config, defaults = overlay.apply(config, _nested(device_defaults), lambda _: DEVICE_DEFAULTS)
    table = {key: value for key, value in header.file.document.items() if key != "job"}
    config, from_file = overlay.apply(config, table, header.file.where)
    changes |= {**defaults, **from_file}
    decides_on_graphs = (
        not config.training.disable_cuda_graphs
        and _source(_NO_GRAPHS, changes) == REGISTRY
        and not {_NO_GRAPHS, _NO_GRAPHS.replace(".", ".no_")} & {_flag(arg) for arg in cli_args}
    )
    if decides_on_graphs:
        # For now: the command line, which validates what it gives, may ask for what needs this.
        config = _with_graphs(config, disabled=True)

    if cli_args:
        before, config = config, _apply_cli(header, config, list(cli_args))
        given = {*_changed(before, config), *_named(config, cli_args)}
        # What stood below a section that the command line swapped says nothing about the new one.
        changes = {
            p: s for p, s in changes.items() if not any(p.startswith(f"{g}.") for g in given)
        }
        changes |= dict.fromkeys(given, COMMAND_LINE)
    overlay.revalidate(config, header.path)
    if decides_on_graphs:
        with_graphs = _with_graphs(config, disabled=False)
        if _is_valid(with_graphs):
            config = with_graphs
        else:
            changes[_NO_GRAPHS] = PLUGIN
    sources = {path: _source(path, changes) for path, _ in overlay.leaves(config)}
    _check_override_imports(config, sources["override.imports"])
    if settle is not None:
        before, config = config, settle(config)
        overlay.revalidate(config, header.path)
        sources = _settled_sources(before, config, sources)
    parallelism = config.parallelism
    if world_size is None:
        world_size = topology.default_world_size(parallelism, header.nproc_per_node)
    dims = topology.check_degrees(config, world_size, path=header.path, sources=sources)
    return Job(
        header,
        config,
        sources,
        device=device,
        world_size=world_size,
        loss_rank=topology.loss_rank(world_size, dims.pp, parallelism.pipeline_parallel_schedule),
        num_pipeline_stages=topology.num_stages(config, dims, header.path),
    )


def render(job: Job) -> str:
    """The job as one complete job file, each line with the source of its value."""
    header = job.header
    table = {
        "module": header.module,
        "config": header.config,
        "nproc_per_node": header.nproc_per_node,
        "device": header.device,
    }
    document = header.file.document["job"]
    sources = {
        f"job.{key}": header.file.where(("job", key)) if key in document else "default"
        for key in table
    }
    return render_toml(job.config, {**job.sources, **sources}, table)


def _with_graphs(config: Trainer.Config, *, disabled: bool) -> Trainer.Config:
    """A copy of ``config`` without CUDA graphs, or with them, that shares everything else."""
    config = copy.copy(config)
    config.training = copy.copy(config.training)
    config.training.disable_cuda_graphs = disabled
    return config


def _is_valid(config: Trainer.Config) -> bool:
    """Whether the config's own validation accepts it.

    For a config that is valid without CUDA graphs, this tells whether the rest of it can be
    captured: torchtitan refuses pipelines and most exchanges of tokens, this package's trainer the
    policies that differ between microbatches.
    """
    try:
        config.__post_init__()
    except (ValueError, AssertionError):
        return False
    return True


def _registry_config(header: JobHeader) -> Trainer.Config:
    """Call the config function that the header names."""
    from torchtitan.trainer import Trainer

    module = _registry_module(header)
    function = getattr(module, header.config, None)
    where = header.file.where(("job", "config"))
    if not callable(function):
        functions = _config_functions(module)
        raise JobError(
            f"{where}: unknown config '{header.config}' in module '{header.module}'"
            f"{nearest(header.config, functions)} "
            f"Config functions: {', '.join(functions)}"
        )
    config = attempt(function, f"{where}: config function '{header.config}' failed")
    if not isinstance(config, Trainer.Config):
        raise JobError(
            f"{where}: '{header.config}' returned a {type(config).__qualname__}; a config function "
            "returns a Trainer.Config"
        )
    return config


def _registry_module(header: JobHeader) -> Any:
    """Import the module that torchtitan's ``--module`` would choose.

    torchtitan tries the candidates in turn and swallows each ImportError, so that a module which
    exists but is broken looks as if it did not exist. Here existence decides, and the error of
    the one that exists is shown.
    """
    from torchtitan.experiments import _supported_experiments
    from torchtitan.models import _supported_models

    supported = sorted(_supported_models | _supported_experiments)
    name = header.module
    where = header.file.where(("job", "module"))
    if name in supported:
        packages = ("models", "experiments", "experiments.rl.examples")
        candidates = [f"torchtitan.{package}.{name}.config_registry" for package in packages]
    else:
        candidates = [f"{name}.config_registry", name]
    for candidate in candidates:
        failed = f"{where}: module '{name}' exists but failed to import"
        if attempt(partial(overlay.module_exists, candidate), failed):
            return attempt(partial(importlib.import_module, candidate), failed)
    raise JobError(
        f"{where}: unknown module '{name}'{nearest(name, supported)} "
        f"Expected an importable module or one of: {', '.join(supported)}"
        f"{_import_hint(name, header.path)}"
    )


def _import_hint(name: str, job_file: Path) -> str:
    """Where a module of the user's own is, if it is near; how Python finds it in any case."""
    top = name.partition(".")[0]
    for folder in (job_file.resolve().parent, Path.cwd()):
        if (folder / top).is_dir() or (folder / f"{top}.py").is_file():
            return (
                f". There is a '{top}' in {folder}, which is not among the import paths: install "
                f"it, or set PYTHONPATH={folder}"
            )
    return ". A package of your own must be installed, or its folder be named in PYTHONPATH"


def _config_functions(module: Any) -> list[str]:
    """The functions of a registry module that can be called as config functions.

    Narrower than torchtitan's own listing, which includes helpers that take arguments.
    """
    return [
        name
        for name in dir(module)
        if not name.startswith("_")
        and inspect.isfunction(function := getattr(module, name))
        and not any(p.default is p.empty for p in inspect.signature(function).parameters.values())
    ]


def _check_override_imports(config: Trainer.Config, source: str) -> None:
    """Find the modules of ``override.imports``, which torchtitan would import in every rank."""
    for entry in config.override.imports:
        target = entry if isinstance(entry, str) else entry[0]
        module = target.rpartition(".")[0]
        failed = f"{source}: override.imports '{target}'"
        if not attempt(partial(overlay.module_exists, module), f"{failed} failed to import"):
            raise JobError(
                f"{failed}: there is no module '{module}'; expected module.function of an @override"
            )


def _apply_cli(header: JobHeader, config: Trainer.Config, cli_args: list[str]) -> Trainer.Config:
    """Apply overrides the way torchtitan does, with tyro and torchtitan's rules."""
    import tyro
    from torchtitan.config.manager import ConfigManager, custom_registry

    known = {path for path, _ in overlay.leaves(config)}
    for arg in cli_args:
        path = _flag(arg)
        if path and path not in known and (advice := pointer(path)):
            raise JobError(f"'--{path}' {advice}")
        if path in ("module", "config") or path.startswith("job."):
            raise JobError(
                f"--{path} is not for the command line: {header.path} sets it in its [job] table"
            )
    ConfigManager()  # constructing it registers torchtitan's rules
    try:
        return cast(
            "Trainer.Config",
            tyro.cli(
                type(config),
                prog=f"titan-lifecycle train {header.path}",
                args=cli_args,
                default=config,
                registry=custom_registry,
            ),
        )
    except SystemExit as error:
        # tyro also runs the configs' own validation, whose messages do not name the file.
        if error.code:
            print(f"(job file {header.path} with the command line applied)", file=sys.stderr)
        raise


def _flag(arg: str) -> str:
    """The dotted path an option names, or an empty string."""
    return arg[2:].partition("=")[0].replace("-", "_") if arg.startswith("--") else ""


def _named(config: Trainer.Config, cli_args: Sequence[str]) -> list[str]:
    """The fields that ``cli_args`` name, even where they repeat the value that was there."""
    flags = {_flag(arg) for arg in cli_args}
    flags |= {flag.replace(".no_", ".") for flag in flags}
    return [
        path
        for path, value in overlay.leaves(config)
        # A flag may go on into a list, never into a section: that has leaves of its own.
        if any(flag == path or flag.startswith(f"{path}.") for flag in flags)
        and not isinstance(value, type)
    ]


def _changed(before: Any, after: Any) -> list[str]:
    """The leaves of ``after`` that ``before`` lacks or holds another value for."""
    old = dict(overlay.leaves(before))
    return [p for p, value in overlay.leaves(after) if p not in old or old[p] != value]


def _source(path: str, changes: Mapping[str, str]) -> str:
    """The source of the field, or of the nearest section around it that was set as a whole."""
    while path:
        if path in changes:
            return changes[path]
        path = path.rpartition(".")[0]
    return REGISTRY


def _settled_sources(before: Any, after: Any, sources: Mapping[str, str]) -> dict[str, str]:
    """The sources of ``after``, whose loss was chosen from the settings in ``before``.

    A setting that went into, or out of, an inner loss takes its source along.
    """
    old = dict(overlay.leaves(before))
    reason = sources["override.imports" if before.override != after.override else "loss"]
    settled = {}
    for path, value in overlay.leaves(after):
        places = [path, path.replace("loss.loss_fn.", "loss.", 1)]
        places.append(path.replace("loss.", "loss.loss_fn.", 1))
        kept = [p for p in places if p in old and old[p] == value]
        settled[path] = sources[kept[0]] if kept else reason
    return settled


def _nested(dotted: Mapping[str, Any] | None) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in (dotted or {}).items():
        *sections, key = path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = value
    return tree
