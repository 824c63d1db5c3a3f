#!/bin/bash
# sbatch slurm.sh: ranks of torchrun on every GPU of two nodes. All nodes see the run directory.
#SBATCH --job-name=sokoban-7b
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
# Three minutes before the limit ranks save and leave; the job goes on when it is queued again.
#SBATCH --signal=TERM@180
#SBATCH --requeue
set -euo pipefail

run=${RUN:-/shared/runs/sokoban-7b}
command=(train sokoban grpo qwen2.5-7b rollout.num_groups=64 engine.kind=torchrun --run "$run")
if [ -e "$run/config.yaml" ]; then
    command=(train --resume "$run")
fi
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes%%$'\n'*}
# By itself torchrun ends ranks 30 s after SIGTERM, in the middle of a long step.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=170
srun torchrun --nnodes="$SLURM_NNODES" --nproc-per-node=8 \
    --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$head:29500" \
    -m -- moored "${command[@]}"
# With Ray instead: engine.kind=ray engine.ray.address=auto and the learners and replicas to start,
#   srun ray symmetric-run --address="$head:6379" --min-nodes="$SLURM_NNODES" \
#       -- python -m moored "${command[@]}"
