#!/usr/bin/env bash
# Serves a model on one machine with GPUs: conversations that leave the GPU are kept on host memory and an SSD.
#
# MODEL=meta-llama/Llama-3.1-8B-Instruct SSD=/mnt/nvme/krul bash examples/serve_gpu.sh
set -euo pipefail

arguments=(
  --model-path "${MODEL:?the model to serve}"
  --port "${PORT:-30000}"
  --tp "${TP:-1}"
  # Pages of 16 tokens or more: each is a key in the store.
  --page-size 16
  # What is stored of each prompt is said in the answer: cached_tokens_details has device and host.
  --enable-cache-report
  # krul behind the radix cache.
  --radix-cache-backend krul
)
options=(
  # As much host memory as SGLang and the system leave; it is pinned at start.
  "\"host_memory\": \"${HOST_MEMORY:-auto}\""
  # Evicted from memory, conversations stay here, also over restarts.
  "\"ssd_dir\": \"${SSD:?a folder on a fast disk}\""
  "\"ssd_capacity\": \"${SSD_CAPACITY:-auto}\""
  # "none": KV comes back to the bit. "subspace": many times smaller, within error_budget nats per token.
  "\"strategy\": \"${STRATEGY:-none}\""
  # Counters for Prometheus, and hints of applications, on 127.0.0.1.
  "\"metrics_port\": ${METRICS_PORT:-9090}"
  "\"hints_port\": ${HINTS_PORT:-31000}"
)
joined=$(IFS=,; echo "{${options[*]}}")
exec python -m sglang.launch_server "${arguments[@]}" --unified-cache-external-linker-config "$joined" "$@"
