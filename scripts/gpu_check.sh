#!/usr/bin/env bash
# Checks on a machine with GPUs, from built binaries alone, without cargo: tests against the CPU backend, the demo, figures.
#   scripts/gpu_check.sh [PROGRAM [TESTS [OUTPUT [PARTS]]]]
# PROGRAM is target/release/colo-grpo, TESTS the newest target/release/deps/it-*, unless others are named. Logs and JSON lines go
# to OUTPUT (default runs/gpu). PARTS are some of "tests sanitize demo bench" (default all these) and "hashes" (scripts/hashes.py; TESTS
# may then be any program). Ends with 1 if any of them failed.
# Libraries come from the installed PyTorch 2.11.0, unless COLO_GRPO_TORCH_CUDA names its torch/lib folder. Parts that need more
# GPUs than there are stay out.
set -uo pipefail
cd "$(dirname "$0")/.."
release=${CARGO_TARGET_DIR:-target}/release
newest() { find "$release/deps" -maxdepth 1 -name 'it-*' -executable -type f -printf '%T@ %p\n' | sort -n | tail -1 | cut -d' ' -f2-; }
program=$(realpath -e "${1:-$release/colo-grpo}") && tests=$(realpath -e "${2:-$(newest)}") || {
  echo "no program or tests: build them with cargo build --release and cargo test --release --no-run, or name them" >&2
  exit 1
}
output=${3:-runs/gpu} parts=${4:-tests sanitize demo bench} failed=0
mkdir -p "$output"

. scripts/gpu_libraries.sh
export COLO_GRPO_PROGRAM=$program
gpus=$(nvidia-smi -L | wc -l)
[ -z "${CUDA_VISIBLE_DEVICES:-}" ] || gpus=$(tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | wc -l)
table=()

# check NAME SECONDS COMMAND..: runs it, keeps its log, notes the outcome.
check() {
  local name=$1 limit=$2 start=$SECONDS
  shift 2
  timeout "$limit" "$@" >"$output/$name.log" 2>&1
  local code=$?
  table+=("$(printf '%-34s %-10s %4d s  %s' "$name" "$([ $code = 0 ] && echo ok || echo "exit $code")" $((SECONDS - start)) \
    "$(grep -v '^$' "$output/$name.log" | tail -1 | cut -c1-200)")")
  [ $code = 0 ] || { failed=1; echo "---- $name"; tail -25 "$output/$name.log" | cut -c1-400; }
}

# names FILTER..: the GPU tests that the filters match. One that matches nothing has run nothing: an error, not a success.
names() {
  local filter found
  for filter; do
    found=$("$tests" --list --ignored "$filter" | sed -n 's/^\(.*gpu_.*\): test$/\1/p')
    [ -n "$found" ] || { echo "no GPU test of $tests matches '$filter'" >&2; return 1; }
    echo "$found"
  done
}

