//! Every public item of the library in use, by theme; `examples/reinforce.rs` is a program that trains. What needs neither model nor GPU
//! runs: `cargo run --example public_items -- configs/tiny-cpu.toml`
#![allow(clippy::print_stdout)]

use std::sync::Arc;

use colo_grpo::grpo::{
    AdvantageConfig, AdvantageStats, Aggregate, BatchStats, Denominators, DeviceStats, Distillation, EntropyControl,
    EntropyTerm, LossConfig, LossFunction, LossInput, LossOutput, LossStats, TopDivergence, TopLogprobs, age_stats,
    assign_advantages, has_signal, kl_of_sequence, policy_loss, rewards_are_equal,
};
use colo_grpo::reward::{
    FailureKind, RewardFunction, RewardInput, RewardPool, RewardTicket, answer_reader, check_reply, exact_answer,
    format, numeric_answer,
};
use colo_grpo::signatures::*;
use colo_grpo::{
    Colocated, Config, Error, ExitCode, MemoryPlan, MeteredAllocator, Result, RolloutEngine, Trainer, Trajectory, World,
};
use tch::Tensor;

/// As the program has it: work on strangers' files is held to a budget of memory.
#[global_allocator]
static ALLOCATOR: MeteredAllocator = MeteredAllocator;

fn main() {
    colo_grpo::main(run)
}

fn run() -> Result<()> {
    let file = std::env::args().nth(1).unwrap_or_else(|| "configs/tiny-cpu.toml".to_owned());
    let config = configuration(&file)?;
    let world = World::single();
    println!("{:?}", metrics(&*world.group())?);
    ranks(&world)?;
    advantages()?;
    loss()?;
    rewards(&config)
}

/// A configuration, its tables and the words that keys take.
fn configuration(file: &str) -> Result<Config> {
    let arguments = ["lora.r=8".to_owned(), "tensor_parallel_size=1".to_owned()];
    let config = Config::load(Some(file.as_ref()), &arguments).inspect_err(|error: &Error| {
        assert!(matches!(error.exit_code(), ExitCode::Configuration | ExitCode::Files));
    })?;
    let Config { data, curriculum, tools, split, objective, distillation, .. } = &config;
    let sampling: (&DataConfig, &CurriculumConfig, &ToolsConfig, &SplitConfig) = (data, curriculum, tools, split);
    let losses: (&ObjectiveConfig, &DistillationConfig) = (objective, distillation);
    let Config { optimizer, lora, reward, rewards, report, best, output, saving, supervision, .. } = &config;
    let training: (&OptimizerConfig, &LoraConfig, &BestConfig) = (optimizer, lora, best);
    let around: (&OutputConfig, &SavingConfig, &SupervisionConfig) = (output, saving, supervision);
    let heartbeat: &HeartbeatConfig = &supervision.heartbeat;
    let scoring: (&RewardConfig, &ProcessRewards, &ReportConfig) = (reward, rewards, report);
    let steps: (&MuonConfig, &LrSchedulerKwargs) = (&optimizer.muon, &optimizer.lr_scheduler_kwargs);
    let arguments: (&CodeConfig, &RewardArguments, &CommandLine) =
        (&reward.code, &reward.arguments, &reward.code.command);
    let lists: (&Files, &TemplateVariables, &ReportTo) =
        (&data.train_file, &data.chat_template_kwargs, &report.report_to);
    let others: (&EnvironmentFactories, &TargetModules) = (&tools.environment_factory, &lora.target_modules);
    println!(
        "{around:?}\n{heartbeat:?}\n{sampling:?}\n{losses:?}\n{training:?}\n{scoring:?}\n{steps:?}\n{arguments:?}\n{lists:?}\n{others:?}"
    );

    let batch: BatchPlan = config.validate_world(1)?;
    let Roles { num_trainers, num_generators } = batch.roles;
    let uneven: &Option<PipelinePartition> = &config.pipeline_partition;
    println!("stages of layers {uneven:?}");
    let engine = EngineShape { tensor_parallel_size: 2, pipeline_parallel_size: 1 };
    WorldSize { ranks: 8, local_ranks: 8 }.check_engines(0, engine)?;
    println!("{num_trainers} ranks train, {num_generators} generate; at most {MAX_ASYNC_STEPS} steps ahead");
    let named: Option<Sources> = Config::sources(Some(file.as_ref()), &[]);
    println!("{:?}", named.map(|named| named.model));
    Ok(config)
}

