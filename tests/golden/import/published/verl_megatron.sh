# Keys and values of verl's GRPO example for Qwen2-7B with Megatron: Hydra's file is verl's own.
train_files="['$HOME/data/gsm8k/train.parquet', '$HOME/data/math/train.parquet']"
python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml'\
    algorithm.adv_estimator=grpo data.train_files="$train_files" data.val_files="['$HOME/data/math/test.parquet']" data.return_raw_chat="True" data.train_batch_size=1024 \
    data.max_prompt_length=1024 data.max_response_length=1024 data.filter_overlong_prompts=True data.truncation='error' \
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct actor_rollout_ref.model.use_fused_kernels=True \
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.mode=async \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4 actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=2 \
    actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2 algorithm.use_kl_in_reward=False trainer.critic_warmup=0 \
    trainer.logger='["console","wandb"]' trainer.project_name='verl_grpo_example_gsm8k_math' \
    trainer.experiment_name='qwen2_7b_megatron' trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 \
    trainer.test_freq=5 trainer.total_epochs=15 $@
