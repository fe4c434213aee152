//! Compares the engine's kernels for gated delta nets, and for attention in such models, with the CPU's operations in float64. Ignored without a
//! GPU.

use colo_grpo::internal::cuda::kernels::{
    self, AttentionPlan, AttentionShape, DeltaPages, DeltaRuns, HeadTransform, KvBlocks, NormOptions, QkvViews,
};
use colo_grpo::internal::ops::attention::{PagedLayout, paged_decode};
use colo_grpo::internal::ops::delta_net::{
    self, DeltaHeads, DeltaOptions, DeltaRows, DeltaState, DeltaWeights, Sequences,
};
use colo_grpo::internal::ops::rms_norm;
use colo_grpo::internal::ops::rope::{self, Rope};
use tch::{Device, Kind, Tensor};

use crate::on_gpu::{GPU, double, gpu, ints, is_small, poison, rand, random_ints, random_permutation, relative_error};

const EPS: f64 = 1e-6;
/// Number of padding rows, which belong to no sequence, in decode steps.
const PADDING: i64 = 2;
/// Data types with the error of one rounding.
const KINDS: [(Kind, f64); 2] = [(Kind::Float, 5e-6), (Kind::BFloat16, 5e-3)];

#[test]
#[ignore = "needs a GPU"]
fn gpu_gated_delta_nets_equal_the_cpus() {
    kernels::prepare(0, 1).unwrap();
    for (kind, bound) in KINDS {
        for heads in [
            [2, 4, 6, 4, 3],
            [1, 2, 16, 32, 4],
            [2, 4, 32, 32, 4],
            [16, 32, 128, 128, 4],
            [4, 8, 128, 128, 4],
            [2, 2, 64, 128, 4],
            [4, 8, 128, 64, 1],
            [32, 64, 64, 64, 2],
        ] {
            let net = Net::new(heads, kind);
            for states in [Kind::Float, Kind::BFloat16] {
                for runs in [1, 7, 50, 300] {
                    if runs < 50 || heads[1] < 32 && !is_small() {
                        net.compare(&vec![1; runs], true, states, bound);
                    }
                }
                net.compare(&[1, 2, 3, 5, 16, 17, 40, 64], false, states, bound);
            }
        }
    }
}

/// Tokens processed one by one, in chunks and all at once give the same bits. A prompt may thus be split arbitrarily, and a preempted sequence
/// recomputed.
#[test]
#[ignore = "needs a GPU"]
fn gpu_delta_nets_are_independent_of_chunk_boundaries() {
    const LEN: i64 = 37;
    kernels::prepare(0, 1).unwrap();
    for (kind, heads) in
        [(Kind::Float, [2, 4, 32, 32, 4]), (Kind::BFloat16, [2, 4, 64, 32, 3]), (Kind::BFloat16, [4, 8, 128, 128, 4])]
    {
        let net = Net::new(heads, kind);
        let rows = net.rows(LEN);
        let run = |cuts: &[i64]| {
            let pages = net.pages(1, Kind::Float);
            let mut out = poison(&[LEN, net.values()], kind);
            for bounds in cuts.windows(2) {
                let (first, len) = (bounds[0], bounds[1] - bounds[0]);
                let of_step = |tensor: &Tensor| gpu(tensor).narrow(0, first, len);
                let [qkv, z, b, a] = [&rows.qkv, &rows.z, &rows.b, &rows.a].map(of_step);
                let positions: Vec<i64> = (bounds[0]..bounds[1]).collect();
                let (positions, own, ends) = (ints(&positions), ints(&[0]), ints(&[0, len]));
                let runs = DeltaRuns { pages: &own, bounds: (cuts.len() <= 5).then_some(&ends), positions: &positions };
                let rows = DeltaRows { qkv, z, b, a };
                let mut out = out.narrow(0, first, len);
                let to = DeltaPages { rows: &pages.conv, states: &pages.rule };
                kernels::delta_step(&rows, &net.on_gpu(), net.options, to, runs, &mut out).unwrap();
            }
            (std::mem::replace(&mut out, Tensor::new()), pages.rule)
        };
        let (whole, state) = run(&[0, LEN]);
        let one_by_one: Vec<i64> = (0..=LEN).collect();
        for cuts in [&[0, 5, 21, 22, LEN][..], &one_by_one] {
            let (got, got_state) = run(cuts);
            assert!(got.equal(&whole) && got_state.equal(&state), "{kind:?} {heads:?}, {} pieces", cuts.len() - 1);
        }
    }
}

/// Sizes and weights of a gated delta net.
pub struct Net {
    pub options: DeltaOptions,
    weights: DeltaWeights,
    pub kind: Kind,
}

