//! Experts on a GPU: compares routing and GEMMs with the CPU's operations, tokens of small models with the CPU's engine, log-probabilities
//! with the trainer's; and measures times for the shapes of Qwen3-30B-A3B.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use colo_grpo::internal::config::{KvCacheDtype, RolloutQuantization, StateDtype};
use colo_grpo::internal::cuda::kernels::{
    self, ExpertTile, RouteOptions, RouteScores, RouteSizes, RoutedTokens, experts_combine, experts_down,
    experts_gate_up, route,
};
use colo_grpo::internal::model::{ModelSpec, ParamTable, UnitLayout, WeightFiles};
use colo_grpo::internal::ops::router::{self, RouterOptions, RouterScores, Routing};
use colo_grpo::internal::ranks::{Backend, Mesh, World};
use colo_grpo::internal::rollout::{Engine, EngineOptions, SpeculationOptions, kv_block_bytes};
use colo_grpo::internal::serve::Served;
use colo_grpo::internal::torch;
use colo_grpo::internal::types::{Prompt, RolloutGroup, SamplingParams};
use serde_json::json;
use tch::{Device, Kind, Tensor};

use crate::gpu_engine::{Model, sampled_as_trained};
use crate::on_gpu::{GPU, double, gpu, ints, is_small, poison, rand, relative_error, seconds};
use crate::ranks;
use crate::rollout::words;

/// Sizes of one test case.
#[derive(Debug, Clone)]
pub struct Case {
    pub tokens: i64,
    pub hidden: i64,
    pub width: i64,
    pub experts: i64,
    pub k: i64,
    pub own: Range<usize>,
    pub kind: Kind,
}

impl Case {
    fn options(&self) -> RouterOptions {
        RouterOptions {
            num_experts_per_tok: self.k as usize,
            norm_topk_prob: self.tokens % 2 == 1,
            scores: RouterScores::Softmax,
        }
    }

    pub fn routed(&self, tile_rows: usize) -> RoutedTokens {
        let sizes = RouteSizes::new(self.tokens as usize, self.experts as usize, self.k as usize);
        let flat = |len: usize, kind| Tensor::zeros([len as i64], (kind, GPU));
        RoutedTokens {
            experts: ints(&vec![-7; (self.tokens * self.k) as usize]).view([self.tokens, self.k]),
            weights: poison(&[self.tokens, self.k], Kind::Float),
            order: ints(&vec![-7; (self.tokens * self.k) as usize]),
            tiles: flat(sizes.tiles * 4, Kind::Int).view([-1, 4]),
            logits: flat(sizes.logits, Kind::Float),
            counters: flat(sizes.counters, Kind::Int),
            num_experts: self.experts as usize,
            own: self.own.clone(),
            tile_rows,
        }
    }
}

pub fn case([tokens, hidden, width, experts, k]: [i64; 5], own: Range<usize>, kind: Kind) -> Case {
    Case { tokens, hidden, width, experts, k, own, kind }
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for kind in [Kind::BFloat16, Kind::Float] {
        cases.extend([
            case([1, 64, 32, 8, 2], 0..8, kind),
            case([33, 128, 192, 8, 2], 0..8, kind),
            case([70, 328, 72, 5, 3], 0..5, kind),
            case([300, 512, 96, 128, 8], 0..128, kind),
            case([257, 520, 40, 300, 8], 100..200, kind),
            case([1, 64, 32, 512, 8], 0..512, kind),
            case([40, 64, 8, 512, 1], 128..256, kind),
        ]);
        if !is_small() {
            cases.push(case([256, 2048, 768, 128, 8], 0..128, kind));
            cases.push(case([3000, 2048, 768, 16, 4], 0..16, kind));
        }
    }
    cases
}

