#!/usr/bin/env bash
# Train a job on two hosts. Run this on both, with the first host's name:
#
#     ./torchrun_two_hosts.sh FIRST_HOST first_job.toml [--section.key value ...]
#
# The job file and its dump_folder must be on a file system that both hosts share. JOB_ID tells
# jobs apart that meet at one host.
set -euo pipefail

first_host=$1
shift
exec torchrun --nnodes 2 --nproc-per-node "${NPROC_PER_NODE:-8}" \
    --rdzv-backend c10d --rdzv-endpoint "$first_host:${PORT:-29500}" --rdzv-id "${JOB_ID:-1}" \
    ${LOCAL_ADDR:+--local-addr "$LOCAL_ADDR"} \
    -m titan_lifecycle train "$@"