impl Net {
    pub fn new([num_key_heads, num_value_heads, key_dim, value_dim, conv_width]: [usize; 5], kind: Kind) -> Self {
        let heads = DeltaHeads { num_key_heads, num_value_heads, key_dim, value_dim, conv_width };
        let weights = DeltaWeights {
            conv: rand(&[heads.channels() as i64, conv_width as i64], kind) * 0.5,
            a_log: rand(&[num_value_heads as i64], kind),
            dt_bias: rand(&[num_value_heads as i64], kind),
            norm: rand(&[value_dim as i64], kind),
        };
        Self { options: DeltaOptions { heads, eps: EPS }, weights, kind }
    }

    pub fn values(&self) -> i64 {
        (self.options.heads.num_value_heads * self.options.heads.value_dim) as i64
    }

    fn map(&self, f: &dyn Fn(&Tensor) -> Tensor) -> DeltaWeights {
        let DeltaWeights { conv, a_log, dt_bias, norm } = &self.weights;
        DeltaWeights { conv: f(conv), a_log: f(a_log), dt_bias: f(dt_bias), norm: f(norm) }
    }

    pub fn on_gpu(&self) -> DeltaWeights {
        self.map(&gpu)
    }

    /// Inputs that are views of one GEMM's output.
    pub fn rows(&self, tokens: i64) -> DeltaRows {
        let (channels, heads) = (self.options.heads.channels() as i64, self.options.heads.num_value_heads as i64);
        let columns = [channels, self.values(), heads, heads];
        let product = rand(&[tokens, columns.iter().sum()], self.kind);
        let mut parts = product.split_with_sizes(columns, 1).into_iter();
        let mut next = || parts.next().unwrap();
        DeltaRows { qkv: next(), z: next(), b: next(), a: next() }
    }

    /// Pages for states on the GPU, unused so far.
    pub fn pages(&self, num_pages: i64, states: Kind) -> DeltaState {
        self.pages_for(num_pages, 0, states)
    }

    /// The same, with room for so many drafts of each sequence.
    pub fn pages_for(&self, num_pages: i64, num_drafts: usize, states: Kind) -> DeltaState {
        let DeltaHeads { num_value_heads, key_dim, value_dim, .. } = self.options.heads;
        let slots = kernels::delta_slots(self.options.heads, num_drafts);
        let [heads, keys, values, slots] = [num_value_heads, key_dim, value_dim, slots].map(|size| size as i64);
        let conv = poison(&[num_pages, slots, self.options.heads.channels() as i64], self.kind);
        DeltaState { conv, rule: poison(&[num_pages, heads, keys, values], states) }
    }

    /// Compares sequences of the given lengths, of which every third starts at position 0 and the others continue from a state. States are stored in
    /// data type `states`.
    fn compare(&self, lens: &[i64], is_decode: bool, states: Kind, bound: f64) {
        let (count, width) = (lens.len() as i64, self.options.heads.conv_width as i64);
        let what = format!(
            "{:?}, states {states:?}, {:?}, {count} runs, one token each: {is_decode}",
            self.kind, self.options.heads
        );
        let tokens: i64 = lens.iter().sum();
        let padding = if is_decode { PADDING } else { 0 };
        let starts: Vec<i64> = (0..count).map(|run| if run % 3 == 2 { 0 } else { 1 + run % 7 }).collect();
        let own = &random_permutation(count + 3)[..lens.len()];
        let initial = DeltaState::zeros(self.options.heads, lens.len(), Kind::Double, Device::Cpu).unwrap();
        let pages = self.pages(count + 3, states);
        for (run, (&start, &page)) in starts.iter().zip(own).enumerate() {
            let run = run as i64;
            if start == 0 {
                continue;
            }
            let state = rand(&initial.rule.get(run).size(), states) * 0.3;
            initial.rule.get(run).copy_(&state);
            pages.rule.get(page).copy_(&state);
            for position in (start - width + 1).max(0)..start {
                let row = rand(&[self.options.heads.channels() as i64], self.kind);
                initial.conv.get(run).get(width - 1 - (start - position)).copy_(&row);
                pages.conv.get(page).get(position % width).copy_(&row);
            }
        }
        let rows = self.rows(tokens + padding);
        let wide = |tensor: &Tensor| double(&tensor.narrow(0, 0, tokens));
        let wide_rows = DeltaRows { qkv: wide(&rows.qkv), z: wide(&rows.z), b: wide(&rows.b), a: wide(&rows.a) };
        let bounds: Vec<i64> = std::iter::once(0)
            .chain(lens.iter().scan(0, |end, len| {
                *end += len;
                Some(*end)
            }))
            .collect();
        let sequences = Sequences::new(&bounds, width, Device::Cpu);
        let (expected, last) =
            delta_net::forward(&wide_rows, &self.map(&double), Some(&initial), &sequences, self.options).unwrap();

        let [qkv, z, b, a] = [&rows.qkv, &rows.z, &rows.b, &rows.a].map(gpu);
        let positions = starts.iter().zip(lens).flat_map(|(&start, &len)| start..start + len);
        let none = std::iter::repeat_n(0, padding as usize);
        let positions = ints(&positions.chain(none).collect::<Vec<_>>());
        let own_pages = [own, &vec![-1; padding as usize]].concat();
        let (own_pages, ends) = (ints(&own_pages), ints(&bounds));
        let runs = DeltaRuns { pages: &own_pages, bounds: (!is_decode).then_some(&ends), positions: &positions };
        let mut out = poison(&[tokens + padding, self.values()], self.kind);
        let to = DeltaPages { rows: &pages.conv, states: &pages.rule };
        kernels::delta_step(&DeltaRows { qkv, z, b, a }, &self.on_gpu(), self.options, to, runs, &mut out).unwrap();

        let error = relative_error(&out.narrow(0, 0, tokens), &expected);
        assert!(error < bound, "outputs of {what}: {error:e}");
        let own = Tensor::from_slice(own);
        let error = relative_error(&double(&pages.rule).index_select(0, &own), &last.rule);
        let rounding = if states == Kind::BFloat16 { 3e-3 } else { 0.0 };
        assert!(error < 1e-5 + rounding, "states of {what}: {error:e}");
        for (run, (start, len)) in starts.iter().zip(lens).enumerate() {
            let (end, page) = (start + len, own.int64_value(&[run as i64]));
            for position in (end - width + 1).max(0)..end {
                let got = double(&pages.conv.get(page).get(position % width));
                let expected = last.conv.get(run as i64).get(width - 1 - (end - position));
                assert!(got.equal(&expected), "row {position} of {what}");
            }
        }
        assert_eq!(out.narrow(0, tokens, padding).count_nonzero(None::<i64>).int64_value(&[]), 0, "padding of {what}");
        let own = Vec::<i64>::try_from(own).unwrap();
        for page in (0..count + 3).filter(|page| !own.contains(page)) {
            let is_poison = |pages: &Tensor| pages.get(page).isnan().all().int64_value(&[]) == 1;
            assert!(is_poison(&pages.rule) && is_poison(&pages.conv), "page {page} is no run's of {what}");
        }
    }
}

