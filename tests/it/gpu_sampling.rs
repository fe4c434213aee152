//! Compares the sampling kernels with their definitions on the CPU. Ignored without a GPU.

use colo_grpo::internal::cuda::kernels::{self, CANDIDATE_WORDS, Draws};
use colo_grpo::internal::ops::random::RandomKey;
use colo_grpo::internal::torch;
use tch::{Device, Kind, Tensor};

use crate::on_gpu::{GPU, gpu, ints, is_small, poison, rand, random_ints, random_permutation};

#[test]
#[ignore = "needs a GPU"]
fn gpu_sampled_tokens_equal_the_cpus() {
    kernels::prepare(0, 1).unwrap();
    for (rows, vocab, shards) in [(1, 13, 1), (37, 1001, 2), (9, 151_936, 4), (64, 4096, 1), (3, 50_000, 3)] {
        if is_small() && vocab > 5000 {
            continue;
        }
        // At 0.02 a penalty takes logits of 8 and more farther down than a float's exponent reaches.
        for temperature in [0.0, 0.02, 0.7, 1.0] {
            for penalty in [None, Some(1.3f32)] {
                compare_samples(rows, vocab, shards, temperature, penalty);
            }
        }
    }
}

fn compare_samples(rows: i64, vocab: i64, shards: i64, temperature: f32, penalty: Option<f32>) {
    let draws = 2 * rows; // two of every row of logits
    let logits = rand(&[rows, vocab], Kind::Float) * 2.0;
    let row_of: Vec<i64> = (0..draws).map(|draw| draw / 2).collect();
    let keys: Vec<RandomKey> = (0..draws).map(|draw| RandomKey::new(draw as u64, 5)).collect();
    let positions = random_ints(1, 5000, draws);
    let words = (vocab + 31) / 32;
    let seen = Tensor::randint_low(i64::from(i32::MIN), i64::from(i32::MAX), [draws, words], (Kind::Int, Device::Cpu));
    let key_words: Vec<i64> = keys.iter().flat_map(|key| key.words()).map(|word| i64::from(word as i32)).collect();
    let temperatures = Tensor::full([draws], f64::from(temperature), (Kind::Float, GPU));
    let penalties = Tensor::full([draws], f64::from(penalty.unwrap_or(1.0)), (Kind::Float, GPU));
    let (on_keys, on_positions, on_seen) = (ints(&key_words), ints(&positions), gpu(&seen));
    let of_draws = logits.index_select(0, &Tensor::from_slice(&row_of));
    let arguments = Draws {
        keys: &on_keys,
        positions: &on_positions,
        temperatures: &temperatures,
        penalties: penalty.map(|_| (&penalties, &on_seen)),
        cuts: None,
    };
    let parts = kernels::sample_parts(draws as usize, (vocab / shards) as usize) as i64;
    let candidates = poison(&[shards * parts, draws, CANDIDATE_WORDS], Kind::Double);
    for shard in 0..shards {
        let (from, to) = (vocab * shard / shards, vocab * (shard + 1) / shards);
        // As an engine has them: rows of one width for all shards.
        let own = gpu(&of_draws.narrow(1, from, to - from).constant_pad_nd([0, 16])).narrow(1, 0, to - from);
        let mut part = candidates.narrow(0, shard * parts, parts);
        kernels::sample(&own, from as usize, &arguments, &mut part).unwrap();
    }
    let (mut token_ids, mut logprobs) = (ints(&vec![-7; draws as usize]), poison(&[draws], Kind::Float));
    kernels::combine(&candidates, &mut token_ids, &mut logprobs).unwrap();
    let (token_ids, logprobs) = (torch::i64_vec(&token_ids).unwrap(), torch::f32_vec(&logprobs).unwrap());
    let seen = torch::i64_vec(&seen).unwrap();
    for draw in 0..draws as usize {
        let row = torch::f32_vec(&logits.get(row_of[draw])).unwrap();
        let scale = if temperature == 0.0 { 1.0 } else { 1.0 / temperature };
        let mut noise = vec![0.0; vocab as usize];
        if temperature > 0.0 {
            keys[draw].fill_gumbel(positions[draw] as u64, 0, &mut noise);
        }
        let value = |id: usize| {
            let is_seen = seen[draw * words as usize + id / 32] >> (id % 32) & 1 == 1;
            let penalised = |factor: f32| if row[id] > 0.0 { row[id] / factor } else { row[id] * factor };
            scale * if is_seen { penalty.map_or(row[id], penalised) } else { row[id] }
        };
        let perturbed = |id: usize| f64::from(value(id)) + f64::from(noise[id]);
        let best = (0..row.len()).fold(0, |best, id| if perturbed(id) > perturbed(best) { id } else { best });
        let got = token_ids[draw] as usize;
        // The noise's last bit may differ: another id then has to be as good.
        let gap = perturbed(best) - perturbed(got);
        assert!(got == best || (temperature > 0.0 && gap < 1e-6), "{vocab}: {got}, not {best}, {gap:e}");
        let total: f64 = row.iter().map(|&logit| f64::from(logit * scale).exp()).sum();
        let expected = f64::from(row[got] * scale) - total.ln();
        // A logit over the temperature is rounded to float32, or not, where exponents are taken.
        let largest = row.iter().fold(0.0f32, |largest, logit| largest.max((logit * scale).abs()));
        let bound = 1e-5 + f64::from(largest * f32::EPSILON);
        let error = (f64::from(logprobs[draw]) - expected).abs();
        assert!(error < bound, "{vocab}, temperature {temperature}: {} {expected}", logprobs[draw]);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_sampling_flags_nan_logits() {
    kernels::prepare(0, 1).unwrap();
    let logits = rand(&[4, 1000], Kind::Float);
    let _ = logits.get(1).get(700).fill_(f64::NAN);
    let _ = logits.get(2).get(3).fill_(f64::INFINITY);
    let (keys, temperatures) = (ints(&[1; 8]), Tensor::ones([4], (Kind::Float, GPU)));
    let positions = ints(&[5, 5, 5, 0]);
    let draws = Draws { keys: &keys, positions: &positions, temperatures: &temperatures, penalties: None, cuts: None };
    let mut candidates = poison(&[1, 4, CANDIDATE_WORDS], Kind::Double);
    kernels::sample(&gpu(&logits), 0, &draws, &mut candidates).unwrap();
    let (mut token_ids, mut logprobs) = (ints(&[9; 4]), poison(&[4], Kind::Float));
    kernels::combine(&candidates, &mut token_ids, &mut logprobs).unwrap();
    let token_ids = torch::i64_vec(&token_ids).unwrap();
    assert!(token_ids[0] >= 0 && token_ids[1..] == [-1, -1, -1], "{token_ids:?}");
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_sampling_filters_match_their_definitions() {
    kernels::prepare(0, 1).unwrap();
    for (vocab, digits) in [(13, 2.0), (1000, 3.0), (1000, 0.5), (151_936, 3.0)] {
        if is_small() && (vocab > 5000 || digits < 1.0) {
            continue;
        }
        // Coarse logits have many ties.
        let logits = (rand(&[1, vocab], Kind::Float) * 10f64.powf(digits)).round() / 10f64.powf(digits) * 2.0;
        let cases = [
            (0.0, 0, 1.0),
            (0.0, 1, 1.0),
            (0.0, 7, 1.0),
            (0.1, 0, 1.0),
            (0.0, 0, 0.8),
            (0.0, 0, 1e-6),
            (0.02, 300, 0.9),
            (0.0, 40, 0.5),
        ];
        // A sanitizer takes a minute for four cases: those in which every filter cuts, alone and together.
        let cases = if is_small() { &cases[6..] } else { &cases[..] };
        for &(min_p, top_k, top_p) in cases {
            compare_filter(&logits, min_p, top_k, top_p);
        }
    }
}

/// What is hard to cut: ties, rows in order, few ids that may be drawn, values far from zero or all around it.
#[test]
#[ignore = "needs a GPU"]
fn gpu_filters_cut_hostile_rows() {
    kernels::prepare(0, 1).unwrap();
    let vocab = if is_small() { 4099 } else { 50_021 };
    let normal = rand(&[1, vocab], Kind::Float) * 2.0;
    let nothing = normal.full_like(f64::NEG_INFINITY);
    let few = |count: i64| {
        let row = nothing.copy();
        (0..count).for_each(|nth| drop(row.get(0).get((nth * 7919 + 3) % vocab).fill_(nth as f64)));
        row
    };
    let peaked = normal.copy();
    let _ = peaked.get(0).get(vocab / 3).fill_(30.0);
    let (ascending, _) = normal.sort(1, false);
    let signs = Tensor::arange(vocab, (Kind::Float, Device::Cpu)).remainder(2.0).unsqueeze(0);
    let rows = [
        ("equal", normal.full_like(1.5)),
        ("descending", ascending.flip([1])),
        ("ascending", ascending),
        ("one id", few(1)),
        ("five ids", few(5)),
        ("300 ids", few(300)),
        ("peaked", peaked),
        ("zeros of both signs", (signs - 0.5) * 1e-45),
        ("narrow and far from zero", &normal * 0.01 - 1e4),
        ("huge", &normal * 1e30),
    ];
    let cases = [
        (0.0, 1, 1.0),
        (0.0, 50, 0.95),
        (0.0, 256, 1.0),
        (0.0, 257, 1.0),
        (0.0, 1000, 0.9),
        (0.0, vocab + 7, 1.0),
        (0.0, vocab + 7, 0.9),
        (0.0, 0, 0.95),
        (0.0, 0, 1e-6),
        (0.0, 0, 0.9999),
        (1.0, 0, 1.0),
        (1e-4, 0, 0.9),
        (0.3, 20, 0.7),
        (1e-4, 2000, 0.99),
    ];
    for (name, logits) in rows {
        let cases = if is_small() { &cases[4..8] } else { &cases[..] };
        for &(min_p, top_k, top_p) in cases {
            println!("{name}: min-p {min_p}, top-k {top_k}, top-p {top_p}");
            compare_filter(&logits, min_p, top_k, top_p);
        }
    }
}

/// Samples many times from one row: every sampled token must be kept by the filters, and every kept token with enough probability be sampled.
fn compare_filter(logits: &Tensor, min_p: f32, top_k: i64, top_p: f32) {
    const DRAWS: i64 = 256;
    const TEMPERATURE: f32 = 1.3;
    let row = torch::f32_vec(&logits.get(0)).unwrap();
    let value = |id: usize| row[id] * (1.0 / TEMPERATURE);
    let mut order: Vec<usize> = (0..row.len()).filter(|&id| value(id) > f32::NEG_INFINITY).collect();
    order.sort_by(|&a, &b| value(b).total_cmp(&value(a)).then(a.cmp(&b)));
    let top = value(order[0]);
    order.retain(|&id| min_p == 0.0 || value(id) >= top + min_p.ln());
    order.truncate(if top_k > 0 { top_k as usize } else { usize::MAX });
    let mass = |id: &usize| f64::from(value(*id) - top).exp();
    let (total, mut before) = (order.iter().map(mass).sum::<f64>(), 0.0);
    // Rounding may move the edge of the mass by one id.
    let mut edge = None;
    if top_p < 1.0 {
        let kept = order.iter().take_while(|&id| {
            let is_needed = before < f64::from(top_p) * total;
            before += mass(id);
            is_needed
        });
        let kept = kept.count();
        edge = order.get(kept).copied();
        order.truncate(kept);
    }
    let float = |value: f32| Tensor::full([DRAWS], f64::from(value), (Kind::Float, GPU));
    let keys: Vec<i64> = (0..2 * DRAWS).map(|word| word * 77).collect();
    let (keys, positions) = (ints(&keys), ints(&[9; DRAWS as usize]));
    let (temperatures, min_p, top_p) = (float(TEMPERATURE), float(min_p), float(top_p));
    let top_k = ints(&[top_k; DRAWS as usize]);
    let draws = Draws { keys: &keys, positions: &positions, temperatures: &temperatures, penalties: None, cuts: None };
    let filters = kernels::Filters { min_p: &min_p, top_k: &top_k, top_p: &top_p };
    // Rows of two ranks, on one of them and split over both: all have the same logits.
    let mut cuts: Vec<i64> = Vec::new();
    for (shards, rows, first, parts) in [(1, 3, 0, 1), (1, 3, 0, 16), (2, 2, 0, 2), (2, 2, 2, 5)] {
        let own = whole_rows(logits, shards, rows);
        let mut of_rank = ints(&vec![-7; 2 * rows as usize]);
        let mut heads = ints(&[-7]).to_kind(Kind::Int64).repeat([rows, parts, kernels::FILTER_HEAD_WORDS]);
        kernels::filter(&own, row.len(), first, &draws, &filters, &mut heads, &mut of_rank).unwrap();
        cuts.extend(torch::i64_vec(&of_rank).unwrap());
    }
    let is_kept = |cut: &[i64], id: usize| {
        let bits = value(id).to_bits();
        let ordered = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
        let key = cut[0] as u32;
        value(id) > f32::NEG_INFINITY && (ordered > key || (ordered == key && id as i64 <= cut[1]))
    };
    let kept_by = |cut: &[i64]| (0..row.len()).filter(|&id| is_kept(cut, id)).collect::<Vec<usize>>();
    let cut = &cuts[..2];
    let kept = kept_by(cut);
    // Different cuts may keep the same ids. Parts and shards change the order of sums, which may move the edge, if there is one.
    assert!(cuts.chunks(2).all(|other| other == cut || kept_by(other) == kept || edge.is_some()), "{cuts:?}");
    let (logits, cuts) = (gpu(logits).expand([DRAWS, -1], false), ints(&cut.repeat(DRAWS as usize)));
    let mut expected = order.clone();
    expected.sort_unstable();
    let is_near = edge.is_some() && {
        let mut longer: Vec<usize> = order.iter().copied().chain(edge).collect();
        longer.sort_unstable();
        let mut shorter = order[..order.len() - 1].to_vec();
        shorter.sort_unstable();
        kept == longer || kept == shorter
    };
    assert!(kept == expected || is_near, "{} ids kept, not {}", kept.len(), expected.len());
    let mut candidates = poison(&[1, DRAWS, CANDIDATE_WORDS], Kind::Double);
    kernels::sample(&logits, 0, &Draws { cuts: Some(&cuts), ..draws }, &mut candidates).unwrap();
    let (mut token_ids, mut logprobs) = (ints(&[-7; DRAWS as usize]), poison(&[DRAWS], Kind::Float));
    kernels::combine(&candidates, &mut token_ids, &mut logprobs).unwrap();
    assert!(torch::i64_vec(&token_ids).unwrap().into_iter().all(|id| id >= 0 && is_kept(cut, id as usize)));
}

/// `rows` copies of one row of logits [1, V], in the layout after an all-to-all between `shards` ranks.
fn whole_rows(logits: &Tensor, shards: i64, rows: i64) -> Tensor {
    let vocab = logits.size()[1];
    let width = (vocab + shards - 1) / shards + 3;
    let shard = |shard: i64| {
        let (from, to) = (vocab * shard / shards, vocab * (shard + 1) / shards);
        let padded = logits.narrow(1, from, to - from).constant_pad_nd([0, width - (to - from)]);
        padded.expand([rows, -1], false)
    };
    gpu(&Tensor::stack(&(0..shards).map(shard).collect::<Vec<_>>(), 0))
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_seen_token_ids_match_the_history() {
    kernels::prepare(0, 1).unwrap();
    let (vocab, block_size, max_blocks) = (1000usize, 16, 5);
    let lens = [0, 1, 16, 17, 80];
    let table = random_permutation(lens.len() as i64 * max_blocks);
    let history = gpu(&Tensor::full([lens.len() as i64 * max_blocks, block_size], -1, (Kind::Int, Device::Cpu)));
    let words = vocab.div_ceil(32);
    let mut expected = vec![0i64; lens.len() * words];
    for (draw, &len) in lens.iter().enumerate() {
        let ids = random_ints(0, vocab as i64, len);
        let block = |at: i64| table[draw * max_blocks as usize + (at / block_size) as usize];
        let slots: Vec<i64> = (0..len).map(|at| block(at) * block_size + at % block_size).collect();
        // Padding is left out.
        let (ids_and_one, slots_and_none) = ([&ids[..], &[7]].concat(), [&slots[..], &[-1]].concat());
        kernels::note_tokens(&ints(&ids_and_one), &ints(&slots_and_none), &history.view(-1)).unwrap();
        ids.iter().for_each(|id| expected[draw * words + *id as usize / 32] |= 1 << (id % 32));
    }
    let tables = ints(&table).view([-1, max_blocks]);
    let mut seen = ints(&vec![-1; expected.len()]).view([-1, words as i64]);
    kernels::mark_seen(&history, &tables, &ints(&lens), &mut seen).unwrap();
    let got = torch::i64_vec(&seen.view(-1)).unwrap();
    assert_eq!(got.into_iter().map(|word| word & 0xffff_ffff).collect::<Vec<_>>(), expected);
}

/// The allowed tokens may all be in one part of the vocabulary: other parts, and other ranks' shards, have nothing to sample.
#[test]
#[ignore = "needs a GPU"]
fn gpu_sampling_respects_grammar_masks() {
    kernels::prepare(0, 1).unwrap();
    const DRAWS: i64 = 12;
    for (vocab, shards, allowed) in [(50_000, 1, 49_990..50_000), (50_000, 4, 13_000..13_005), (4096, 2, 7..8)] {
        let logits = rand(&[DRAWS, vocab], Kind::Float) * 2.0;
        let left = logits.full_like(f64::NEG_INFINITY);
        let part = |of: &Tensor| of.narrow(1, allowed.start, allowed.end - allowed.start);
        part(&left).copy_(&part(&logits));
        let key_words: Vec<i64> = (0..DRAWS)
            .flat_map(|draw| RandomKey::new(draw as u64, 5).words())
            .map(|word| i64::from(word as i32))
            .collect();
        let (keys, positions) = (ints(&key_words), ints(&random_ints(1, 5000, DRAWS)));
        for temperature in [0.0, 1.0] {
            let temperatures = Tensor::full([DRAWS], temperature, (Kind::Float, GPU));
            let draws =
                Draws { keys: &keys, positions: &positions, temperatures: &temperatures, penalties: None, cuts: None };
            let parts = kernels::sample_parts(DRAWS as usize, (vocab / shards) as usize) as i64;
            let candidates = poison(&[shards * parts, DRAWS, CANDIDATE_WORDS], Kind::Double);
            for shard in 0..shards {
                let (from, len) = (vocab / shards * shard, vocab / shards);
                let own = gpu(&left.narrow(1, from, len).constant_pad_nd([0, 16])).narrow(1, 0, len);
                kernels::sample(&own, from as usize, &draws, &mut candidates.narrow(0, shard * parts, parts)).unwrap();
            }
            let (mut ids, mut logprobs) = (ints(&[-7; DRAWS as usize]), poison(&[DRAWS], Kind::Float));
            kernels::combine(&candidates, &mut ids, &mut logprobs).unwrap();
            let (ids, logprobs) = (torch::i64_vec(&ids).unwrap(), torch::f32_vec(&logprobs).unwrap());
            let expected = part(&logits).log_softmax(1, Kind::Float);
            for (draw, (&id, logprob)) in ids.iter().zip(logprobs).enumerate() {
                assert!(allowed.contains(&id), "{id} of {allowed:?}");
                let of_draw = expected.get(draw as i64);
                let own = of_draw.double_value(&[id - allowed.start]) as f32;
                let is_best = of_draw.double_value(&[id - allowed.start]) == of_draw.max().double_value(&[]);
                assert!(temperature > 0.0 || is_best, "draw {draw} at temperature 0");
                assert!((logprob - own).abs() < 1e-4, "{logprob} instead of {own}");
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_grammar_masks_keep_allowed_logits() {
    kernels::prepare(0, 1).unwrap();
    for (rows, vocab, shards) in [(1i64, 13i64, 1i64), (5, 1001, 2), (3, 50_000, 3), (40, 4096, 1)] {
        let words = (vocab + 31) / 32;
        let masks =
            Tensor::randint_low(i64::from(i32::MIN), i64::from(i32::MAX), [rows, words], (Kind::Int, Device::Cpu));
        let bits = torch::i64_vec(&masks.view(-1)).unwrap();
        // The last row's mask is the first one; every third row has none.
        let places: Vec<i64> = (0..rows).map(|row| if row % 3 == 1 { -1 } else { rows - 1 - row }).collect();
        let logits = rand(&[rows, vocab], Kind::Float);
        for shard in 0..shards {
            let (from, to) = (vocab * shard / shards, vocab * (shard + 1) / shards);
            let whole = gpu(&logits.narrow(1, from, to - from).constant_pad_nd([0, 16]));
            kernels::mask_logits(&whole.narrow(1, 0, to - from), from as usize, &ints(&places), &gpu(&masks)).unwrap();
            let got = whole.to_device(Device::Cpu);
            for (row, &place) in (0..rows).zip(&places) {
                let (got, own) = (torch::f32_vec(&got.get(row)).unwrap(), torch::f32_vec(&logits.get(row)).unwrap());
                for id in from..to {
                    let is_allowed = place < 0 || bits[(place * words + id / 32) as usize] >> (id % 32) & 1 == 1;
                    let expected = if is_allowed { own[id as usize] } else { f32::NEG_INFINITY };
                    assert_eq!(got[(id - from) as usize], expected, "row {row}, id {id} of {vocab}");
                }
                assert!(got[(to - from) as usize..].iter().all(|&padding| padding == 0.0));
            }
        }
    }
    for kind in [Kind::Float, Kind::BFloat16] {
        let (owners, adapters) = ([0, 0, 0, 2, 2, 1, 1, 1, 1], [1, -1, 0, 2, 2, 0, -1]);
        let low = rand(&[adapters.len() as i64, owners.len() as i64], kind);
        let of_row = Tensor::from_slice(&adapters).unsqueeze(1).eq_tensor(&Tensor::from_slice(&owners).unsqueeze(0));
        let got = gpu(&low);
        kernels::mask_low(&got, &ints(&owners), &ints(&adapters)).unwrap();
        assert!(got.to_device(Device::Cpu).equal(&(low * of_row.to_kind(kind))));
    }
}
