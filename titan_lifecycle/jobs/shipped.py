"""The files that come with the package: job files, and what ``{package}/`` in a job stands for."""

from __future__ import annotations

from pathlib import Path

from titan_lifecycle.jobs.errors import JobError, nearest

__all__ = ["PACKAGE", "resolve_job", "shipped_jobs"]

PACKAGE = Path(__file__).parents[1]


def shipped_jobs() -> dict[str, Path]:
    """The job files that come with the package, by stem."""
    # In a wheel configs/ lies inside the package, in a checkout beside it.
    folder = PACKAGE / "configs" if (PACKAGE / "configs").is_dir() else PACKAGE.parent / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def resolve_job(name_or_path: str | Path) -> Path:
    """The job file for a path or the stem of a shipped job."""
    path = Path(name_or_path)
    jobs = shipped_jobs()
    if path.is_file():
        return path
    if str(path) in jobs:
        return jobs[str(path)]
    raise JobError(
        f"{path}: no such job file{nearest(path.stem, jobs)} "
        f"Shipped jobs: {', '.join(jobs) or 'none'}"
    )