/// Heads with partial rotation, output gates next to the queries, and norms with weights around 0.
#[test]
#[ignore = "needs a GPU"]
fn gpu_heads_with_gates_equal_the_cpus() {
    const TOKENS: i64 = 9;
    kernels::prepare(0, 1).unwrap();
    let norm = NormOptions { eps: EPS, zero_centred: true };
    for (kind, bound) in [(Kind::Float, 1e-5), (Kind::BFloat16, 1.5e-2)] {
        for (kv_heads, group, dim, turned) in [(4, 4, 256, 64), (2, 2, 32, 8), (1, 3, 32, 16), (2, 1, 64, 64)] {
            let what = format!("{kind:?} {kv_heads} x {group} x {dim}, {turned} turned");
            let product = rand(&[TOKENS, kv_heads, 2 * group + 2, dim], kind);
            let (weights, positions) = ([(); 2].map(|()| rand(&[dim], kind) * 0.3), random_ints(0, 1000, TOKENS));
            let rope = Rope::new(turned as usize, 10_000.0, None);
            let rows = rope.rows(&Tensor::from_slice(&positions), Kind::Double).unwrap();
            let turn = |x: Tensor, weight: &Tensor| {
                let (x, _) = rms_norm::forward(&double(&x), &(double(weight) + 1.0), EPS).unwrap();
                rope::forward(&x, &rows).unwrap()
            };
            let queries = |first: i64| product.narrow(2, 0, 2 * group).slice(2, first, None, 2);
            let expected = [turn(queries(0), &weights[0]), turn(product.select(2, 2 * group), &weights[1])];

            let on_gpu = gpu(&product).view([TOKENS, -1]);
            let views = QkvViews::grouped(&on_gpu, kv_heads as usize, group as usize, true);
            let [q_norm, k_norm] = weights.each_ref().map(gpu);
            let table = rope.table(1000, GPU).unwrap();
            let transform = HeadTransform { norms: Some((&q_norm, &k_norm, norm)), rope: &table };
            let mut q = poison(&[TOKENS, kv_heads * group, dim], kind);
            let [k_cache, v_cache] = [(); 2].map(|()| poison(&[1, kv_heads, 16, dim], kind));
            let slots: Vec<i64> = (0..TOKENS).collect();
            let (positions, slots) = (ints(&positions), ints(&slots));
            kernels::rope_write_kv(&views, &transform, &positions, &slots, &mut q, &k_cache, &v_cache).unwrap();
            let cached = |cache: &Tensor| cache.get(0).narrow(1, 0, TOKENS).transpose(0, 1);
            let values = product.select(2, 2 * group + 1);
            for (got, expected, part) in [
                (&q.view_as(&expected[0]), &expected[0], "queries"),
                (&views.k, &expected[1], "keys"),
                (&cached(&k_cache), &expected[1], "cached keys"),
                (&cached(&v_cache), &double(&values), "cached values"),
            ] {
                let error = relative_error(got, expected);
                assert!(error < bound, "{part} of {what}: {error:e}");
            }
            let o = rand(&[TOKENS, kv_heads, group, dim], kind);
            let mut gated = gpu(&o).view([TOKENS, kv_heads * group, dim]);
            kernels::gate(&mut gated, views.gate.as_ref().unwrap()).unwrap();
            let error = relative_error(&gated.view_as(&o), &(double(&o) * double(&queries(1)).sigmoid()));
            assert!(error < bound, "gates of {what}: {error:e}");
        }
        let (x, weight) = (rand(&[7, 4096], kind), rand(&[4096], kind) * 0.1);
        let mut y = poison(&[7, 4096], kind);
        kernels::add_rms_norm(&mut gpu(&x), None, &gpu(&weight), &mut y, norm).unwrap();
        let (expected, _) = rms_norm::forward(&double(&x), &(double(&weight) + 1.0), EPS).unwrap();
        assert!(relative_error(&y, &expected) < bound, "norm of {kind:?}");
    }
}

