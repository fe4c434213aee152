//! Tests the whole network against an independent one under autograd, in float64; tests recomputation and tensor-parallel slices.

pub(super) mod delta_net;
mod gradients;
pub(super) mod reference;
mod shapes;

use std::path::Path;
use std::sync::Arc;

use serde_json::Value;
use tch::{Device, Kind, Tensor};

use super::*;
use crate::config::GradientCheckpointing;
use crate::ops::embedding;
use crate::ops::linear::{self, Onto};
use crate::ops::testing::{assert_close, leaf, rand};
use crate::ranks::Collective;
use crate::ranks::testing::threads;
use crate::torch::accumulation_kind;
use delta_net::{hybrid, hybrid_with_experts, with_delta_heads};
use shapes::{others, with_shared_expert};

pub(super) use shapes::{families, in_parallel, with_experts, with_heads};

const TEMPERATURE: f64 = 0.8;

fn random_flats(table: &ParamTable) -> Vec<Tensor> {
    table.units.iter().map(|layout| rand(&[layout.len as i64]) * 0.4).collect()
}

fn random_sequences(spec: &ModelSpec, lens: &[i64]) -> Vec<Vec<i64>> {
    let ids = |&len| Tensor::randint(spec.vocab_size as i64, [len], (Kind::Int64, Device::Cpu));
    lens.iter().map(|len| Vec::try_from(ids(len)).unwrap()).collect()
}

/// Sequences packed one after the other; all rows except the last of each are scored.
struct Batch {
    ids: Tensor,
    positions: Tensor,
    cu_seqlens: Vec<i64>,
    rows: Tensor,
    targets: Tensor,
}

impl Batch {
    fn new(sequences: &[Vec<i64>]) -> Self {
        let mut cu_seqlens = vec![0];
        let (mut positions, mut rows, mut targets) = (Vec::new(), Vec::new(), Vec::new());
        for ids in sequences {
            let (start, len) = (cu_seqlens[cu_seqlens.len() - 1], ids.len() as i64);
            positions.extend(0..len);
            rows.extend(start..start + len - 1);
            targets.extend_from_slice(&ids[1..]);
            cu_seqlens.push(start + len);
        }
        let tensor = |values: &[i64]| Tensor::from_slice(values);
        let (ids, positions) = (tensor(&sequences.concat()), tensor(&positions));
        Self { ids, positions, cu_seqlens, rows: tensor(&rows), targets: tensor(&targets) }
    }
}

/// Returns (log-probabilities, entropies, gradients of the flat units) of sum(logprobs * a + entropies * b).
fn run(
    table: &ParamTable,
    flats: &[Tensor],
    batch: &Batch,
    (a, b): (&Tensor, &Tensor),
    keep: GradientCheckpointing,
) -> (Tensor, Tensor, Vec<Tensor>) {
    let grads = flats.iter().map(Tensor::zeros_like).collect();
    run_onto(table, flats, batch, (a, b), keep, (grads, Onto::Sum))
}

/// Like [`run`]; gradients are added to sums or overwrite uninitialized memory.
fn run_onto(
    table: &ParamTable,
    flats: &[Tensor],
    batch: &Batch,
    (a, b): (&Tensor, &Tensor),
    keep: GradientCheckpointing,
    (grads, onto): (Vec<Tensor>, Onto),
) -> (Tensor, Tensor, Vec<Tensor>) {
    let spec = &*table.spec;
    let views = |flats: &[Tensor], onto| {
        let (layouts, last) = (&table.units, flats.len() - 1);
        let view = match onto {
            Onto::Nothing => BlockParams::begin_gradients,
            Onto::Sum => |spec: &_, layout: &_, flat: &_| Ok(BlockParams::view(spec, layout, flat)),
        };
        let blocks: Vec<_> = (1..last).map(|i| view(spec, &layouts[i], &flats[i]).unwrap()).collect();
        (EmbeddingParams::view(&layouts[0], &flats[0]), blocks, HeadParams::view(&layouts[last], &flats[last]))
    };
    if onto == Onto::Nothing {
        table.unit(Unit::Embedding).zero_others(&grads[0], &|_| spec.tie_word_embeddings).unwrap();
        let is_head = |name| name == ParamName::LmHead;
        table.unit(Unit::Head).zero_others(&grads[grads.len() - 1], &is_head).unwrap();
    }
    let (embed, blocks, head) = views(flats, Onto::Sum);
    let (mut d_embed, d_blocks, mut d_head) = views(&grads, onto);
    let ropes = spec.ropes().rows(&batch.positions, flats[0].kind());
    let ropes = ropes.unwrap();
    let ctx = BlockContext::new(spec, &ropes, None, None);
    let packed = PackedMixer::new(spec, &batch.cu_seqlens, Device::Cpu);

    let rows = embedding::forward(&batch.ids, &embed.table).unwrap();
    let mut x = spec.scale_embedding(rows, embed.table.kind()).unwrap();
    let mut saved = Vec::new();
    for (layer, w) in blocks.iter().enumerate() {
        let (y, kept) = block_forward(&ctx, layer, w, &x, &packed, Some(keep)).unwrap();
        saved.push(kept.unwrap());
        x = y;
    }
    let scoring = Scoring {
        targets: &batch.targets,
        top: crate::ops::head::TopTokens::Nothing,
        temperature: TEMPERATURE * spec.logits_scaling,
        norm: spec.norm(),
        exact: None,
    };
    let output = head.lm_head.as_ref().unwrap_or(&embed.table);
    let scored = head_forward(&head, output, &x.index_select(0, &batch.rows), &scoring, true).unwrap();

    let d_table = d_head.lm_head.as_mut().unwrap_or(&mut d_embed.table);
    let d_norm = &mut d_head.final_norm;
    let into = Some(HeadSums { final_norm: d_norm, table: Some(d_table), onto });
    let d_rows = head_backward(&head, output, &scoring, scored.saved, a, Some(b), None, into).unwrap();
    let mut dx = embedding::select_backward(&d_rows, &batch.rows, x.size()[0]).unwrap();
    for ((w, kept), mut d_w) in blocks.iter().zip(saved).zip(d_blocks).rev() {
        dx = block_backward(&ctx, w, &dx, kept, &packed, &mut d_w).unwrap();
    }
    let dx = spec.scale_embedding(dx, flats[0].kind()).unwrap();
    embedding::accumulate(&dx, &batch.ids, &mut d_embed.table).unwrap();
    (scored.logprobs, scored.entropy, grads)
}

