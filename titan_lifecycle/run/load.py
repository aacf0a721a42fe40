"""A job as it runs here: with what its device and this package add to the job file."""

from __future__ import annotations

import copy
import logging
from functools import partial
from typing import TYPE_CHECKING

from titan_lifecycle import cpu_backend
from titan_lifecycle.jobs.errors import JobError, attempt
from titan_lifecycle.jobs.job import Job, JobHeader, load_job
from titan_lifecycle.run.assets import use_packaged_assets

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

__all__ = ["STOCK", "load", "plugin_config"]

STOCK = "--stock"
"""On the command line: the job with torchtitan's own loss and policies, whatever it asks for."""


def load(header: JobHeader, overrides: list[str], *, world_size: int | None = None) -> Job:
    """The job as it is trained here, checked.

    Args:
        header: The job file's ``[job]`` table.
        overrides: The command line's ``--section.key value``. ``--stock`` among them stands for
            ``stock_config``: the same job with torchtitan's own loss and policies.
        world_size: The number of ranks, where it is known.

    Raises:
        JobError: The job is wrong.
    """
    device = cpu_backend.resolve_device(header.device)
    # torchtitan's configs log warnings, and the trainer repeats them once its logger is set up.
    logging.getLogger().addHandler(logging.NullHandler())
    return load_job(
        header,
        [argument for argument in overrides if argument != STOCK],
        device=device,
        device_defaults=cpu_backend.device_defaults() if device == "cpu" else None,
        transform=plugin_config,
        settle=_stock if STOCK in overrides else _with_chosen_loss,
        world_size=world_size,
    )


def plugin_config(config: Trainer.Config) -> Trainer.Config:
    """The registry's config with what this package adds.

    That is ``[lifecycle]``, a summary, and for a debug model a tokenizer and text.

    Other trainers than torchtitan's own (Flux, GraphTrainer, ...) are left as they are: they have
    no ``[lifecycle]`` section.
    """
    # Here, after the device is settled: torchtitan picks its device when it is imported.
    from torchtitan.trainer import Trainer

    from titan_lifecycle.measure.summary import use_summary
    from titan_lifecycle.trainer import lifecycle_config

    if type(config) is Trainer.Config:
        config = use_packaged_assets(lifecycle_config(config))
    return use_summary(config)


def _with_chosen_loss(config: Trainer.Config) -> Trainer.Config:
    """``config`` with the loss that it trains with."""
    if getattr(config, "lifecycle", None) is None:
        return config
    from titan_lifecycle.losses.choice import choose_loss

    chosen = copy.copy(config)
    chosen.loss, chosen.override = attempt(partial(choose_loss, config), "override.imports")
    return chosen


def _stock(config: Trainer.Config) -> Trainer.Config:
    from titan_lifecycle.trainer import LifecycleTrainer, stock_config

    if not isinstance(config, LifecycleTrainer.Config):
        raise JobError(
            f"{STOCK} is for jobs of torchtitan's own trainer; this one has a "
            f"{type(config).__qualname__}"
        )
    return stock_config(config)
