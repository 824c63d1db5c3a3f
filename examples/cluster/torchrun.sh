#!/bin/bash
# One machine with several GPUs, without a scheduler: a rank on each GPU.
# On several machines run the same line on each at once, with
#   --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=FIRST_HOST:29500   instead of --standalone
set -euo pipefail

run=${RUN:-runs/sokoban-7b}
command=(train sokoban grpo qwen2.5-7b engine.kind=torchrun --run "$run")
if [ -e "$run/config.yaml" ]; then
    command=(train --resume "$run")
fi
# Without `--` torchrun takes `--run` for a short form of an option of its own.
exec torchrun --standalone --nproc-per-node="${GPUS:-8}" -m -- moored "${command[@]}"
