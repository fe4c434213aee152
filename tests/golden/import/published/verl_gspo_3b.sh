#!/usr/bin/env bash
# Keys and values of verl's GSPO example for Qwen2.5-3B.
loss_mode=gspo
mini=128
if [ "$loss_mode" = "gspo" ]; then aggregation="seq-mean-token-mean"; else aggregation="token-mean"; fi
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.actor.policy_loss.loss_mode=${loss_mode} \
    data.train_files="['/data/gsm8k/train.parquet']" data.val_files="['/data/gsm8k/test.parquet']" data.shuffle=true \
    data.prompt_key=prompt data.truncation='error' data.filter_overlong_prompts=true data.train_batch_size=512 \
    data.max_prompt_length=2048 data.max_response_length=8192 actor_rollout_ref.rollout.n=16 algorithm.use_kl_in_reward=false \
    actor_rollout_ref.actor.use_kl_loss=false actor_rollout_ref.actor.clip_ratio_low=0.0003 \
    actor_rollout_ref.actor.clip_ratio_high=0.0004 actor_rollout_ref.actor.loss_agg_mode=${aggregation} \
    actor_rollout_ref.model.path="Qwen/Qwen2.5-3B-Instruct" actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.05 actor_rollout_ref.actor.optim.weight_decay=0.1 \
    actor_rollout_ref.actor.ppo_mini_batch_size=$mini actor_rollout_ref.actor.entropy_coeff=0 \
    algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=2.0 \
    trainer.total_epochs=10 trainer.total_training_steps=500 trainer.n_gpus_per_node=${GPUS_PER_NODE:-8} \
    trainer.test_freq=10 trainer.save_freq=10
