//! Plans and trains the run of a draft.

use super::*;

/// The run of a draft.
pub(super) struct DraftedRun {
    pub(super) config: Config,
    world: WorldSize,
    placement: Placement,
    model: Arc<ModelSpec>,
    has: Vec<Circumstance>,
}

impl DraftedRun {
    pub(super) fn new(solver: &Solver, draft: &RunDraft) -> Result<Self> {
        let mut draft = draft.clone();
        let world = draft.sized();
        let model = solver.model(&draft).expect("the solver has found one").clone();
        let model = Arc::new(
            (*model).clone().with_expert_parallel(draft.set.get("enable_expert_parallel") == Some(&json!(true)))?,
        );
        let config = draft.config()?;
        let placement = match config.model.device {
            Device::Cuda => Placement::on_other_gpus(config.model.dtype),
            _ => Placement::new(Device::Cpu, config.model.dtype)?,
        };
        let own = draft.has.iter().copied().filter(|one| !is_of_model(*one));
        combination(&config, &model, placement, world).in_circumstances(own).check()?;
        Ok(Self { config, world, placement, model, has: draft.has })
    }

    pub(super) fn preflight(&self) -> Result<Preflight> {
        let tokenizer = Arc::new(Tokenizer::from_folder(TEACHER)?);
        let room = Room { available_bytes: 1 << 36, swap_bytes: self.placement.on_cuda.then_some(1 << 36) };
        let model = OpenModel { spec: self.model.clone(), tokenizer, has_adapters: false };
        Preflight::of_model(&self.config, model, self.placement, self.world, room)
    }

    /// Whether its training needs neither a GPU, other nodes, nor Python.
    pub(super) fn is_trainable(&self) -> bool {
        let tools = &self.config.tools;
        !self.placement.on_cuda
            && self.world.ranks == self.world.local_ranks
            && !tools.takes_turns()
            && tools.environment.is_none()
    }

    /// Trains a few steps on threads.
    pub(super) fn train(&self) -> Result<()> {
        let outcomes = testing::worlds(self.world.ranks, |world| {
            let mut trainer = self.trainer(Arc::new(world))?;
            (0..NUM_STEPS).try_for_each(|_| self.step(&mut trainer))
        });
        outcomes.into_iter().collect()
    }

    fn trainer(&self, world: Arc<World>) -> Result<Trainer> {
        let config = self.config.clone();
        let prompt = |id: u64| Prompt {
            id,
            text: "a".into(),
            token_ids: vec![3, 4 + (id % 16) as u32],
            columns: Arc::new(
                [("prompt", json!("a")), ("privileged_context", json!("b"))]
                    .map(|(name, value)| (name.to_owned(), value))
                    .into_iter()
                    .collect(),
            ),
        };
        let parts = TrainerParts {
            preflight: self.preflight()?,
            weights: &|layout| init_unit(layout, 3, Kind::Float),
            rewards: RewardPool::with_functions(&config, &[])?,
            tools: None,
            rows: rows::TrainingRows::made(Dataset::new((0..64).map(prompt).collect())),
            source: ModelSource { base: config.model.model_name_or_path.clone(), adapters: None },
            checkpoint: None,
            claim: None,
            writes_files: false,
        };
        let mut trainer = world.agree(construction::assemble(config, world.clone(), parts))?;
        if self.has.contains(&Circumstance::OwnLoss) {
            let sum =
                |input: &crate::grpo::LossInput<'_>, _: &_| -> Result<Tensor> { Ok(input.logprobs.sum(Kind::Float)) };
            trainer.functions.loss = Some(LossFunction::new(sum));
        }
        Ok(trainer)
    }

    fn step(&self, trainer: &mut Trainer) -> Result<()> {
        if !self.has.contains(&Circumstance::OwnLoop) {
            return trainer.train_step().map(|_| ());
        }
        let prompts = trainer.next_prompts()?;
        let params = trainer.sampling_params();
        let groups = trainer.with_rollout(|engine| engine.generate(&prompts, &params, |_| ()))?;
        let batch = trainer.score(groups)?;
        trainer.update(batch).map(|_| ())
    }
}
