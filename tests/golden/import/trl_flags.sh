#!/usr/bin/env bash
# GRPO on GSM8K in the form of TRL's documentation: flags on top of a recipe.
MODEL=Qwen/Qwen2.5-0.5B-Instruct
trl grpo --config mixture.yaml \
    --model_name_or_path $MODEL \
    --reward_funcs accuracy_reward think_format_reward \
    --num_generations 16 \
    --learning_rate 2e-5 \
    --use_peft \
    --lora_r 32 \
    --per_device_train_batch_size=16 \
    --num_processes 4 2>&1 | tee log --seed 5