for part in $parts; do
  case $part in
    tests)
      selected=$(names gpu_) || exit 1
      for test in $selected; do
        case $test in
          *two_ranks*) [ "$gpus" -ge 2 ] || continue ;;
          *four_ranks*) [ "$gpus" -ge 4 ] || continue ;;
          *eight_ranks*) [ "$gpus" -ge 8 ] || continue ;;
        esac
        check "${test//::/.}" 100 "$tests" --exact "$test" --ignored --nocapture
      done
      ;;
    sanitize) # every kernel on small shapes, a test at a time; a race ends with 9, too
      selected=$(names gpu_decode:: gpu_sampling:: gpu_lora::gpu_dropout gpu_lora::gpu_lora gpu_lora::gpu_adapters gpu_lora::gpu_nf4_dequantization_equals \
        gpu_products::gpu_gemms_with_few_rows gpu_products::gpu_fused_gate_up gpu_kernels::gpu_rms_norm gpu_kernels::gpu_adamw \
        gpu_kernels::gpu_swiglu gpu_kernels::gpu_sums gpu_kernels::gpu_normal gpu_training::gpu_attention_heads gpu_training::gpu_output_head \
        gpu_training::gpu_bfloat16_output_head gpu_training::gpu_embedding_gradients \
        gpu_all_reduce::gpu_two_ranks_sum_rows) || exit 1
      # Those of src/kernels by the beginnings of their names, not the libraries'.
      kernels='adamw_|adapt_|add_|all_reduce_|combine|dropout_|embed_|filter|gate_up_|head_|heads_|mark_seen|mask_|merge_attention'
      kernels+='|next_tokens|nf4_|normal_|note_tokens|paged_attention_|plan_attention|product|rms_norm_|rope_write_kv_|sample_'
      kernels+='|sum_of_squares_|swiglu_'
      for test in $selected; do
        case $test in *two_ranks*) [ "$gpus" -ge 2 ] || continue ;; esac
        for tool in memcheck racecheck; do
          # racecheck itself fails within one of cuBLAS's bfloat16 products there. It looks at shared memory, which the head's
          # kernels use in one place, the same for both kinds.
          [ "$tool-$test" = racecheck-gpu_training::gpu_bfloat16_output_head_equals_the_cpus ] && continue
          name="$tool-${test//::/.}"
          # Libraries ask the driver for what it may not have, and live with its answer: no error of a kernel.
          check "$name" 150 env COLO_GRPO_TEST_SMALL=1 compute-sanitizer --tool "$tool" --error-exitcode 9 --report-api-errors no \
            --target-processes all --kernel-name "regex=$kernels" "$tests" --ignored --exact "$test" --test-threads=1
          # A filter that the tool does not understand ends with 0, too.
          grep -q SUMMARY "$output/$name.log" || { echo "$name checked nothing" >&2; exit 1; }
        done
      done
      ;;
    demo)
      for nproc in 1 2; do
        [ "$nproc" -le "$gpus" ] || continue
        for dtype in float32 bfloat16; do
          check "demo-$nproc-$dtype" 150 "$program" --nproc "$nproc" --config configs/tiny-cpu.toml device=cuda \
            "dtype=$dtype" "tensor_parallel_size=$nproc" "per_device_train_batch_size=$((256 / nproc))" \
            "output_dir=$output/run-$nproc-$dtype"
          grep 'held-out' "$output/demo-$nproc-$dtype.log" | sed "s/^/demo, $nproc GPU, $dtype: /"
        done
      done
      ;;
    hashes) # to be kept and compared with another program's
      check hashes 400 python3 scripts/hashes.py "$program" --device cuda
      grep -v '^#' "$output/hashes.log"
      ;;
    bench)
      train=(bench train --device cuda --sequences 16 --sequence-len 1024 --max-tokens-per-micro-batch 16384
        --gradient-checkpointing selective --steps 5)
      generate=(bench generate --device cuda --prompts 8 --group 8 --prompt-len 128 --completion-len 64 --repeats 1)
      if [ "$gpus" = 1 ]; then
        for preset in qwen2.5-0.5b qwen2.5-1.5b; do
          check "bench-train-$preset" 100 "$program" "${train[@]}" --preset $preset
          check "bench-generate-$preset" 100 "$program" "${generate[@]}" --preset $preset
        done
      else
        for preset in qwen2.5-1.5b qwen2.5-7b; do
          for stage in 2 3; do
            check "bench-train-$preset-zero$stage" 150 "$program" "${train[@]}" --preset $preset --nproc "$gpus" --zero-stage $stage
          done
          check "bench-generate-$preset-tp$gpus" 150 "$program" "${generate[@]}" --preset $preset --nproc "$gpus" --tp "$gpus"
        done
      fi
      check bench-sleep-wake 100 "$program" bench sleep_wake --device cuda --nproc "$gpus" --gib 64 --offload-gib 4 --cycles 20
      [ "$gpus" = 1 ] || check bench-collectives 100 "$program" bench collectives --device cuda --nproc "$gpus"
      step=(bench step --device cuda --nproc "$gpus" --prompts $((8 * gpus)) --group 8 --prompt-len 512 --completion-len 256 --steps 2)
      if [ "$gpus" = 1 ]; then
        check bench-step-qwen2.5-1.5b 150 "$program" "${step[@]}" --preset qwen2.5-1.5b --beta 0.04
      else
        for stage in 2 3; do
          check "bench-step-qwen2.5-7b-zero$stage" 150 "$program" "${step[@]}" --preset qwen2.5-7b --beta 0.04 --zero-stage $stage
        done
      fi
      grep -h '"benchmark"' "$output"/bench-*.log
      ;;
  esac
done
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
printf '%s\n' "${table[@]}"
exit $failed
