"""torchtitan's metrics, with a progress bar and a summary at the end of the run."""

import contextlib
import logging
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.metrics import MetricsProcessor, TensorBoardLogger
from torchtitan.config.override import derive
from torchtitan.tools.utils import NoColor
from torchtitan.trainer import Trainer
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from titan_lifecycle import private_names
from titan_lifecycle.jobs.topology import V_SCHEDULES, loss_rank
from titan_lifecycle.measure.throughput import tokens_per_second_per_device

private_names.check("jobs of torchtitan")


def use_summary(config: Trainer.Config) -> Trainer.Config:
    """Let ``config`` build `SummaryMetricsProcessor`, unless it names a processor of its own."""
    if type(config.metrics) is MetricsProcessor.Config:
        config.metrics = derive(config.metrics, SummaryMetricsProcessor.Config)
    return config


class SummaryMetricsProcessor(MetricsProcessor):
    """torchtitan's metrics under its own tags; the rank with the loss also sums up the run.

    `summary_rows` holds rows that others want in the table, by name.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, config: Config, *, pp_schedule: str = "1F1B", **kwargs: Any) -> None:
        # torchtitan uses the schedule only to find the rank that has the loss, and knows one of
        # the two V schedules by name.
        super().__init__(
            config,
            pp_schedule="ZBVZeroBubble" if pp_schedule in V_SCHEDULES else pp_schedule,
            **kwargs,
        )
        if not sys.stdout.isatty():
            # Escape codes would only litter a log file.
            self.color = NoColor()
        dims = self.parallel_dims
        self.reports_loss = torch.distributed.get_rank() == loss_rank(
            dims.world_size, dims.pp, pp_schedule
        )
        self.summary_rows: dict[str, str] = {}
        self._num_steps: int | None = kwargs["config_dict"]["training"]["steps"]
        self._losses: list[tuple[int, float]] = []
        # Of each logged step: tokens on this rank, seconds. The first includes warming up.
        self._throughput: list[tuple[int, float]] = []
        self._peak_memory_gib = 0.0
        self._bar: tqdm[Any] | None = None
        self._cleanup = contextlib.ExitStack()

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        self._losses.append((step, global_avg_loss))
        self._throughput.append(
            (self.ntokens_since_last_log, time.perf_counter() - self.time_last_log)
        )
        memory = self.device_memory_monitor.get_peak_stats()
        self._peak_memory_gib = max(self._peak_memory_gib, memory.max_reserved_gib)
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
        if self.reports_loss and sys.stderr.isatty():
            self._show_progress(step, global_avg_loss)

    def _show_progress(self, step: int, loss: float) -> None:
        if self._bar is None:
            self._bar = tqdm(total=self._num_steps, initial=step - 1, unit="step")
            self._cleanup.callback(self._bar.close)
            # Step lines and the bar share the terminal: this prints the one above the other.
            self._cleanup.enter_context(logging_redirect_tqdm([logging.getLogger()]))
        self._bar.update(step - self._bar.n)
        self._bar.set_postfix(loss=f"{loss:.4f}")

    def close(self) -> None:
        super().close()
        self._cleanup.close()
        # torchtitan closes its parts while it handles an error, too; then there is no result.
        if self.reports_loss and self._losses and sys.exc_info()[0] is None:
            print(self.summary(), flush=True)

    def summary(self) -> str:
        """The table: steps, losses, speed, memory, where the TensorBoard run is, and more."""
        (first_step, first_loss), (last_step, last_loss) = self._losses[0], self._losses[-1]
        measured = self._throughput[1:] or self._throughput
        tokens, seconds = (sum(column) for column in zip(*measured, strict=True))
        dims = self.parallel_dims
        tps = tokens_per_second_per_device(tokens, seconds, dims.non_data_parallel_size)
        on_cpu = self.device_memory_monitor.device.type == "cpu"
        rows = {
            "steps": f"{first_step} to {last_step}",
            "first loss": f"{first_loss:.5f}",
            "last loss": f"{last_loss:.5f}",
            "tokens/s/device": f"{tps:,.0f} on {dims.world_size} ranks",
            "peak memory": f"{self._peak_memory_gib:.2f} GiB {'resident' if on_cpu else 'reserved'}"
            f" on rank {torch.distributed.get_rank()}",
            **self.summary_rows,
        }
        if directory := self._tensorboard_directory():
            rows["TensorBoard"] = directory
        width = max(map(len, rows))
        return "\n".join(["", *(f"  {name:<{width}}  {value}" for name, value in rows.items())])

    def _tensorboard_directory(self) -> str | None:
        for logger in getattr(self.logger, "_loggers", ()):
            if isinstance(logger, TensorBoardLogger):
                return os.path.relpath(str(logger.writer.log_dir))
        return None