/// A reward of a process or a service, and the rows of a supervised run.
#[allow(dead_code)]
fn tables_of(reward: &ProcessReward, supervised: &SftConfig) -> (Option<String>, Files) {
    (reward.url.clone(), supervised.data.train_file.clone())
}

/// Values that ranks reduce.
fn metrics(group: &dyn Collective) -> Result<MetricValues> {
    let mut step = StepMetrics::default();
    step.set("loss", 0.5, Reduce::Sum);
    step.set_mean("completions/mean_length", 120.0, 4.0);
    step.reduce(group)
}

/// A world's groups, and how other worlds are joined.
fn ranks(world: &World) -> Result<()> {
    let mesh: Mesh = world.mesh(1, 1)?;
    let mut sum = Tensor::from_slice(&[1.0_f32, 2.0]);
    mesh.dp.all_reduce(&mut sum, ReduceOp::Sum)?;
    let options = WorldOptions { backend: Backend::Shm, ..WorldOptions::default() };
    if let Some(env) = WorkerEnv::from_env()? {
        println!("rank {} of {}", World::join(&env, options)?.rank(), env.world_size);
    }
    Ok(())
}

/// A prompt with two completions, one of them right.
fn group() -> RolloutGroup {
    let prompt = Prompt { id: 0, text: "2 + 3 =".to_owned(), token_ids: vec![5, 6], columns: Arc::default() };
    let completion = |reward: f32| {
        let mut completion = Trajectory { reward: Some(reward), ..Trajectory::default() };
        completion.push_sampled(7, -0.5, 0);
        completion.finish_reason = Some(FinishReason::Eos);
        completion.environment =
            Some(Arc::new(EnvironmentEnd { class: "Calculator".into(), ..EnvironmentEnd::default() }));
        let experts: &RoutedExperts = &completion.routed_experts;
        assert_eq!(experts.num_tokens(), 0, "no model with experts");
        completion
    };
    RolloutGroup { completions: vec![completion(1.0), completion(0.0)], ..RolloutGroup::new(prompt) }
}

fn advantages() -> Result<()> {
    let mut groups = [group()];
    let stats: AdvantageStats = assign_advantages(&mut groups, &AdvantageConfig::default(), None)?;
    let reward: BatchStats = stats.reward;
    let sequences: Vec<Sequence> = groups[0]
        .completions
        .iter()
        .map(|completion| Sequence::of_trajectory(&groups[0].prompt.token_ids, completion))
        .collect();
    assert!(has_signal(&groups[0], None) && !rewards_are_equal(&groups[0]));
    println!(
        "mean reward {}, advantages {:?}",
        reward.mean(),
        sequences.iter().map(|one| one.advantage).collect::<Vec<_>>()
    );
    Ok(())
}

/// Two sequences of two tokens and one, beside a teacher's two most probable tokens.
fn loss() -> Result<()> {
    let top = TopDivergence { alpha: 1.0, adds_tail: true };
    let distillation = Distillation { weight: 0.5, clip_max: None, top: Some(top) };
    let objective = ObjectiveConfig { entropy_coef: 0.01, ..ObjectiveConfig::default() };
    let config = LossConfig { distillation: Some(distillation), objective, ..LossConfig::default() };
    let floats = |values: &[f32]| Tensor::from_slice(values);
    let (logprobs, teacher, entropy) =
        (floats(&[-0.5, -1.0, -0.25]), floats(&[-0.4, -1.1, -0.3]), floats(&[1.0, 2.0, 0.5]));
    let (own_top, teacher_top) =
        (floats(&[-0.7, -1.0, -0.9, -1.2, -0.5, -2.0]).view([3, 2]), floats(&[-0.8; 6]).view([3, 2]));
    let input = LossInput {
        logprobs: &logprobs,
        old_logprobs: None,
        ref_logprobs: None,
        teacher_logprobs: Some(&teacher),
        top: Some(TopLogprobs { logprobs: &own_top, teacher_logprobs: &teacher_top }),
        rollout_logprobs: None,
        advantages: &floats(&[1.0, -1.0]),
        bnpo_divisors: None,
        sequence_of_token: &Tensor::from_slice(&[0_i64, 0, 1]),
        entropy: Some(&entropy),
        entropy_term: Some(EntropyTerm::of_highest(vec![1.0, 2.0, 0.5], 1.0, 0.01)),
    };
    let denominators =
        Denominators { num_sequences: 2.0, num_tokens: 3.0, num_update_tokens: 3.0, num_sequence_tokens: 7.0 };
    let LossOutput { loss, dlogprobs, stats, .. } = policy_loss(&input, &config, &denominators)?;
    println!("loss {}, gradient {dlogprobs}", loss.double_value(&[]));
    let ages: DeviceStats = age_stats(&input, &config, Some(&Tensor::from_slice(&[0_i64, 1, 1])), 1)?;
    let read: LossStats = stats.join(ages)?.read()?;
    for (name, aggregate) in read.entries() {
        let aggregate: &Aggregate = aggregate;
        println!("{name} {}", aggregate.value());
    }
    let mut control = EntropyControl::new(&config);
    control.observe(1.2, &config);
    println!("KL {}", kl_of_sequence(KlEstimator::K3, &[-0.5], &[-0.6]));
    Ok(())
}