/// The expected numbers come from transformers, through scripts/golden.py.
#[test]
fn logits_equal_transformers() {
    for name in [
        "qwen2_tied",
        "qwen2_untied",
        "qwen2_yarn",
        "qwen3",
        "llama3",
        "mistral",
        "olmo2",
        "smollm3",
        "smollm3_window",
        "granite",
        "gemma3",
        "gemma3_vision",
        "qwen2_window",
        "glm",
        "glm4",
        "glm4_moe",
        "gpt_oss",
        "gpt_oss_mxfp4",
        "phi3",
        "phi3_window",
        "ministral",
        "mistral3_vision",
        "qwen2_moe",
        "qwen2_moe_mixed",
        "qwen3_moe",
        "qwen3_moe_mixed",
        "qwen3_5",
        "qwen3_5_vision",
        "qwen3_5_moe",
        "qwen3_next",
    ] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
        let numbers: Value = serde_json::from_slice(&std::fs::read(folder.join("golden.json")).unwrap()).unwrap();
        let prompts: Vec<Vec<i64>> = serde_json::from_value(numbers["input_ids"].clone()).unwrap();
        let close = |got: &Tensor, key: &str, index: Option<usize>| {
            let numbers = index.map_or(&numbers[key], |index| &numbers[key][index]);
            let rows: Vec<Vec<f32>> = match numbers[0].is_array() {
                true => serde_json::from_value(numbers.clone()).unwrap(),
                false => vec![serde_json::from_value(numbers.clone()).unwrap()],
            };
            let expected = Tensor::from_slice(&rows.concat()).view_as(got);
            let error = (got - expected).abs().max().double_value(&[]);
            assert!(error < 1e-4, "{name}, {key}: off by {error}");
        };
        let logits = logits(&folder, &prompts);
        for (index, logits) in logits.iter().enumerate() {
            close(&logits.get(-1), "last_logits", Some(index));
            let alone = self::logits(&folder, &prompts[index..=index]).remove(0);
            let apart = (&alone - logits).abs().max().double_value(&[]) / alone.abs().max().double_value(&[]);
            assert!(apart < 1e-5, "{name}: packed with others it differs by {apart}");
        }
        close(&logits[numbers["all_logits_of"].as_u64().unwrap() as usize], "all_logits", None);
    }
}

