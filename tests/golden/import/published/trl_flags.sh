# Flags of TRL's command line, with arguments of the sampler.
accelerate launch --num_processes 4 examples/scripts/grpo_math.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \
    --dataset_name trl-lib/DeepMath-103K --reward_funcs accuracy_reward think_format_reward --learning_rate 1e-5 \
    --max_completion_length 1024 --num_generations 8 --use_vllm --vllm_mode colocate --log_completions \
    --generation_kwargs '{"top_p": 0.95, "stop": ["</answer>"], "temperature": 0.9}' --eval_strategy steps --eval_steps 50 "$@" 2>&1 > log