fn rewards(config: &Config) -> Result<()> {
    let brevity: RewardFunction = Arc::new(|input: &RewardInput<'_>| Ok(1.0 / (1.0 + input.token_ids.len() as f32)));
    let mut own = config.clone();
    own.reward_funcs = vec!["brevity".to_owned()];
    let mut pool = RewardPool::with_functions(&own, &[("brevity", brevity)])?;
    let mut groups = [group()];
    let ticket: RewardTicket = pool.submit(&groups[0]);
    pool.wait(&mut groups, &[ticket])?;
    pool.score(&mut groups)?; // both at once
    let failures: Vec<(String, FailureKind, usize)> = pool.take_failures();
    println!("{:?} gave {:?}; failures {failures:?}", pool.names(), groups[0].completions[0].rewards);

    let number = regex::Regex::new(r"(\d+)$").expect("a regular expression");
    let columns = serde_json::Map::from_iter([("answer".to_owned(), "5".into())]);
    let right =
        [exact_answer("it is 5", &number, &columns, "answer")?, numeric_answer("5", &number, &columns, "answer")?];
    println!("{right:?} {}", format("it is 5", &number));
    let read = answer_reader("numeric_answer", &config.reward)?;
    println!("{:?} {:?}", read.and_then(|read| read("it is 5")), check_reply(b"{}", 2));
    Ok(())
}

/// Requests under way on an engine that is awake: one with a structure, whose tokens come with the most probable others.
#[allow(dead_code)]
fn sampled(engine: &mut RolloutEngine<'_>, prompt: &Prompt) -> Result<Vec<Trajectory>> {
    let structure = Some(Structure::Regex("[0-9]{1,4}".to_owned()));
    let params = SamplingParams { structure, top_logprobs: 2, num_generations: 1, ..SamplingParams::default() };
    let mut session: Session<'_> = engine.session()?;
    let id: RequestId = session.submit(Request {
        prompt_id: prompt.id,
        token_ids: prompt.token_ids.clone(),
        first_step: 0,
        first_sample: 0,
        params: Arc::new(params),
        begun: Vec::new(),
        adapter: None,
    })?;
    while session.has_work() {
        for event in session.step()? {
            if let Event::Token { token_id, top_logprobs, .. } = event {
                let first: Option<&TokenLogprob> = top_logprobs.first();
                println!("{token_id}, the most probable {first:?}");
            }
        }
    }
    let load: SessionLoad = session.load();
    println!("{} of {} blocks are free", load.num_free_blocks, load.num_blocks);
    let completions = session.completions(id)?;
    session.close()?;
    let unfinished = vec![RolloutGroup::new(prompt.clone())];
    let Rollout { complete, stats, .. } = engine.generate_first(unfinished, 1, &SamplingParams::default(), |_| ())?;
    let stats: EngineStats = stats;
    let StageTimes { computing, waiting } = stats.stage;
    println!("{} groups, {} tokens", complete.len(), stats.num_generated_tokens);
    println!("this stage of layers computed for {computing:?} and waited for {waiting:?}");
    println!("lengths of a benchmark: {}", LengthSpread { shortest: 1, longest: 64, long_tailed: true }.length(7));
    Ok(completions)
}

/// A trainer step by step.
#[allow(dead_code)]
fn trained(config: Config, world: Arc<World>) -> Result<RunSummary> {
    let builder: TrainerBuilder = Trainer::builder(config, world);
    let on_step = |report: &StepReport<'_>| {
        println!("step {} of {}", report.step, report.max_steps);
        Ok(())
    };
    let mut trainer = builder.on_step(on_step).build()?;
    trainer.run_with(|trainer| {
        trainer.start()?;
        let batch: TrainingBatch = trainer.rollout()?;
        let metrics = trainer.update(batch)?;
        trainer.finish_step(&metrics)?;
        trainer.finish()
    })
}

