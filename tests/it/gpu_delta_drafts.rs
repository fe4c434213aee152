//! Drafts of models with gated delta nets: what a step's kernels make of rows that may not count. Ignored where there is no GPU.

use colo_grpo::internal::cuda::kernels::{
    self, AttentionPlan, AttentionShape, DeltaDrafts, DeltaPages, DeltaRuns, KvBlocks,
};
use colo_grpo::internal::ops::delta_net::{DeltaRows, DeltaState};
use serde_json::json;
use tch::{Kind, Tensor};

use crate::gpu_delta_net::Net;
use crate::on_gpu::{GPU, double, gpu, ints, poison, rand, random_permutation, relative_error, seconds};

/// Sequences whose steps have up to twelve drafts, of which none, some or all turn out right: outputs of the rows that count, and the states, have
/// the bits of steps of one token. Wrong drafts are rows of another text.
#[test]
#[ignore = "needs a GPU"]
fn gpu_drafts_of_gated_delta_nets_have_the_bits_of_steps_of_one_token() {
    const MOST: usize = 12;
    const LENS: [usize; 4] = [61, 47, 30, 1];
    kernels::prepare(0, 1).unwrap();
    for (kind, heads) in [
        (Kind::Float, [2, 4, 6, 4, 3]),
        (Kind::Float, [2, 4, 32, 32, 4]),
        (Kind::BFloat16, [2, 4, 64, 32, 3]),
        (Kind::BFloat16, [4, 8, 128, 128, 4]),
        (Kind::BFloat16, [16, 32, 128, 128, 4]),
    ] {
        for states in [Kind::Float, Kind::BFloat16] {
            let net = Net::new(heads, kind);
            let what = format!("{kind:?} {heads:?}, states {states:?}");
            let texts = LENS.map(|len| net.rows(len as i64));
            let one_by_one = texts.each_ref().map(|text| net.one_by_one(text, states));
            let (pages, gates) = (net.pages_for(6, MOST, states), net.gates(6, MOST));
            let of_sequence = |sequence: usize| 5 - sequence as i64; // its page
            let (mut at, mut stored) = ([0; LENS.len()], [0; LENS.len()]);
            for turn in 0.. {
                let going: Vec<usize> = (0..LENS.len()).filter(|&it| at[it] < LENS[it]).collect();
                if going.is_empty() {
                    break;
                }
                // Rows that count, and others behind them.
                let right = |it: usize| ((turn * 7 + it * 3) % (MOST + 1)).min(LENS[it] - at[it] - 1);
                let wrong = |it: usize| (turn + it) % (MOST + 1 - right(it));
                let mut rows = Vec::new();
                for &it in &going {
                    rows.push(texts[it].select(at[it], 1 + right(it)));
                    rows.push(net.rows(wrong(it) as i64));
                }
                let lens = going.iter().map(|&it| 1 + right(it) + wrong(it));
                let out = net.draft_step(
                    &rows,
                    (&pages, &gates),
                    going.iter().map(|&it| [of_sequence(it), stored[it] as i64, at[it] as i64]).collect(),
                    lens.clone().collect(),
                );
                let mut first = 0;
                for (&it, len) in going.iter().zip(lens) {
                    let count = 1 + right(it) as i64;
                    let got = out.narrow(0, first, count);
                    let expected = one_by_one[it].0.narrow(0, at[it] as i64, count);
                    assert!(got.equal(&expected), "{what}: sequence {it} from token {} on, {count} rows", at[it]);
                    first += len as i64;
                }
                for (it, taken) in going.iter().map(|&it| (it, right(it))).collect::<Vec<_>>() {
                    (at[it], stored[it]) = (at[it] + 1 + taken, taken);
                }
            }
            // What is left is taken in with no row of its own.
            let left = (0..LENS.len()).map(|it| [of_sequence(it), stored[it] as i64, at[it] as i64]);
            let _ = net.draft_step(&[net.rows(0)], (&pages, &gates), left.collect(), vec![0; LENS.len()]);
            for (it, (_, state)) in one_by_one.iter().enumerate() {
                assert!(pages.rule.get(of_sequence(it)).equal(state), "{what}: the state of sequence {it}");
            }
        }
    }
}

