# Keys and values of verl's multi-turn example for Qwen2.5-3B, whose Hydra file is a project's own.
PROJECT_DIR="$(pwd)"
CONFIG_PATH="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/config"
python3 -m verl.trainer.main_ppo --config-path="$CONFIG_PATH" --config-name='gsm8k_multiturn_grpo' algorithm.adv_estimator=grpo \
    data.train_batch_size=256 data.max_response_length=1024 actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct \
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.rollout.n=16 \
    custom_reward_function.path="$PROJECT_DIR/rewards/gsm8k.py" custom_reward_function.name=score \
    actor_rollout_ref.rollout.multi_turn.tool_config_path="$PROJECT_DIR/config/tool_config/gsm8k_tool_config.yaml" \
    data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=$HOME/data/gsm8k/test.parquet trainer.total_epochs=15 trainer.save_freq=-1 trainer.test_freq=20 $@
