#!/usr/bin/env bash
# What is to be measured on eight GPUs, the most telling first. An arm that no longer fits into SECONDS is left out.
# Rows are added to FOLDER/*.jsonl, and what each arm prints is in FOLDER/*.out.
#   benchmarks/gpu/eight.sh FOLDER SECONDS [PEER]       PEER: AReaL, from benchmarks.gpu.peers.bring_up
#   REHEARSE=1 benchmarks/gpu/eight.sh FOLDER SECONDS   tiny, on a CPU; the seconds of arms are not theirs
# ARMS="scaling storm" runs these alone. PYTHON: default python3.
set -u
out=$(realpath -m "$1") end=$(($(date +%s) + $2)) peer=${3:-}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
mkdir -p "$out"
export NCCL_NVLS_ENABLE=0 PYTHONUNBUFFERED=1

# go ARM SECONDS MODULE [WORD ...]
go() {
  local arm=$1 seconds=$2 began=$(date +%s)
  shift 2
  if [ -n "${ARMS:-}" ] && [[ " $ARMS " != *" $arm "* ]]; then return; fi
  if [ $((began + seconds)) -gt "$end" ]; then
    echo "$(date +%T) $arm: left out, it takes $seconds s"
    return
  fi
  timeout $((end - began)) "${PYTHON:-python3}" -m "$@" > "$out/$arm.out" 2>&1
  local code=$?
  echo "$(date +%T) $arm: exit code $code, $(($(date +%s) - began)) s"
}
# rows FILE: where an arm adds its rows
rows() { echo "$out/$1.jsonl"; }

if [ -n "${REHEARSE:-}" ]; then
  small=tiny-8 dense=tiny-8 moe=(tiny-moe tiny-moe tiny-moe tiny-moe) device=cpu
  step=(--device cpu --tokens 512 --length 128 --warm-up 1 --steps 2) modes=(--rehearse --arms async@1+1 sync@1+1)
  run=(--rehearse --windows 1) plan=2 turns=(--rehearse --steps 4 --groups 8) machines=(--device cpu --tokens 512)
  set=("engine.kind='inprocess'") replay=() one=() half=() all=() sized=() peers=(--rehearse)
  adapters=() # merged: an engine in the worker's process takes none
else
  small=0.6B dense=32B moe=(30B-A3B:12 30B-A3B:24 235B-A22B:12 235B-A22B:48) device=cuda
  step=(--tokens 16384 --warm-up 10 --steps 10) machines=()
  modes=(--gpus 8 --length-mean 500 --length-max 4096 --running 384 --window 15)
  modes+=(--arms async@1+7 sync@1+7 one_step_off@1+7 async@1+1 async@1+2 async@1+4 async@2+6 sync_colocated)
  run=(--windows 1 --seconds 20) plan=20 turns=(--steps 10 --groups 32 --limit-seconds 300) peers=()
  set=(learner.options.recompute=full) replay=(rollout.routing_replay=on bus.max_log_bytes=68719476736)
  one=('learner.gpus=[0]' 'rollout.gpus=[1,2,3,4,5,6,7]') half=('learner.gpus=[0,1,2,3]' 'rollout.gpus=[4,5,6,7]')
  all=('learner.gpus=[0,1,2,3,4,5,6,7]' 'rollout.gpus=[0,1,2,3,4,5,6,7]' engine.options.tensor_parallel=8)
  sized=(--groups 32 --running 128 --length-mean 400 --length-max 2048 --limit 400)
  adapters=(learner.lora.publish=adapter)
  export TMPDIR=/dev/shm # models of 65 GB
fi
adapters+=(learner.lora.rank=32 "learner.lora.modules=['q_proj','k_proj','v_proj','o_proj']")

# 1: a mixture. 2: larger models. 3: modes of training, and a peer. 4: scaling. 5: faults.
# 1, 4, 5: a mixture in turns, from EP 8 to TP 2 x EP 4; how a step scales; one to seven engines; kills and stops
go mixture 480 benchmarks.gpu.colocated "$(rows colocated)" "${turns[@]}" --gpus 8 --shape "${moe[0]}" --arms turns \
  --set "${set[@]}" "${replay[@]}" learner.expert_parallel=8 \
  --resume learner.expert_parallel=4 learner.tensor_parallel=2
go scaling 300 benchmarks.gpu.learner --json "$(rows learner)" "${step[@]}" --shapes "$small" --recompute none \
  --layouts 1x1 2x1 4x1 8x1 1x8
go engines 540 benchmarks.gpu.modes --json "$(rows modes)" --out "$out/modes" "${modes[@]}"
go storm 360 tests.chaos --faults ranks --kills 50 --limit-seconds 300 --json "$(rows storm)" --set learner.ranks=8 \
  --set learner.machines=1 --set learner.expert_parallel=4 --set learner.options.timeout_seconds=20 \
  --set "learner.device=\"$device\""
# 4: a plan beside its run
go plan 240 benchmarks.gpu.one_gpu --json "$(rows one_gpu)" "${run[@]}" --plan "$plan" --shape "$small" --arms async \
  --set "${one[@]}" rollout.workers=7
# 1: four GPUs train and four generate
go apart 400 benchmarks.gpu.one_gpu --json "$(rows one_gpu)" "${run[@]}" "${sized[@]}" --shape "${moe[1]}" \
  --arms async --set "${set[@]}" "${replay[@]}" "${half[@]}" learner.ranks=4 learner.expert_parallel=4 rollout.workers=4
# 2: larger models
go dense 300 benchmarks.gpu.learner --json "$(rows learner)" "${step[@]}" --shapes "$dense" --recompute full \
  --micro-batches 4 --layouts tp4-pp2
go large 300 benchmarks.gpu.learner --json "$(rows learner)" "${step[@]}" --shapes "${moe[2]}" --recompute full \
  --layouts ep8
go adapters 480 benchmarks.gpu.one_gpu --json "$(rows one_gpu)" "${run[@]}" "${sized[@]}" --shape "${moe[3]}" \
  --arms async --set "${set[@]}" "${replay[@]}" "${all[@]}" "${adapters[@]}" learner.ranks=8 learner.expert_parallel=8 \
  rollout.workers=1
# 5: a rank of one of two machines is killed, with sockets between them
go machines 240 benchmarks.gpu.machines --json "$(rows machines)" "${machines[@]}" --shapes "$small" --layouts tp4-pp2 \
  --limit 200
# 3: modes at 8B, and a peer
if [ -z "${REHEARSE:-}" ]; then
  go modes_8b 480 benchmarks.gpu.modes --json "$(rows modes)" --out "$out/modes" --gpus 8 --shape 8B --no-prestart \
    --arms async@2+6 sync@2+6 --groups 32 --length-mean 400 --length-max 2048 --set learner.options.recompute=full
fi
if [ -n "$peer" ]; then
  go peers 900 benchmarks.gpu.peers --peer "$peer" --split 2+6 "${peers[@]}" --json "$(rows peers)" --out "$out/peers"
fi