/// What a step of 9B's heads takes with several rows a sequence, beside one of single tokens: a state is read and written once in both.
#[test]
#[ignore = "needs a GPU"]
fn gpu_drafts_of_gated_delta_nets_take_less_than_their_steps() {
    const MOST: usize = 7;
    kernels::prepare(0, 1).unwrap();
    let net = Net::new([16, 32, 128, 128, 4], Kind::BFloat16);
    let weights = net.on_gpu();
    for sequences in [1, 8, 64] {
        let (pages, gates) = (net.pages_for(sequences, MOST, Kind::Float), net.gates(sequences, MOST));
        let (pages, gates) =
            (DeltaState { conv: pages.conv.zeros_like(), rule: pages.rule.zeros_like() }, gates.zeros_like());
        let to = DeltaPages { rows: &pages.conv, states: &pages.rule };
        let own = ints(&(0..sequences).collect::<Vec<_>>());
        let starts = ints(&vec![1000; sequences as usize]);
        let text = on_gpu(&net.rows(sequences));
        let mut out = poison(&[sequences, net.values()], Kind::BFloat16);
        let runs = DeltaRuns { pages: &own, bounds: None, positions: &starts };
        let of_tokens = seconds(&mut || kernels::delta_step(&text, &weights, net.options, to, runs, &mut out).unwrap());
        for (rows, taken) in [(1, 0), (1, 3), (4, 2), (8, 4)] {
            let text = on_gpu(&net.rows(sequences * rows));
            let bounds = ints(&(0..=sequences).map(|end| end * rows).collect::<Vec<_>>());
            let stored = ints(&vec![taken; sequences as usize]);
            let drafts = DeltaDrafts { pages: &own, bounds: &bounds, stored: &stored, starts: &starts, gates: &gates };
            let mut out = poison(&[sequences * rows, net.values()], Kind::BFloat16);
            let of_drafts =
                seconds(&mut || kernels::delta_drafts(&text, &weights, net.options, to, drafts, &mut out).unwrap());
            println!(
                "{}",
                json!({"test": "delta_drafts", "sequences": sequences, "rows": rows, "taken": taken,
                    "us": of_drafts * 1e6, "us_of_single_tokens": of_tokens * 1e6})
            );
            assert!(of_drafts < of_tokens * (rows + taken + 1) as f64, "{of_drafts} {of_tokens}");
        }
    }
}

/// Rows of the head that drafts do not see the first key of their sequence.
#[test]
#[ignore = "needs a GPU"]
fn gpu_attention_without_the_first_key_equals_that_of_the_others() {
    const BLOCK: i64 = 16;
    kernels::prepare(0, 1).unwrap();
    for (kind, bound, head_dim) in
        [(Kind::BFloat16, 5e-3, 256), (Kind::BFloat16, 5e-3, 128), (Kind::BFloat16, 5e-3, 48), (Kind::Float, 1e-5, 32)]
    {
        for split in [None, Some(256)] {
            let lens = [2, 17, 300, 64, 1000, 33, 0];
            let width = 1000 / BLOCK + 1;
            let shape = AttentionShape {
                num_heads: 8,
                num_kv_heads: 2,
                head_dim: head_dim as usize,
                block_size: BLOCK as usize,
                sliding_window: None,
                scale: (head_dim as f64).powf(-0.5),
            };
            let rows = lens.len() as i64;
            let tables = Tensor::from_slice(&random_permutation(rows * width)).view([rows, width]);
            let [k, v] = [(); 2].map(|()| rand(&[rows * width, 2, BLOCK, head_dim], kind));
            let q = rand(&[rows, 8, head_dim], kind);
            let plan = AttentionPlan::new(shape, (kind, GPU), lens.len(), width as usize, split).unwrap().hiding(1);
            let (on_gpu, own_tables) = (ints(&lens), gpu(&tables).to_kind(Kind::Int));
            let mut o = poison(&q.size(), kind);
            plan.update(&on_gpu, None).unwrap();
            let cache = [gpu(&k), gpu(&v)];
            let blocks = KvBlocks::plain(&cache[0], &cache[1]);
            kernels::paged_attention(&plan, &gpu(&q), blocks, &own_tables, &on_gpu, None, &mut o).unwrap();
            for (row, &len) in lens.iter().enumerate().filter(|(_, len)| **len > 0) {
                let row = row as i64;
                let seen = |cache: &Tensor| {
                    let blocks = double(&cache.index_select(0, &tables.get(row))).transpose(1, 2);
                    let all = blocks.flatten(0, 1).narrow(0, 1, len - 1).transpose(0, 1); // [Hkv, len - 1, hd]
                    all.repeat_interleave_self_int(4, 0, None::<i64>)
                };
                let scores = double(&q.get(row)).unsqueeze(1).matmul(&seen(&k).transpose(1, 2)) * shape.scale;
                let expected = scores.softmax(-1, Kind::Double).matmul(&seen(&v)).squeeze_dim(1);
                let error = relative_error(&o.get(row), &expected);
                assert!(error < bound, "{kind:?}, heads of {head_dim}, {len} tokens, {split:?}: {error:e}");
            }
        }
    }
}

