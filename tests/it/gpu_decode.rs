//! The decode step's kernels against the CPU's operations in float64. Ignored where there is no GPU.

use colo_grpo::cuda::kernels::{
    self, AttentionPlan, AttentionShape, CANDIDATE_WORDS, Draws, HeadTransform, QkvViews, SharedPrefixes,
};
use colo_grpo::ops::attention::{PagedLayout, kv_rows, paged_decode, write_kv};
use colo_grpo::ops::random::RandomKey;
use colo_grpo::ops::rms_norm;
use colo_grpo::ops::rope::{self, Rope};
use colo_grpo::ops::swiglu::GateUp;
use colo_grpo::torch;
use tch::{Device, Kind, Tensor};

use crate::gpu_kernels::relative_error;

const GPU: Device = Device::Cuda(0);
const KINDS: [(Kind, f64); 2] = [(Kind::Float, 2e-6), (Kind::BFloat16, 5e-3)];

/// Under compute-sanitizer only the small cases.
fn is_small() -> bool {
    std::env::var_os("COLO_GRPO_TEST_SMALL").is_some()
}

fn rand(shape: &[i64], kind: Kind) -> Tensor {
    Tensor::randn(shape, (Kind::Double, Device::Cpu)).to_kind(kind)
}

fn ints(values: &[i64]) -> Tensor {
    Tensor::from_slice(values).to_kind(Kind::Int).to_device(GPU)
}

fn gpu(tensor: &Tensor) -> Tensor {
    tensor.to_device(GPU)
}

fn double(tensor: &Tensor) -> Tensor {
    tensor.to_device(Device::Cpu).to_kind(Kind::Double)
}

/// Not a number everywhere: what a kernel leaves out shows.
fn poison(shape: &[i64], kind: Kind) -> Tensor {
    Tensor::full(shape, f64::NAN, (kind, GPU))
}

