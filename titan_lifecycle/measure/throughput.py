"""Tokens a second, in the one definition of this package: torchtitan's ``tps``, of one device."""

from __future__ import annotations

__all__ = ["tokens_per_second_per_device"]


def tokens_per_second_per_device(num_tokens: int, seconds: float, num_ranks: int) -> float:
    """The tokens of one batch rank in ``seconds``, divided among the ranks that share them.

    Times the number of devices it is the throughput of the whole job. The step lines, TensorBoard's
    ``throughput(tps)``, the summary and the report all show it; they differ in the steps and the
    seconds that they count.

    Args:
        num_tokens: Tokens that this rank has read. Ranks of one tensor, context or pipeline
            parallel group read the same ones.
        seconds: What they took.
        num_ranks: The size of that group, ``ParallelDims.non_data_parallel_size``.
    """
    return num_tokens / (seconds * num_ranks)