/// Chosen experts, weights, recorded routes and tiles of every token. If two probabilities are closer than rounding, either expert is accepted.
#[test]
#[ignore = "needs a GPU"]
fn gpu_expert_routing_equals_the_cpus() {
    kernels::prepare(0, 1).unwrap();
    for case in cases() {
        let Case { tokens, hidden, experts, k, .. } = case;
        let (x, w) = (rand(&[tokens, hidden], case.kind), rand(&[experts, hidden], case.kind) * 0.1);
        let routed = case.routed(32);
        let padding: Vec<i64> = (0..tokens).map(|token| if token % 7 == 3 { -1 } else { token }).collect();
        let stride = 3 * k;
        let recorded: Vec<i64> = (0..tokens * stride)
            .map(|at| if at / stride % 5 == 1 { (at / stride * 3 + at % stride * 2) % experts } else { -1 })
            .collect();
        let shorts = |values: &[i64]| Tensor::from_slice(values).to_kind(Kind::Int16).to_device(GPU);
        let (slots, record) = (ints(&padding), shorts(&vec![-9; (tokens * stride) as usize]));
        let replayed = shorts(&recorded);
        for recorded in [None, Some(replayed.narrow(0, k, (tokens * stride) - k))] {
            let options = RouteOptions {
                scores: RouteScores::Softmax,
                normalised: case.options().norm_topk_prob,
                slots: Some(&slots),
                recorded: recorded.as_ref(),
                record: Some(&record.narrow(0, k, tokens * stride - k)),
                stride: stride as usize,
            };
            (0..2).for_each(|_| route(&gpu(&x), &gpu(&w), &routed, &options).unwrap());
            let probs = router::probabilities(&double(&x), &double(&w), None, case.options()).unwrap();
            let got = routed.experts.to_device(Device::Cpu).to_kind(Kind::Int64);
            let mut expected = router::choose(&probs, None, case.options()).unwrap();
            let kept = |values: &[i64]| Tensor::from_slice(values).view([tokens, -1]);
            if recorded.is_some() {
                let taken = kept(&replayed_rows(&replayed)).narrow(1, k, k);
                expected = taken.where_self(&taken.ge(0), &expected);
            }
            let is_there = Tensor::from_slice(&padding).ge(0).unsqueeze(1);
            let of =
                |experts: &Tensor| Routing::new(probs.shallow_clone(), experts.clamp_min(0), case.options()).unwrap();
            let own_probs = |experts: &Tensor| probs.gather(1, &experts.clamp_min(0), false);
            let gaps = (own_probs(&got) - own_probs(&expected)) * is_there.to_kind(Kind::Double);
            assert!(gaps.abs().max().double_value(&[]) < 1e-5, "{case:?}: other experts than the CPU's");
            assert!(got.ge(0).eq_tensor(&is_there).all().int64_value(&[]) == 1, "{case:?}: padding");
            let weights = of(&got).weights * is_there.to_kind(Kind::Double);
            assert!(relative_error(&routed.weights, &weights) < 1e-5, "{case:?}: weights");
            let noted = record.to_device(Device::Cpu).to_kind(Kind::Int64).view([tokens, stride]);
            assert!(noted.narrow(1, k, k).equal(&got), "{case:?}: the record");
            assert_eq!(noted.narrow(1, 0, k).ne(-9).any().int64_value(&[]), 0, "{case:?}: another layer's record");
            check_tiles(&case, &routed, &got);
        }
    }
}

fn replayed_rows(recorded: &Tensor) -> Vec<i64> {
    torch::i64_vec(&recorded.to_device(Device::Cpu).to_kind(Kind::Int64)).unwrap()
}

/// Asserts that every choice of one of this rank's experts is in one tile of that expert, in order.
fn check_tiles(case: &Case, routed: &RoutedTokens, chosen: &Tensor) {
    let list = |t: &Tensor| torch::i64_vec(&t.to_device(Device::Cpu).to_kind(Kind::Int64).reshape([-1])).unwrap();
    let (chosen, order, tiles) = (list(chosen), list(&routed.order), list(&routed.tiles));
    let mut seen = Vec::new();
    for tile in tiles.chunks(4).skip(1).take(tiles[0] as usize) {
        let [expert, first, count, _] = *tile else { unreachable!() };
        assert!(first as usize == seen.len() && (1..=routed.tile_rows as i64).contains(&count), "{case:?}: {tile:?}");
        for &choice in &order[first as usize..(first + count) as usize] {
            assert_eq!(chosen[choice as usize], expert + case.own.start as i64, "{case:?}: {tile:?}");
            seen.push((expert, choice));
        }
    }
    let own = chosen.iter().filter(|expert| (case.own.start as i64..case.own.end as i64).contains(expert)).count();
    assert!(seen.is_sorted() && seen.len() == own, "{case:?}: {} of {own} choices", seen.len());
    assert_eq!(routed.counters.ne(0).any().int64_value(&[]), 0, "{case:?}: counters");
}