impl Net {
    /// Gates of drafts beside such pages.
    fn gates(&self, num_pages: i64, num_drafts: usize) -> Tensor {
        let slots = kernels::delta_slots(self.options.heads, num_drafts) as i64;
        poison(&[num_pages, slots, 2, self.options.heads.num_value_heads as i64], self.kind)
    }

    /// Outputs of steps of one token each, and the state behind the last.
    fn one_by_one(&self, text: &DeltaRows, states: Kind) -> (Tensor, Tensor) {
        let (len, pages) = (text.qkv.size()[0], self.pages(1, states));
        let out = poison(&[len, self.values()], self.kind);
        for at in 0..len {
            let runs = DeltaRuns { pages: &ints(&[0]), bounds: None, positions: &ints(&[at]) };
            let to = DeltaPages { rows: &pages.conv, states: &pages.rule };
            let rows = on_gpu(&text.select(at as usize, 1));
            kernels::delta_step(&rows, &self.on_gpu(), self.options, to, runs, &mut out.narrow(0, at, 1)).unwrap();
        }
        (out, pages.rule.get(0))
    }

    /// A step of sequences with [page, stored drafts, position] and so many rows each, between others without a page.
    fn draft_step(
        &self,
        rows: &[DeltaRows],
        (pages, gates): (&DeltaState, &Tensor),
        mut sequences: Vec<[i64; 3]>,
        mut lens: Vec<usize>,
    ) -> Tensor {
        sequences.extend([[-1, 0, 0]; 2]);
        lens.extend([1, 0]);
        let padding = self.rows(1);
        let joined = |of: &dyn Fn(&DeltaRows) -> &Tensor| {
            gpu(&Tensor::cat(&rows.iter().chain([&padding]).map(of).collect::<Vec<_>>(), 0))
        };
        let all = DeltaRows {
            qkv: joined(&|rows| &rows.qkv),
            z: joined(&|rows| &rows.z),
            b: joined(&|rows| &rows.b),
            a: joined(&|rows| &rows.a),
        };
        let bounds: Vec<i64> = (0..=lens.len()).map(|end| lens[..end].iter().sum::<usize>() as i64).collect();
        let [own, stored, starts] =
            [0, 1, 2].map(|part| ints(&sequences.iter().map(|it| it[part]).collect::<Vec<_>>()));
        let (bounds, num_rows) = (ints(&bounds), bounds[lens.len()]);
        let drafts = DeltaDrafts { pages: &own, bounds: &bounds, stored: &stored, starts: &starts, gates };
        let mut out = poison(&[num_rows, self.values()], self.kind);
        let to = DeltaPages { rows: &pages.conv, states: &pages.rule };
        kernels::delta_drafts(&all, &self.on_gpu(), self.options, to, drafts, &mut out).unwrap();
        assert_eq!(out.narrow(0, num_rows - 1, 1).count_nonzero(None::<i64>).int64_value(&[]), 0, "padding");
        out
    }
}

/// Rows of a text.
trait SelectRows {
    fn select(&self, first: usize, count: usize) -> Self;
}

impl SelectRows for DeltaRows {
    fn select(&self, first: usize, count: usize) -> Self {
        let some = |rows: &Tensor| rows.narrow(0, first as i64, count as i64);
        Self { qkv: some(&self.qkv), z: some(&self.z), b: some(&self.b), a: some(&self.a) }
    }
}

fn on_gpu(rows: &DeltaRows) -> DeltaRows {
    DeltaRows { qkv: gpu(&rows.qkv), z: gpu(&rows.z), b: gpu(&rows.b), a: gpu(&rows.a) }
}