/// The logits [T, V] of each prompt, computed in one packed batch with a folder's weights in float32.
fn logits(folder: &Path, prompts: &[Vec<i64>]) -> Vec<Tensor> {
    let spec = Arc::new(ModelSpec::from_folder(folder).unwrap());
    let (files, table) = (WeightFiles::open(folder, spec.clone()).unwrap(), ParamTable::new(spec.clone(), 1));
    let unit = |unit| (table.unit(unit), files.read_unit(table.unit(unit), Kind::Float).unwrap());
    let batch = Batch::new(prompts);
    let ropes = spec.ropes().rows(&batch.positions, Kind::Float);
    let ropes = ropes.unwrap();
    let ctx = BlockContext::new(&spec, &ropes, None, None);
    let packed = PackedMixer::new(&spec, &batch.cu_seqlens, Device::Cpu);
    let (layout, flat) = unit(Unit::Embedding);
    let embed = EmbeddingParams::view(layout, &flat);
    let rows = embedding::forward(&batch.ids, &embed.table).unwrap();
    let mut x = spec.scale_embedding(rows, embed.table.kind()).unwrap();
    for layer in 0..spec.num_layers() {
        let (layout, flat) = unit(Unit::Block(layer));
        x = block_forward(&ctx, layer, &BlockParams::view(&spec, layout, &flat), &x, &packed, None).unwrap().0;
    }
    let (layout, flat) = unit(Unit::Head);
    let head = HeadParams::view(layout, &flat);
    let (normed, _) = spec.norm().forward(&x, &head.final_norm).unwrap();
    let all = linear::forward(&normed, head.lm_head.as_ref().unwrap_or(&embed.table), None).unwrap();
    let all = spec.scale_logits(all).unwrap();
    batch.cu_seqlens.windows(2).map(|bounds| all.narrow(0, bounds[0], bounds[1] - bounds[0])).collect()
}

#[test]
fn every_model_family_matches_autograd() {
    for (name, spec) in families().into_iter().chain(with_experts()).chain(others()) {
        let table = ParamTable::new(Arc::new(spec), 1);
        let flats: Vec<Tensor> = random_flats(&table).iter().map(leaf).collect();
        let sequences = random_sequences(&table.spec, &[5, 21, 2, 9]);
        let (logprobs, entropies) = reference::scores(&table, &flats, &sequences, TEMPERATURE);
        let (a, b) = (rand(&logprobs.size()), rand(&logprobs.size()));
        let scalar = (&logprobs * &a + &entropies * &b).sum(None);
        let expected = Tensor::run_backward(&[scalar], &flats, false, false);

        let detached: Vec<Tensor> = flats.iter().map(Tensor::detach).collect();
        let got = run(&table, &detached, &Batch::new(&sequences), (&a, &b), GradientCheckpointing::None);
        assert_close(&got.0, &logprobs);
        assert_close(&got.1, &entropies);
        for ((layout, got), expected) in table.units.iter().zip(&got.2).zip(&expected) {
            for param in &layout.params {
                println!("{name}: {} {:?}", layout.unit, param.name);
                let view = |flat| layout.view(param.name, flat).unwrap();
                assert_close(&view(got), &view(expected));
            }
        }
    }
}

/// Uses sequences that fill whole chunks of gated delta nets, so that chunks can be kept, and sequences that do not.
#[test]
fn gradient_checkpointing_changes_no_bit() {
    use GradientCheckpointing::{Full, KeepChunks, Selective};
    for (name, spec) in families().into_iter().chain(with_experts()).chain(others()) {
        let table = ParamTable::new(Arc::new(spec), 1);
        let flats: Vec<Tensor> = random_flats(&table).iter().map(|flat| flat.to_kind(Kind::Float)).collect();
        for lens in [&[150, 21, 2, 30][..], &[190, 64, 61]] {
            let batch = Batch::new(&random_sequences(&table.spec, lens));
            let (a, b) = (rand(&batch.rows.size()), rand(&batch.rows.size()));
            let run = |keep| run(&table, &flats, &batch, (&a, &b), keep);
            let whole = run(GradientCheckpointing::None);
            for keep in [KeepChunks, Selective, Full] {
                let other = run(keep);
                assert!(whole.0.equal(&other.0), "{name} {keep:?}");
                assert!(whole.2.iter().zip(&other.2).all(|(a, b)| a.equal(b)), "{name} {keep:?}");
            }
        }
    }
}

/// A mixer for sequences of 3 and 2 tokens and for the slices of `tp_size` ranks.
pub(super) fn slice_mixer(spec: &ModelSpec, tp_size: usize) -> PackedMixer {
    let slice = spec.clone().map_attention(|_, attention| *attention = attention.tp_slice(tp_size));
    PackedMixer::new(&slice, &[0, 3, 5], Device::Cpu)
}

/// Runs one block on `tp_size` ranks, each with its slice prepared for a format's GEMMs; returns every rank's output.
pub(super) fn sliced_block(
    format: &'static dyn Format,
    spec: &ModelSpec,
    tp_size: usize,
    flat: &[f64],
    x: &[f64],
) -> Vec<Vec<f64>> {
    let table = ParamTable::new(Arc::new(spec.clone()), 1);
    threads(tp_size, |tp: Arc<dyn Collective>| {
        let whole = BlockParams::view(spec, &table.units[1], &Tensor::from_slice(flat));
        let mut w = whole.tp_slice(tp.rank(), tp_size).unwrap();
        w.prepare(format, &mut |(shape, kind)| Ok(Tensor::f_empty(shape, (kind, Device::Cpu))?)).unwrap();
        let x = Tensor::from_slice(x).view([-1, spec.hidden_size as i64]);
        let positions = Tensor::from_slice(&[0i64, 1, 2, 0, 1]);
        let ropes = spec.ropes().rows(&positions, Kind::Double).unwrap();
        let ctx = BlockContext::new(spec, &ropes, Some(&*tp), None);
        let (y, _) = block_forward(&ctx, 0, &w, &x, &slice_mixer(spec, tp_size), None).unwrap();
        Vec::try_from(y.flatten(0, 1)).unwrap()
    })
}