/// Compares gate and up, down, and the weighted sum with float64, for slices of wider weights. All tile sizes give the same bits.
#[test]
#[ignore = "needs a GPU"]
fn gpu_experts_equal_the_cpus() {
    kernels::prepare(0, 1).unwrap();
    for case in cases() {
        let Case { tokens, hidden, width, experts, k, kind, .. } = case;
        let (x, router) = (rand(&[tokens, hidden], kind), rand(&[experts, hidden], kind) * 0.1);
        let own = case.own.len() as i64;
        let gate_up = (rand(&[own, 2 * width + 16, hidden], kind) * 0.05).narrow(1, 16, 2 * width);
        let down = (rand(&[own, hidden, width + 8], kind) * 0.05).narrow(2, 8, width);
        let on_gpu = |wide: &Tensor, dim: i64, first: i64| {
            let mut shape = wide.size();
            shape[dim as usize] += first;
            let whole = Tensor::zeros(shape.as_slice(), (kind, GPU));
            let slice = whole.narrow(dim, first, wide.size()[dim as usize]);
            slice.shallow_clone().copy_(&gpu(wide));
            slice
        };
        let (w_gate_up, w_down) = (on_gpu(&gate_up, 1, 16), on_gpu(&down, 2, 8));
        let tiles: Vec<ExpertTile> = match kind {
            Kind::BFloat16 => ExpertTile::ALL.to_vec(),
            kind => vec![ExpertTile::of(1, 1, 1, kind, 0).unwrap()],
        };
        let mut first: Option<Tensor> = None;
        for tile in tiles {
            let routed = case.routed(tile.rows);
            let options = RouteOptions {
                normalised: case.options().norm_topk_prob,
                stride: k as usize,
                ..RouteOptions::default()
            };
            route(&gpu(&x), &gpu(&router), &routed, &options).unwrap();
            let act = poison(&[tokens * k, width], kind);
            let (rows, y) = (poison(&[tokens * k, hidden], kind), poison(&[tokens, hidden], kind));
            experts_gate_up(tile, &gpu(&x), &w_gate_up, None, &routed, &act).unwrap();
            experts_down(tile, &act, &w_down, None, &routed, &rows).unwrap();
            experts_combine(&rows, &routed, None, &y).unwrap();
            if let Some(first) = &first {
                assert!(y.equal(first), "{case:?}: {} has other bits", tile.name());
                continue;
            }
            let expected = expected(&case, &x, (&gate_up, &down), &routed);
            let error = relative_error(&y, &expected);
            let bound = if kind == Kind::BFloat16 { 1e-2 } else { 1e-5 };
            assert!(error < bound, "{case:?}, tile {}: {error:e}", tile.name());
            first = Some(y);
        }
    }
}

/// All tokens go to one expert, possibly of another rank; and no expert belongs to this rank.
#[test]
#[ignore = "needs a GPU"]
fn gpu_experts_without_rows_are_supported() {
    kernels::prepare(0, 1).unwrap();
    for (experts, chosen, own) in [(16, 3, 0..16), (512, 511, 0..512), (16, 3, 4..8), (512, 0, 256..512)] {
        for kind in [Kind::BFloat16, Kind::Float] {
            let case = case([300, 64, 32, experts, 1], own.clone(), kind);
            let tiles = match kind {
                Kind::BFloat16 => ExpertTile::ALL.to_vec(),
                kind => vec![ExpertTile::of(1, 1, 1, kind, 0).unwrap()],
            };
            let (x, router) = (rand(&[300, 64], kind), rand(&[experts, 64], kind));
            let gate_up = rand(&[own.len() as i64, 64, 64], kind) * 0.1;
            let down = rand(&[own.len() as i64, 64, 32], kind) * 0.1;
            let recorded = Tensor::full([300], chosen, (Kind::Int16, GPU));
            for tile in tiles {
                let routed = case.routed(tile.rows);
                let options = RouteOptions { recorded: Some(&recorded), stride: 1, ..RouteOptions::default() };
                route(&gpu(&x), &gpu(&router), &routed, &options).unwrap();
                check_tiles(&case, &routed, &Tensor::full([300, 1], chosen, (Kind::Int64, Device::Cpu)));
                let act = poison(&[300, 32], kind);
                let (rows, y) = (poison(&[300, 64], kind), poison(&[300, 64], kind));
                experts_gate_up(tile, &gpu(&x), &gpu(&gate_up), None, &routed, &act).unwrap();
                experts_down(tile, &act, &gpu(&down), None, &routed, &rows).unwrap();
                experts_combine(&rows, &routed, None, &y).unwrap();
                let what = format!("{case:?}, tile {}", tile.name());
                if own.contains(&(chosen as usize)) {
                    let error = relative_error(&y, &expected(&case, &x, (&gate_up, &down), &routed));
                    assert!(error < if kind == Kind::BFloat16 { 1e-2 } else { 1e-5 }, "{what}: {error:e}");
                } else {
                    assert_eq!(y.ne(0).any().int64_value(&[]), 0, "{what}");
                }
            }
        }
    }
}

