#!/bin/bash
# A cluster of the nodes of one job: `sbatch docs/cluster/slurm.sh my.toml RUN`. The first node has the driver and, with
# the GPUs that workers leave, the learner; RUN, recipe and model lie in folders that all nodes share.
#SBATCH --job-name=whet
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --output=whet-%j.log
set -euo pipefail
recipe=$1 run=$2
learners=1
workers=$((SLURM_JOB_NUM_NODES * SLURM_GPUS_PER_NODE - learners))

nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
head=${nodes[0]}
address=$(srun --nodes=1 --ntasks=1 -w "$head" hostname --ip-address | awk '{print $1}')
port=$((20000 + SLURM_JOB_ID % 10000))

# Whoever reaches Ray's ports may run code there: the token keeps other users of these nodes out.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN

ray_on() { # node, then options of `ray start`
    srun --overlap --nodes=1 --ntasks=1 -w "$1" --cpus-per-task="$SLURM_CPUS_PER_TASK" \
        ray start --block --include-dashboard=false --num-cpus="$SLURM_CPUS_PER_TASK" \
        --num-gpus="$SLURM_GPUS_PER_NODE" "${@:2}" &
}
ray_on "$head" --head --node-ip-address="$address" --port="$port"
until srun --overlap --nodes=1 --ntasks=1 -w "$head" ray health-check --address "$address:$port"; do sleep 2; done
for node in "${nodes[@]:1}"; do ray_on "$node" --address="$address:$port"; done

# Five minutes before the end of the job whet gets SIGTERM, ends its step, saves and leaves; the next job goes on.
export RAY_ADDRESS=$address:$port
what=("$recipe")
if [ -e "$run/config.toml" ]; then what=(--resume); fi
whet train "${what[@]}" --out "$run" --set "cluster.workers=$workers" --gpus "$learners" &
train=$!
trap 'kill -TERM "$train"' TERM
code=0
wait "$train" || code=$?
if kill -0 "$train" 2>/dev/null; then # the signal has ended the first wait
    code=0
    wait "$train" || code=$?
fi
exit "$code"
