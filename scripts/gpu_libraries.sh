# The libraries of the installed PyTorch 2.11.0, for programs that other scripts start on GPUs; COLO_GRPO_TORCH_CUDA names another torch/lib.
#   . scripts/gpu_libraries.sh
if [ -z "${COLO_GRPO_TORCH_CUDA:-}" ]; then
  COLO_GRPO_TORCH_CUDA=$(python3 -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0] + "/lib")')
fi
# What the program sets for itself when it starts; tests join worlds in their own process.
export COLO_GRPO_TORCH_CUDA NCCL_GRAPH_REGISTER=${NCCL_GRAPH_REGISTER:-0} NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
site=$(dirname "$(dirname "$COLO_GRPO_TORCH_CUDA")")
folders=$(find "$site/nvidia" -type d -name lib 2>/dev/null | paste -sd:)
export LD_LIBRARY_PATH="$COLO_GRPO_TORCH_CUDA${folders:+:$folders}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
