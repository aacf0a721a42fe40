"""The ``titan-lifecycle`` command."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from titan_lifecycle import __version__
from titan_lifecycle.jobs.errors import JobError

_JOB_HELP = "a job file, or the name of a job this package ships"
_OVERRIDES_HELP = (
    "--section.key value, as torchtitan spells them; they win over the job file. --stock: the same "
    "job with torchtitan's own loss and policies"
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="titan-lifecycle", description="Train torchtitan models from TOML job files."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, description in (
        ("train", "Train; starts the ranks, unless torchrun or srun has."),
        ("config", "Print the merged config and where each value comes from; check it."),
        ("report", "Train twice, with torchtitan's lifecycle and with this one, and compare."),
    ):
        command = commands.add_parser(name, help=description, description=description)
        if name == "report":
            _add_json(command)
        command.add_argument("job", help=_JOB_HELP)
        command.add_argument("overrides", nargs=argparse.REMAINDER, help=_OVERRIDES_HELP)
    commands.add_parser("jobs", help="List the jobs this package ships.")
    description = "Say what is installed, whether this package fits it, and which gaps torch has."
    doctor = commands.add_parser("doctor", help=description, description=description)
    doctor.add_argument(
        "--quick", action="store_true", help="do not reproduce the gaps, which takes half a minute"
    )
    return parser


def _add_json(parser: argparse.ArgumentParser, default: Path | None = None) -> None:
    parser.add_argument(
        "--json", type=Path, metavar="FILE", default=default, help="write the figures here"
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if args.command == "report":
        # An option after the job is one of the overrides to argparse.
        after = argparse.ArgumentParser(
            prog="titan-lifecycle report", add_help=False, allow_abbrev=False
        )
        _add_json(after, default=args.json)
        _, args.overrides = after.parse_known_args(args.overrides, args)
    # Importing torch and torchtitan takes seconds: not for --help.
    if args.command == "doctor":
        from titan_lifecycle import doctor

        return doctor.examine(reproduce=not args.quick)
    from titan_lifecycle.jobs import job
    from titan_lifecycle.jobs.shipped import resolve_job, shipped_jobs
    from titan_lifecycle.run import launch
    from titan_lifecycle.run.assets import missing_tokenizer
    from titan_lifecycle.run.load import load

    try:
        if args.command == "jobs":
            print("\n".join(sorted(shipped_jobs())))
            return 0
        path = resolve_job(args.job)
        if args.command == "report":
            # Not above: as a rank, this process settles its device before torchtitan is imported.
            from titan_lifecycle.measure import report

            return report.report(str(path), args.overrides, args.json)
        if args.command == "train":
            return launch.train(str(path), args.overrides)
        loaded = load(job.read_header(path), args.overrides)
        print(job.render(loaded), flush=True)
        if missing := missing_tokenizer(loaded):
            print(f"# {missing}", flush=True)
        lifecycle = getattr(loaded.config, "lifecycle", None)
        if lifecycle is not None and lifecycle.gradient_reduction == "last_microbatch":
            from titan_lifecycle.plan import build as cost

            print(f"# {cost.describe(str(path), args.overrides)}")
        return 0
    except JobError as error:
        print(f"titan-lifecycle: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Who reads the output has enough, like head. The interpreter flushes at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