/// The sum of this rank's experts' outputs in float64, for the experts that the GPU has chosen.
fn expected(case: &Case, x: &Tensor, (gate_up, down): (&Tensor, &Tensor), routed: &RoutedTokens) -> Tensor {
    let (x, weights) = (double(x), double(&routed.weights));
    let chosen = routed.experts.to_device(Device::Cpu).to_kind(Kind::Int64);
    let y = Tensor::zeros([case.tokens, case.hidden], (Kind::Double, Device::Cpu));
    for (index, expert) in case.own.clone().enumerate() {
        let is_chosen = chosen.eq(expert as i64);
        let of_token = (&weights * is_chosen.to_kind(Kind::Double)).sum_dim_intlist(1, false, Kind::Double);
        let tokens = is_chosen.any_dim(1, false).nonzero().view(-1);
        let pairs = x.index_select(0, &tokens).matmul(&double(&gate_up.get(index as i64)).tr());
        let pairs = pairs.view([-1, case.width, 2]);
        let (gate, up) = (pairs.select(2, 0), pairs.select(2, 1));
        let out = (gate.silu() * up).matmul(&double(&down.get(index as i64)).tr());
        let _ = y.shallow_clone().index_add_(0, &tokens, &(out * of_token.index_select(0, &tokens).unsqueeze(1)));
    }
    y
}