#[test]
fn tensor_parallel_slices_sum_to_the_block() {
    let [(_, qwen2), (_, qwen3), .., (_, norms_behind)] = families();
    let eight = with_heads(qwen2, 8, 2);
    let [(_, experts), (_, others)] = with_experts();
    let everywhere = |spec: &ModelSpec| {
        let experts = Mlp::Experts(spec.experts().unwrap());
        spec.clone().map_blocks(|_, block| block.mlp = experts)
    };
    let parallel = |num_experts| in_parallel(everywhere(&others), num_experts);
    // The first layer has a gated delta net, or attention with an output gate.
    let hybrid_from = |layer: usize| {
        let mut spec = with_delta_heads(hybrid().1, 4, 8);
        spec.layers.drain(..layer);
        spec
    };
    let (_, with_shared) = with_shared_expert();
    let shared = |is_parallel| in_parallel(everywhere(&with_shared), 8).with_expert_parallel(is_parallel).unwrap();
    let all = [
        (shared(false), vec![2, 4]),
        (shared(true), vec![2, 4]),
        (hybrid_from(0), vec![2, 4]),
        (hybrid_from(1), vec![2, 4]),
        (hybrid_with_experts().1, vec![2]),
        (eight, vec![2, 4]),
        (qwen3, vec![2, 4]),
        (norms_behind, vec![2, 4]),
        (experts, vec![2, 4]),
        (parallel(6), vec![2]),
        (parallel(8), vec![2, 4]),
    ];
    for (spec, tp_sizes) in all {
        let table = ParamTable::new(Arc::new(spec.clone()), 1);
        let host = |t: Tensor| Vec::<f64>::try_from(t).unwrap();
        let flat = host(rand(&[table.units[1].len as i64]) * 0.4);
        let x = host(rand(&[5 * spec.hidden_size as i64]));
        let whole = sliced_block(&Plain, &spec, 1, &flat, &x);
        for tp_size in tp_sizes {
            spec.validate_tp(tp_size).unwrap();
            for y in sliced_block(&Plain, &spec, tp_size, &flat, &x) {
                assert_close(&Tensor::from_slice(&y), &Tensor::from_slice(&whole[0]));
            }
        }
    }
}

/// If all experts are equal and their weights add up to 1, the router's choice does not matter.
#[test]
fn equal_experts_give_the_dense_model() {
    let [(_, spec), _] = with_experts();
    let expert = spec.experts().unwrap().expert;
    let dense = spec.clone().map_blocks(|_, block| block.mlp = Mlp::Dense(expert));
    let [table, dense_table] = [spec, dense].map(|spec| ParamTable::new(Arc::new(spec), 1));
    let flats = random_flats(&table);
    let dense_flats = table.units.iter().zip(&dense_table.units).zip(&flats).map(|((layout, dense), flat)| {
        let dense_flat = Tensor::zeros([dense.len as i64], (Kind::Double, Device::Cpu));
        for param in &dense.params {
            let whole = layout.view(param.name, flat).unwrap();
            let mut target = dense.view(param.name, &dense_flat).unwrap();
            if whole.dim() == 3 {
                whole.shallow_clone().copy_(&whole.get(0).expand_as(&whole));
                target.copy_(&whole.get(0));
            } else {
                target.copy_(&whole);
            }
        }
        dense_flat
    });
    let dense_flats: Vec<Tensor> = dense_flats.collect();
    let batch = Batch::new(&random_sequences(&table.spec, &[5, 21, 2]));
    let (a, b) = (rand(&batch.rows.size()), rand(&batch.rows.size()));
    let keep = GradientCheckpointing::None;
    let (got, expected) =
        (run(&table, &flats, &batch, (&a, &b), keep), run(&dense_table, &dense_flats, &batch, (&a, &b), keep));
    assert_close(&got.0, &expected.0);
    for ((layout, dense), (got, expected)) in
        table.units.iter().zip(&dense_table.units).zip(got.2.iter().zip(&expected.2))
    {
        for param in &dense.params {
            let got = layout.view(param.name, got).unwrap();
            let got = if got.dim() == 3 { got.sum_dim_intlist(0, false, None) } else { got };
            assert_close(&got, &dense.view(param.name, expected).unwrap());
        }
    }
}