/// The parts that a trainer is made of.
#[allow(dead_code)]
fn colocated(learner: Learner, engine: Engine, slices: EngineSlices) -> Colocated {
    let (policy, reference): (&Policy, Option<&Reference>) = (learner.policy(), learner.reference());
    println!("weights of version {}, a reference model: {}", policy.version(), reference.is_some());
    Colocated::new(learner, engine, slices)
}

/// An update of sequences, shown to nobody, with a loss of the program's own.
#[allow(dead_code)]
fn updated(
    colocated: &mut Colocated,
    sequences: &[Sequence],
    options: UpdateOptions,
    loss: LossFunction,
) -> Result<f64> {
    let options = UpdateOptions { loss_function: Some(loss), ..options };
    let moves: Option<ReferenceSync> = options.reference_sync;
    let progress: &dyn UpdateProgress = &();
    let apart: Vec<Divergence> = colocated.divergences(sequences, &options, progress)?;
    let outcome: UpdateOutcome = colocated.update(sequences, &options, progress)?;
    println!("{} sequences, {moves:?}, gradient norm {}", apart.len(), outcome.grad_norm);
    Ok(outcome.loss)
}

/// The memory of every phase, for ranks that do both halves.
#[allow(dead_code)]
fn planned(input: PlanInput<'_>) -> Result<usize> {
    let room = Room { available_bytes: 80 << 30, swap_bytes: None };
    let plan = MemoryPlan::new(&PlanInput { role: Role::Both, room, ..input }, &|_| Ok(0))?;
    plan.classes.iter().for_each(|class: &ClassBytes| println!("{}: {} bytes", class.class, class.train_bytes));
    Ok(plan.peak_bytes())
}

/// The words that keys take.
#[allow(dead_code)]
fn words() -> Vec<&'static [&'static str]> {
    let of_runs =
        [Device::NAMES, Mode::NAMES, Dtype::NAMES, ResidualDtype::NAMES, CarriedKv::NAMES, RouterReplay::NAMES];
    let of_data = [PromptFormat::NAMES, DynamicSampling::NAMES, RewardBatch::NAMES, SandboxLayer::NAMES];
    let of_losses = [LossType::NAMES, KlEstimator::NAMES, DistillationMode::NAMES, ReferenceModel::NAMES];
    let of_scales = [AdvantageEstimator::NAMES, MultiObjectiveAggregation::NAMES, ScaleRewards::NAMES];
    let of_ratios = [ImportanceSamplingLevel::NAMES, ImportanceSamplingMode::NAMES];
    let of_updates = [LrSchedulerType::NAMES, OptimizerName::NAMES, AdjustLr::NAMES, GradientCheckpointing::NAMES];
    let of_memory = [OptimizerResidency::NAMES, ReferenceResidency::NAMES, TargetModule::NAMES];
    let of_kinds = [
        MixedPrecision::NAMES,
        Quantization::NAMES,
        RolloutQuantization::NAMES,
        KvCacheDtype::NAMES,
        StateDtype::NAMES,
    ];
    let others = [ReportService::NAMES, ToolCallParser::NAMES];
    let chosen: AutoOr<usize> = AutoOr::Auto;
    println!("{chosen:?}");
    let all = [&of_runs[..], &of_data, &of_losses, &of_scales, &of_ratios, &of_updates, &of_memory, &of_kinds, &others];
    all.concat()
}