fn random_ints(low: i64, high: i64, count: i64) -> Vec<i64> {
    torch::i64_vec(&Tensor::randint_low(low, high, [count], (Kind::Int64, Device::Cpu))).unwrap()
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_rows_norms_and_products_equal_the_cpus() {
    kernels::prepare(0).unwrap();
    for (kind, bound) in KINDS {
        for (tokens, dim) in [(1, 1), (5, 33), (3, 128), (256, 3584), (7, 8192)] {
            if is_small() && tokens * dim > 1000 {
                continue;
            }
            let table = rand(&[40, dim], kind);
            let ids = random_ints(0, 60, tokens);
            let mut x = poison(&[tokens, dim], kind);
            kernels::embed(&ints(&ids), &gpu(&table), 10, &mut x).unwrap();
            let padded = Tensor::cat(&[rand(&[10, dim], kind) * 0.0, table, rand(&[10, dim], kind) * 0.0], 0);
            assert!(double(&x).equal(&double(&padded.index_select(0, &Tensor::from_slice(&ids)))), "{tokens} {dim}");

            let (weight, delta) = (rand(&[dim], kind), rand(&[tokens, dim], kind));
            let mut y = poison(&[tokens, dim], kind);
            for delta in [Some(&delta), None] {
                let sum = delta.map_or_else(|| x.copy(), |delta| &x + gpu(delta));
                kernels::add_rms_norm(&mut x, delta.map(gpu).as_ref(), &gpu(&weight), &mut y, 1e-6).unwrap();
                assert!(x.equal(&sum), "the sum rounds once");
                let (expected, _) = rms_norm::forward(&double(&sum), &double(&weight), 1e-6);
                let error = relative_error(&y, &expected);
                assert!(error < bound, "norm of {kind:?} [{tokens}, {dim}]: {error:e}");
            }

            let gate_up = rand(&[tokens, 2 * dim], kind) * 3.0;
            let part = |at| double(&gate_up).view([tokens, dim, 2]).select(2, at).contiguous();
            kernels::silu_mul(&gpu(&gate_up), &mut y).unwrap();
            let error = relative_error(&y, &GateUp::Split { gate: part(0), up: part(1) }.activate());
            assert!(error < bound, "silu of {kind:?} [{tokens}, {dim}]: {error:e}");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_rope_and_cache_write_equal_the_cpus() {
    kernels::prepare(0).unwrap();
    // Rounding after every step, as the trainer's: looser than one rounding.
    for (kind, bound) in [(Kind::Float, 1e-5), (Kind::BFloat16, 1e-2)] {
        for (kv_heads, group, dim) in [(2, 7, 128), (4, 1, 64), (1, 3, 96), (2, 2, 6), (1, 2, 256)] {
            for (is_split, has_bias, has_norm) in
                [(false, true, false), (false, false, true), (kv_heads == 1, true, true), (false, false, false)]
            {
                compare_rope(kind, bound, (kv_heads, group, dim), is_split, has_bias, has_norm);
            }
        }
    }
}

fn compare_rope(
    kind: Kind,
    bound: f64,
    (kv_heads, group, dim): (i64, i64, i64),
    is_split: bool,
    has_bias: bool,
    has_norm: bool,
) {
    const TOKENS: i64 = 9;
    let (block_size, blocks, eps) = (16, 5, 1e-6);
    let product = |rows: &[i64]| -> Vec<Tensor> {
        let columns = |heads: i64| [rows, &[heads * dim]].concat();
        match is_split {
            true => vec![rand(&columns(group), kind), rand(&columns(2), kind)],
            false => vec![rand(&columns(kv_heads * (group + 2)), kind)],
        }
    };
    let views = |products: &[Tensor]| match products {
        [q, kv] => QkvViews::split(q, kv, group as usize),
        products => QkvViews::grouped(&products[0], kv_heads as usize, group as usize),
    };
    let (products, biases, norms) = (product(&[TOKENS]), product(&[]), [rand(&[dim], kind), rand(&[dim], kind)]);
    let positions = random_ints(0, 1000, TOKENS);
    let slots = [3, 16, 17, -1, 79, 40, 41, 0, 64];
    let rope = Rope::new(dim as usize, 10_000.0, None);

    // On the CPU in float64.
    let (wide, bias) = (views(&products), views(&biases));
    let turned = |x: &Tensor, bias: &Tensor, norm: &Tensor| {
        let mut x = double(x);
        if has_bias {
            x += double(bias);
        }
        if has_norm {
            x = rms_norm::forward(&x, &double(norm), eps).0;
        }
        rope::forward(&x, &rope.rows(&Tensor::from_slice(&positions), Kind::Double))
    };
    let q = turned(&wide.q, &bias.q, &norms[0]).view([TOKENS, -1, dim]);
    let k = turned(&wide.k, &bias.k, &norms[1]);
    let v = if has_bias { double(&wide.v) + double(&bias.v) } else { double(&wide.v) };
    let cache = || Tensor::zeros([blocks, kv_heads, block_size, dim], (Kind::Double, Device::Cpu));
    let (k_cache, v_cache) = (cache(), cache());
    let kept = Tensor::from_slice(&[0i64, 1, 2, 4, 5, 6, 7, 8]);
    let kept_slots = Tensor::from_slice(&slots).index_select(0, &kept);
    let rows = kv_rows(&kept_slots, block_size as usize, kv_heads as usize);
    write_kv(&k_cache, &v_cache, &k.index_select(0, &kept), &v.index_select(0, &kept), &rows);

    let (products, biases) = (products.iter().map(gpu).collect::<Vec<_>>(), biases.iter().map(gpu).collect::<Vec<_>>());
    let (got, bias, norms) = (views(&products), views(&biases), norms.each_ref().map(gpu));
    let mut q_out = poison(&[TOKENS, kv_heads * group, dim], kind);
    let [got_k, got_v] = [&k_cache, &v_cache].map(|cache| cache.zeros_like().to_kind(kind).to_device(GPU));
    let transform = HeadTransform {
        bias: has_bias.then_some(&bias),
        norms: has_norm.then_some((&norms[0], &norms[1], eps)),
        rope: &rope.table(1000, GPU),
    };
    kernels::rope_write_kv(&got, &transform, &ints(&positions), &ints(&slots), &mut q_out, &got_k, &got_v).unwrap();
    let pairs = [(&q_out, &q), (&got.k, &k), (&got.v, &v), (&got_k, &k_cache), (&got_v, &v_cache)];
    for ((got, expected), what) in pairs.into_iter().zip(["q", "k", "v", "k_cache", "v_cache"]) {
        let error = relative_error(got, expected);
        assert!(error < bound, "{what} of {kind:?} {kv_heads} x {group} x {dim}, {is_split} {has_bias}: {error:e}");
    }
}

/// Rows of random contexts in a cache, some of whose leading blocks they share.
struct Contexts {
    lens: Vec<i64>,
    groups: Vec<i64>,
    shared: Vec<i64>,
    tables: Vec<i64>, // [S, max_blocks]
    max_blocks: i64,
    num_blocks: i64,
}

impl Contexts {
    /// `group` rows share each prefix; 0: none.
    fn random(rows: i64, longest: i64, block_size: i64, group: i64) -> Self {
        let mut lens = random_ints(1, longest, rows);
        for (len, special) in lens.iter_mut().zip([0, 1, 15, 16, 17, longest]) {
            *len = special;
        }
        let mut groups = vec![-1; rows as usize];
        let mut shared = vec![0; rows as usize];
        for row in (0..rows as usize).filter(|_| group > 0) {
            let number = row as i64 / group;
            (groups[row], shared[row]) = (number, [9, 20, 0, 3, 1][number as usize % 5] * 16 / block_size);
            if lens[row] > 0 {
                lens[row] = lens[row].max(shared[row] * block_size + 1);
            }
        }
        let max_blocks = lens.iter().max().unwrap() / block_size + 2;
        let mut free = random_permutation(rows * max_blocks).into_iter();
        let mut tables = vec![-1; (rows * max_blocks) as usize];
        for row in 0..rows as usize {
            for at in 0..(lens[row] + block_size - 1) / block_size {
                let place = row * max_blocks as usize + at as usize;
                let leader = row as i64 / group.max(1) * group;
                let is_first = at >= shared[row] || (leader as usize..row).all(|other| lens[other] == 0);
                tables[place] = if is_first {
                    free.next().unwrap()
                } else {
                    let first = (leader as usize..row).find(|&other| lens[other] > 0).unwrap();
                    tables[first * max_blocks as usize + at as usize]
                };
            }
        }
        Self { lens, groups, shared, tables, max_blocks, num_blocks: rows * max_blocks }
    }
}

fn random_permutation(count: i64) -> Vec<i64> {
    torch::i64_vec(&Tensor::randperm(count, (Kind::Int64, Device::Cpu))).unwrap()
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_paged_attention_equals_the_cpus() {
    kernels::prepare(0).unwrap();
    for (kind, bound) in [(Kind::Float, 1e-5), (Kind::BFloat16, 5e-3)] {
        for (kv_heads, group, dim, block_size) in
            [(2, 7, 128, 16), (2, 6, 128, 32), (1, 8, 64, 16), (2, 1, 64, 64), (1, 12, 128, 16), (2, 2, 40, 16)]
        {
            if is_small() && (group, dim) != (7, 128) {
                continue;
            }
            for (window, sharing, split) in
                [(None, 0, None), (Some(100), 0, None), (None, 0, Some(64)), (None, 5, None), (None, 11, None)]
            {
                let shape = AttentionShape {
                    num_heads: kv_heads * group,
                    num_kv_heads: kv_heads,
                    head_dim: dim,
                    block_size,
                    sliding_window: window,
                    scale: 0.2,
                };
                compare_attention(shape, kind, bound, sharing, split);
            }
        }
    }
}

fn compare_attention(shape: AttentionShape, kind: Kind, bound: f64, sharing: i64, split: Option<usize>) {
    const ROWS: i64 = 37;
    let longest = if is_small() { 150 } else { 700 };
    let [heads, kv_heads, dim, block_size] =
        [shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size].map(|size| size as i64);
    let contexts = Contexts::random(ROWS, longest, block_size, sharing);
    let cache_shape = [contexts.num_blocks, kv_heads, block_size, dim];
    let (q, k, v) = (rand(&[ROWS, heads, dim], kind), rand(&cache_shape, kind), rand(&cache_shape, kind));
    let tables = Tensor::from_slice(&contexts.tables).view([ROWS, contexts.max_blocks]);
    let layout = PagedLayout::new(
        &tables.clamp_min(0),
        &Tensor::from_slice(&contexts.lens),
        shape.block_size,
        shape.num_kv_heads,
        shape.sliding_window,
    );
    let expected = paged_decode(&double(&q), &double(&k), &double(&v), &layout, shape.scale);
    let _ = expected.get(0).fill_(0.0); // the row without a sequence

    let (q, lens, tables) = (gpu(&q), ints(&contexts.lens), gpu(&tables.to_kind(Kind::Int)));
    let [k, v] = [k, v].map(|cache| gpu(&poison_unused(cache, &contexts, block_size)));
    let (groups, shared) = (ints(&contexts.groups), ints(&contexts.shared));
    let prefixes = (sharing > 0).then_some(SharedPrefixes { groups: &groups, num_shared_blocks: &shared });
    let plan = |rows: usize| AttentionPlan::new(shape, (kind, GPU), rows, contexts.max_blocks as usize, split).unwrap();
    let whole = plan(ROWS as usize);
    let what = format!("{shape:?} {kind:?}, groups of {sharing}, split {split:?}");
    let mut o = poison(&[ROWS, heads, dim], kind);
    for _ in 0..2 {
        let before = o.copy();
        whole.update(&lens, prefixes).unwrap();
        kernels::paged_attention(&whole, &q, &k, &v, &tables, &lens, &mut o).unwrap();
        let error = relative_error(&o, &expected);
        assert!(error < bound, "{what}: {error:e}");
        assert!(before.isnan().any().int64_value(&[]) == 1 || before.equal(&o), "{what}: not the same twice");
    }
    if split.is_some() {
        // With a fixed split a row alone has the same bits.
        let alone = plan(1);
        for row in 0..6 {
            let of_row = |tensor: &Tensor| tensor.narrow(0, row, 1).contiguous();
            let (mut own, len) = (poison(&[1, heads, dim], kind), of_row(&lens));
            alone.update(&len, None).unwrap();
            kernels::paged_attention(&alone, &of_row(&q), &k, &v, &of_row(&tables), &len, &mut own).unwrap();
            assert!(own.equal(&of_row(&o)), "{what}: row {row} depends on its neighbours");
        }
    }
}

/// Entries that no context reaches may hold anything.
fn poison_unused(cache: Tensor, contexts: &Contexts, block_size: i64) -> Tensor {
    let poisoned = cache.full_like(f64::NAN);
    for (row, &len) in contexts.lens.iter().enumerate() {
        for at in 0..(len + block_size - 1) / block_size {
            let block = contexts.tables[row * contexts.max_blocks as usize + at as usize];
            let used = (len - at * block_size).min(block_size);
            poisoned.get(block).narrow(1, 0, used).copy_(&cache.get(block).narrow(1, 0, used));
        }
    }
    poisoned
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_samples_equal_the_cpus() {
    kernels::prepare(0).unwrap();
    for kind in [Kind::Float, Kind::BFloat16] {
        for (rows, vocab, shards) in [(1, 13, 1), (37, 1001, 2), (9, 151_936, 4), (64, 4096, 1), (3, 50_000, 3)] {
            if is_small() && vocab > 5000 {
                continue;
            }
            for temperature in [0.0, 0.7, 1.0] {
                for penalty in [None, Some(1.3f32)] {
                    compare_samples(kind, rows, vocab, shards, temperature, penalty);
                }
            }
        }
    }
}

fn compare_samples(kind: Kind, rows: i64, vocab: i64, shards: i64, temperature: f32, penalty: Option<f32>) {
    let draws = 2 * rows; // two of every row of logits
    let logits = rand(&[rows, vocab], kind) * 2.0;
    let row_of: Vec<i64> = (0..draws).map(|draw| draw / 2).collect();
    let keys: Vec<RandomKey> = (0..draws).map(|draw| RandomKey::new(draw as u64, 5)).collect();
    let positions = random_ints(1, 5000, draws);
    let words = (vocab + 31) / 32;
    let seen = Tensor::randint_low(i64::from(i32::MIN), i64::from(i32::MAX), [draws, words], (Kind::Int, Device::Cpu));
    let key_words: Vec<i64> = keys.iter().flat_map(|key| key.words()).map(|word| i64::from(word as i32)).collect();
    let temperatures = Tensor::full([draws], f64::from(temperature), (Kind::Float, GPU));
    let penalties = Tensor::full([draws], f64::from(penalty.unwrap_or(1.0)), (Kind::Float, GPU));
    let (on_rows, on_keys, on_positions, on_seen) = (ints(&row_of), ints(&key_words), ints(&positions), gpu(&seen));
    let arguments = Draws {
        rows: Some(&on_rows),
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
        let own = gpu(&logits.narrow(1, from, to - from).contiguous());
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
        assert!(got == best || (temperature > 0.0 && gap < 1e-6), "{kind:?} {vocab}: {got}, not {best}, {gap:e}");
        let total: f64 = row.iter().map(|&logit| f64::from(logit * scale).exp()).sum();
        let expected = f64::from(row[got] * scale) - total.ln();
        assert!((f64::from(logprobs[draw]) - expected).abs() < 1e-5, "{kind:?} {vocab}: {} {expected}", logprobs[draw]);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_samples_flag_logits_that_are_not_numbers() {
    kernels::prepare(0).unwrap();
    let logits = rand(&[4, 1000], Kind::Float);
    let _ = logits.get(1).get(700).fill_(f64::NAN);
    let _ = logits.get(2).get(3).fill_(f64::INFINITY);
    let (keys, temperatures) = (ints(&[1; 8]), Tensor::ones([4], (Kind::Float, GPU)));
    let positions = ints(&[5, 5, 5, 0]);
    let draws = Draws {
        rows: None,
        keys: &keys,
        positions: &positions,
        temperatures: &temperatures,
        penalties: None,
        cuts: None,
    };
    let mut candidates = poison(&[1, 4, CANDIDATE_WORDS], Kind::Double);
    kernels::sample(&gpu(&logits), 0, &draws, &mut candidates).unwrap();
    let (mut token_ids, mut logprobs) = (ints(&[9; 4]), poison(&[4], Kind::Float));
    kernels::combine(&candidates, &mut token_ids, &mut logprobs).unwrap();
    let token_ids = torch::i64_vec(&token_ids).unwrap();
    assert!(token_ids[0] >= 0 && token_ids[1..] == [-1, -1, -1], "{token_ids:?}");
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_filters_keep_what_their_definitions_keep() {
    kernels::prepare(0).unwrap();
    for (vocab, digits) in [(13, 2.0), (1000, 3.0), (1000, 0.5), (151_936, 3.0)] {
        if is_small() && vocab > 5000 {
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
        for (min_p, top_k, top_p) in cases {
            compare_filter(&logits, min_p, top_k, top_p);
        }
    }
}

/// Draws many times from one row: all that is drawn must be kept by the filters, and all that they keep of much mass be drawn.
fn compare_filter(logits: &Tensor, min_p: f32, top_k: i64, top_p: f32) {
    const DRAWS: i64 = 256;
    const TEMPERATURE: f32 = 1.3;
    let row = torch::f32_vec(&logits.get(0)).unwrap();
    let value = |id: usize| row[id] * (1.0 / TEMPERATURE);
    let mut order: Vec<usize> = (0..row.len()).collect();
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
    let (rows, keys, positions) = (ints(&[0; DRAWS as usize]), ints(&keys), ints(&[9; DRAWS as usize]));
    let (temperatures, min_p, top_p) = (float(TEMPERATURE), float(min_p), float(top_p));
    let top_k = ints(&[top_k; DRAWS as usize]);
    let draws = Draws {
        rows: Some(&rows),
        keys: &keys,
        positions: &positions,
        temperatures: &temperatures,
        penalties: None,
        cuts: None,
    };
    let (logits, mut cuts) = (gpu(logits), ints(&[-7; 2 * DRAWS as usize]));
    let filters = kernels::Filters { min_p: &min_p, top_k: &top_k, top_p: &top_p };
    kernels::filter(&logits, &draws, &filters, &mut cuts).unwrap();
    let cut = torch::i64_vec(&cuts).unwrap();
    let is_kept = |id: usize| {
        let bits = value(id).to_bits();
        let ordered = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
        let key = cut[0] as u32;
        ordered > key || (ordered == key && id as i64 <= cut[1])
    };
    let kept: Vec<usize> = (0..row.len()).filter(|&id| is_kept(id)).collect();
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
    assert!(torch::i64_vec(&token_ids).unwrap().into_iter().all(|id| id >= 0 && is_kept(id as usize)));
}