/// A token's output does not depend on the other tokens in the batch.
#[test]
#[ignore = "needs a GPU"]
fn gpu_experts_are_independent_of_the_batch_bit_for_bit() {
    kernels::prepare(0, 1).unwrap();
    let whole = case([700, 512, 96, 16, 4], 0..16, Kind::BFloat16);
    let (x, router) = (gpu(&rand(&[700, 512], whole.kind)), gpu(&(rand(&[16, 512], whole.kind) * 0.1)));
    let gate_up = gpu(&(rand(&[16, 192, 512], whole.kind) * 0.05));
    let down = gpu(&(rand(&[16, 512, 96], whole.kind) * 0.05));
    let run = |tokens: i64| {
        let case = Case { tokens, ..whole.clone() };
        let tile = ExpertTile::of(tokens as usize, 4, 16, whole.kind, 0).unwrap();
        let (x, routed) = (x.narrow(0, 0, tokens), case.routed(tile.rows));
        let options = RouteOptions { normalised: true, stride: 4, ..RouteOptions::default() };
        route(&x, &router, &routed, &options).unwrap();
        let act = poison(&[tokens * 4, 96], whole.kind);
        let (rows, y) = (poison(&[tokens * 4, 512], whole.kind), poison(&[tokens, 512], whole.kind));
        experts_gate_up(tile, &x, &gate_up, None, &routed, &act).unwrap();
        experts_down(tile, &act, &down, None, &routed, &rows).unwrap();
        experts_combine(&rows, &routed, None, &y).unwrap();
        y
    };
    let expected = run(700);
    for tokens in [1, 2, 15, 16, 17, 100, 333] {
        assert!(run(tokens).equal(&expected.narrow(0, 0, tokens)), "{tokens} tokens");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_experts_sample_what_the_cpu_does() {
    let world = Arc::new(World::single_on(Backend::Nccl).unwrap());
    let mesh = world.mesh(1, 1).unwrap();
    for name in ["qwen3_moe", "qwen3_moe_mixed", "qwen2_moe", "qwen3_5_moe", "qwen3_next", "glm4_moe", "gpt_oss"] {
        samples_what_transformers_does((&world, &mesh), false, name);
    }
}

#[test]
#[ignore = "needs two GPUs"]
fn gpu_two_ranks_of_experts_sample_what_the_cpu_does() {
    ranks::run_on_gpus(2, "gpu_experts::gpu_two_ranks_of_experts_sample_what_the_cpu_does", |world| {
        let world = Arc::new(world);
        let mesh = world.mesh(2, 2).unwrap(); // all engines share it: a world has room for few
        for name in ["qwen3_moe", "qwen3_moe_mixed", "qwen2_moe", "qwen3_5_moe", "qwen3_next", "glm4_moe", "gpt_oss"] {
            samples_what_transformers_does((&world, &mesh), false, name);
        }
        samples_what_transformers_does((&world, &mesh), true, "qwen3_moe_mixed");
    });
}

/// Smallest unit in which GPU memory is mapped, in bytes.
const PAGE_BYTES: usize = 2 << 20;

/// Greedy tokens in float32 equal those of transformers, also with chunked prompts and after preemption; recorded experts equal the CPU engine's.
fn samples_what_transformers_does((world, mesh): (&Arc<World>, &Mesh), is_parallel: bool, name: &str) {
    let tp_size = mesh.tp.size();
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    let numbers: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(folder.join("golden.json")).unwrap()).unwrap();
    let lists = |key: &str| -> Vec<Vec<u32>> { serde_json::from_value(numbers[key].clone()).unwrap() };
    let (prompts, expected) = (lists("input_ids"), lists("greedy"));
    let prompt = |(id, token_ids)| Prompt { id: id as u64, text: String::new(), token_ids, columns: Arc::default() };
    let prompts: Vec<Prompt> = prompts.into_iter().enumerate().map(prompt).collect();
    let spec = ModelSpec::from_folder(&folder).unwrap().with_expert_parallel(is_parallel).unwrap();
    let spec = Arc::new(ModelSpec { eos_token_ids: Vec::new(), ..spec });
    let files = WeightFiles::open(&folder, spec.clone()).unwrap();
    let params = SamplingParams {
        num_generations: 64,
        temperature: 0.0,
        max_completion_length: expected[0].len(),
        ..SamplingParams::default()
    };
    let options = |device| EngineOptions {
        kv_cache_bytes: 4000 * kv_block_bytes(&spec, 1, 16, Kind::Float),
        block_size: 16,
        max_num_seqs: 256,
        max_num_batched_tokens: 64,
        max_model_length: 64,
        kind: Kind::Float,
        residual: Kind::Float,
        device,
        quantization: RolloutQuantization::None,
        kv_cache_dtype: KvCacheDtype::Auto,
        state_dtype: StateDtype::Float32,
        strict: false,
        exact: false,
        records_experts: true,
        speculation: SpeculationOptions::NONE,
    };
    let generate = |world: &Arc<World>, mesh: &Mesh, options: EngineOptions| {
        let tokenizer = Arc::new(words(spec.vocab_size));
        let engine = Engine::new(spec.clone(), tokenizer, options, mesh.tp.clone()).unwrap();
        let source = |layout: &UnitLayout| files.read_unit(layout, Kind::Float);
        let table = Arc::new(ParamTable::new(spec.clone(), 1));
        let mut served = Served::new(world.clone(), table, engine, &source).unwrap();
        let own = if world.rank() == 0 { &prompts[..] } else { &[] };
        let run = served.with_engine(|rollout| {
            let groups = rollout.generate(own, &params, |_| ())?;
            Ok((groups, rollout.stats().num_preemptions))
        });
        run.unwrap()
    };
    let host = Arc::new(World::single());
    let (on_cpu, _) = generate(&host, &host.mesh(1, 1).unwrap(), options(Device::Cpu));
    let plain = options(world.device());
    let few_bytes = kv_block_bytes(&spec, tp_size, 16, Kind::Float); // rounded up to a page, which still holds hundreds of blocks
    let holds_all = PAGE_BYTES / few_bytes >= plain.max_num_seqs * plain.max_model_length / plain.block_size;
    let cases = [
        (plain.clone(), false),
        (EngineOptions { max_num_batched_tokens: 7, ..plain.clone() }, false),
        (EngineOptions { kv_cache_bytes: few_bytes, ..plain }, !holds_all),
    ];
    for (options, preempts) in cases {
        let (groups, preemptions) = generate(world, mesh, options);
        println!("{}", json!({"test": "experts", "model": name, "tp": tp_size, "preemptions": preemptions}));
        assert!(!preempts || preemptions > 0 || world.rank() > 0, "{name}: nothing was computed again");
        let completions = |groups: &[RolloutGroup]| -> Vec<_> {
            let all = groups.iter().flat_map(|group| group.completions.clone());
            all.map(|completion| (completion.token_ids, completion.routed_experts)).collect()
        };
        for ((ids, experts), (own_ids, own_experts)) in completions(&groups).iter().zip(&completions(&on_cpu)) {
            assert_eq!((ids, experts), (own_ids, own_experts), "{name}, tensor parallel over {tp_size}");
        }
        for (group, expected) in groups.iter().zip(&expected) {
            assert!(group.completions.iter().all(|completion| &completion.token_ids == expected), "{name}");
        }
    }
}

/// With the sampler's routes, the trainer's log-probabilities are as close as for dense models.
#[test]
#[ignore = "needs a GPU"]
fn gpu_sampled_logprobs_of_experts_match_the_trainer() {
    let spec = ModelSpec::preset("qwen3-30b-a3b").unwrap().with_num_layers(2);
    let model = Model::of(spec);
    sampled_as_trained(&model, "qwen3-30b-a3b, 2 layers", [1.5, 1.5]);
}

/// Measures one layer of Qwen3-30B-A3B with every tile size: microseconds, and bytes of used weights per second.
#[test]
#[ignore = "needs a GPU"]
fn gpu_experts_read_weights_at_memory_bandwidth() {
    kernels::prepare(0, 1).unwrap();
    let (experts, hidden, width, k, kind) = (128, 2048, 768, 8, Kind::BFloat16);
    let random = |shape: &[i64]| Tensor::randn(shape, (kind, GPU)) * 0.05;
    let router = random(&[experts, hidden]);
    let (gate_up, down) = (random(&[experts, 2 * width, hidden]), random(&[experts, hidden, width]));
    for tokens in [1, 8, 32, 64, 128, 256, 512, 8192] {
        let x = Tensor::randn([tokens, hidden], (kind, GPU));
        let case = case([tokens, hidden, width, experts, k], 0..experts as usize, kind);
        let act = Tensor::zeros([tokens * k, width], (kind, GPU));
        let (rows, y) =
            (Tensor::zeros([tokens * k, hidden], (kind, GPU)), Tensor::zeros([tokens, hidden], (kind, GPU)));
        let mut best: Option<f64> = None;
        for tile in ExpertTile::ALL {
            if tokens > 1000 && tile.rows < 64 || tokens < 1000 && tile.rows > 64 {
                continue;
            }
            let routed = case.routed(tile.rows);
            let options = RouteOptions { normalised: true, stride: 8, ..RouteOptions::default() };
            let us = |run: &mut dyn FnMut()| 1e6 * seconds(run);
            let routing = us(&mut || route(&x, &router, &routed, &options).unwrap());
            let first = us(&mut || experts_gate_up(tile, &x, &gate_up, None, &routed, &act).unwrap());
            let second = us(&mut || experts_down(tile, &act, &down, None, &routed, &rows).unwrap());
            let sum = us(&mut || experts_combine(&rows, &routed, None, &y).unwrap());
            let chosen = torch::i64_vec(&routed.experts.to_device(Device::Cpu).to_kind(Kind::Int64).view(-1)).unwrap();
            let hit = chosen.iter().collect::<std::collections::BTreeSet<_>>().len() as f64;
            let (bytes, flop) = (2.0 * hit * (hidden * width) as f64, 2.0 * (tokens * k * hidden * width) as f64);
            let round = |value: f64| (10.0 * value).round() / 10.0;
            println!(
                "{}",
                json!({"test": "experts", "tokens": tokens, "tile": tile.name(), "hit": hit, "route_us": round(routing),
                    "gate_up_us": round(first), "gate_up_gb_s": round(2e-3 * bytes / first),
                    "down_us": round(second), "down_gb_s": round(1e-3 * bytes / second),
                    "combine_us": round(sum), "tflop_s": round(3e-6 * flop / (first + second))})
            );
            best = Some(best.unwrap_or(f64::INFINITY).min((first + second) / (3.0 * bytes)));
        }
        let gb_s = 1e-3 / best.expect("a tile");
        assert!(tokens != 256 || gb_s > 1000.0, "{tokens} tokens: {gb_s} GB/s");
    }
}