/// Attention with heads of 256 columns in bfloat16 on tensor cores, in chunks and all at once, with windows and without.
#[test]
#[ignore = "needs a GPU"]
fn gpu_attention_of_wide_heads_equals_the_cpus() {
    const BLOCK: usize = 16;
    kernels::prepare(0, 1).unwrap();
    for (kv_heads, group) in [(4, 4), (1, 12)] {
        for lens in [vec![1, 17, 300, 0, 64, 1000, 33], vec![97; 70], vec![5000]] {
            for (split, window) in
                [None, Some(256)].into_iter().flat_map(|split| [None, Some(1), Some(70), Some(300)].map(|w| (split, w)))
            {
                let (rows, longest) = (lens.len() as i64, lens.iter().max().copied().unwrap_or(0));
                let width = (longest as usize).div_ceil(BLOCK);
                let mut blocks = random_permutation(rows * width as i64 + 1).into_iter();
                let tables: Vec<i64> = (0..rows as usize * width).map(|_| blocks.next().unwrap()).collect();
                let tables = Tensor::from_slice(&tables).view([rows, width as i64]);
                let shape = AttentionShape {
                    num_heads: kv_heads * group,
                    num_kv_heads: kv_heads,
                    head_dim: 256,
                    block_size: BLOCK,
                    sliding_window: window,
                    scale: 256f64.powf(-0.5),
                };
                let cache = [rows * width as i64 + 1, kv_heads as i64, BLOCK as i64, 256];
                let [k, v] = [(); 2].map(|()| rand(&cache, Kind::BFloat16));
                let q = rand(&[rows, (kv_heads * group) as i64, 256], Kind::BFloat16);
                let plan = AttentionPlan::new(shape, (Kind::BFloat16, GPU), lens.len(), width, split).unwrap();
                let context_lens = ints(&lens);
                let mut o = poison(&q.size(), Kind::BFloat16);
                for _ in 0..2 {
                    plan.update(&context_lens, None).unwrap();
                    let tables = ints(&Vec::<i64>::try_from(tables.view(-1)).unwrap()).view_as(&tables);
                    kernels::paged_attention(
                        &plan,
                        &gpu(&q),
                        KvBlocks::plain(&gpu(&k), &gpu(&v)),
                        &tables,
                        &context_lens,
                        None,
                        &mut o,
                    )
                    .unwrap();
                }
                let present: Vec<i64> = (0..rows).filter(|&row| lens[row as usize] > 0).collect();
                let present = Tensor::from_slice(&present);
                let of_present = |tensor: &Tensor| tensor.index_select(0, &present);
                let present_lens = of_present(&Tensor::from_slice(&lens));
                let layout = PagedLayout::new(&of_present(&tables), &present_lens, BLOCK, kv_heads, window).unwrap();
                let (k, v) = (double(&k), double(&v));
                let expected = paged_decode(&of_present(&double(&q)), &k, &v, &layout, shape.scale, false).unwrap().0;
                let got = o.to_device(Device::Cpu);
                let error = relative_error(&of_present(&got), &expected);
                assert!(error < 5e-3, "{kv_heads} x {group}, {lens:?}, {split:?}, window {window:?}: {error:e}");
                let absent = lens.iter().position(|&len| len == 0);
                assert!(absent.is_none_or(|row| got.get(row as i64).count_nonzero(None::<i64>).int64_value(&[]) == 0));
            }
        }
    }
}
