use tch::{Device, Kind, Tensor};

use super::*;
use crate::ops::attention::{Bounds, SharedBounds};
use crate::ops::testing::{assert_close, leaf, rand, relative_error};

const HEADS: DeltaHeads =
    DeltaHeads { num_key_heads: 2, num_value_heads: 4, key_dim: 16, value_dim: 32, conv_width: 4 };
const OPTIONS: DeltaOptions = DeltaOptions { heads: HEADS, eps: 1e-6 };

fn cu_seqlens(lens: &[i64]) -> Vec<i64> {
    let mut ends = vec![0];
    lens.iter().for_each(|len| ends.push(ends[ends.len() - 1] + len));
    ends
}

fn sequences(lens: &[i64]) -> Sequences {
    Sequences::new(&cu_seqlens(lens), HEADS.conv_width as i64, Device::Cpu)
}

fn map_rows(rows: &DeltaRows, f: impl Fn(&Tensor) -> Tensor) -> DeltaRows {
    let DeltaRows { qkv, z, b, a } = rows;
    DeltaRows { qkv: f(qkv), z: f(z), b: f(b), a: f(a) }
}

fn map_weights(weights: &DeltaWeights, f: impl Fn(&Tensor) -> Tensor) -> DeltaWeights {
    let DeltaWeights { conv, a_log, dt_bias, norm } = weights;
    DeltaWeights { conv: f(conv), a_log: f(a_log), dt_bias: f(dt_bias), norm: f(norm) }
}

fn map_state(state: &DeltaState, f: impl Fn(&Tensor) -> Tensor) -> DeltaState {
    DeltaState { conv: f(&state.conv), rule: f(&state.rule) }
}

fn random_rows(tokens: i64) -> DeltaRows {
    let [channels, heads, value_dim] = [HEADS.channels(), HEADS.num_value_heads, HEADS.value_dim].map(|n| n as i64);
    DeltaRows {
        qkv: rand(&[tokens, channels]),
        z: rand(&[tokens, heads * value_dim]),
        b: rand(&[tokens, heads]) * 2,
        a: rand(&[tokens, heads]) * 2,
    }
}

/// Random weights; the first head decays so fast that exp of a chunk's sum is 0 in float64.
fn random_weights() -> DeltaWeights {
    DeltaWeights {
        conv: rand(&[HEADS.channels() as i64, HEADS.conv_width as i64]),
        a_log: Tensor::from_slice(&[3.5, -1.0, 0.0, -4.0]),
        dt_bias: rand(&[HEADS.num_value_heads as i64]),
        norm: rand(&[HEADS.value_dim as i64]),
    }
}

fn random_state(num_sequences: usize) -> DeltaState {
    let zeros = DeltaState::zeros(HEADS, num_sequences, Kind::Double, Device::Cpu).unwrap();
    map_state(&zeros, |t| rand(&t.size()))
}

fn no_gradients(weights: &DeltaWeights) -> DeltaWeights {
    map_weights(weights, Tensor::zeros_like)
}

/// Computes sequences one by one, token by token, with operations that autograd can differentiate.
fn recurrence(rows: &DeltaRows, weights: &DeltaWeights, initial: &DeltaState, lens: &[i64]) -> (Tensor, DeltaState) {
    let (channels, repeats) = (HEADS.channels() as i64, HEADS.num_value_heads / HEADS.num_key_heads);
    let [keys, heads, k_dim, v_dim] =
        [HEADS.num_key_heads, HEADS.num_value_heads, HEADS.key_dim, HEADS.value_dim].map(|n| n as i64);
    let unit = |t: Tensor| &t / ((&t * &t).sum_dim_intlist(-1, true, Kind::Double) + 1e-6).sqrt();
    let (mut outputs, mut tails, mut states) = (Vec::new(), Vec::new(), Vec::new());
    let mut start = 0;
    for (n, &len) in lens.iter().enumerate() {
        let extended = Tensor::cat(&[initial.conv.get(n as i64), rows.qkv.narrow(0, start, len)], 0);
        tails.push(extended.narrow(0, len, HEADS.conv_width as i64 - 1));
        let mut state = initial.rule.get(n as i64);
        for at in 0..len {
            let window = extended.narrow(0, at, HEADS.conv_width as i64);
            let mixed = (window * weights.conv.tr()).sum_dim_intlist(0, false, Kind::Double).silu();
            let head = |first, count, dim| mixed.narrow(0, first, count * dim).view([count, dim]);
            let shared = |t: Tensor| t.repeat_interleave_self_int(repeats as i64, 0, None);
            let q = shared(unit(head(0, keys, k_dim)) / (k_dim as f64).sqrt()).unsqueeze(1);
            let k = shared(unit(head(keys * k_dim, keys, k_dim))).unsqueeze(1);
            let v = mixed.narrow(0, channels - heads * v_dim, heads * v_dim).view([heads, 1, v_dim]);
            let row = |t: &Tensor| t.get(start + at);
            let g = -weights.a_log.exp() * ((row(&rows.a) + &weights.dt_bias).exp() + 1.0).log();
            let beta = row(&rows.b).sigmoid().view([heads, 1, 1]);
            let decayed = &state * g.exp().view([heads, 1, 1]);
            state = &decayed + k.transpose(1, 2).matmul(&((v - k.matmul(&decayed)) * beta));
            let o = q.matmul(&state).squeeze_dim(1);
            let mean = (&o * &o).mean_dim(-1, true, None);
            let normed = o / (mean + OPTIONS.eps).sqrt() * &weights.norm;
            outputs.push((normed * row(&rows.z).view([heads, v_dim]).silu()).flatten(0, 1));
        }
        states.push(state);
        start += len;
    }
    (Tensor::stack(&outputs, 0), DeltaState { conv: Tensor::stack(&tails, 0), rule: Tensor::stack(&states, 0) })
}

#[test]
fn delta_net_matches_autograd_through_the_recurrence() {
    let lens = [70, 0, 1, 131, 3, 64];
    let num_tokens: i64 = lens.iter().sum();
    let (rows, weights) = (random_rows(num_tokens), random_weights());
    for initial in [Some(random_state(lens.len())), None] {
        let start = initial.as_ref().map_or_else(
            || map_state(&random_state(lens.len()), Tensor::zeros_like),
            |state| map_state(state, Tensor::shallow_clone),
        );
        let (rows_leaf, weights_leaf) = (map_rows(&rows, leaf), map_weights(&weights, leaf));
        let start = map_state(&start, leaf);
        let (expected, last) = recurrence(&rows_leaf, &weights_leaf, &start, &lens);
        let (d_o, d_last) = (rand(&expected.size()), random_state(lens.len()));
        let loss = (&expected * &d_o).sum(None)
            + (&last.conv * &d_last.conv).sum(None)
            + (&last.rule * &d_last.rule).sum(None);
        let DeltaRows { qkv, z, b, a } = &rows_leaf;
        let DeltaWeights { conv, a_log, dt_bias, norm } = &weights_leaf;
        let leaves = [qkv, z, b, a, conv, a_log, dt_bias, norm, &start.conv, &start.rule];
        let gradients = Tensor::run_backward(&[loss], &leaves, false, false);

        let sequences = sequences(&lens);
        let (o, states) = forward(&rows, &weights, initial.as_ref(), &sequences, OPTIONS).unwrap();
        assert_close(&o, &expected);
        assert_close(&states.rule, &last.rule);
        assert!(states.conv.equal(&last.conv));
        let before = random_weights();
        let mut sums = map_weights(&before, Tensor::copy);
        let (d_rows, d_initial) = backward(
            (&d_o, Some(&d_last)),
            &rows,
            &weights,
            Forward::Again(initial.as_ref()),
            &sequences,
            OPTIONS,
            &mut sums,
        )
        .unwrap();
        let got = [d_rows.qkv, d_rows.z, d_rows.b, d_rows.a];
        let of_weights = [sums.conv - before.conv, sums.a_log - before.a_log, sums.dt_bias - before.dt_bias];
        let got = got.into_iter().chain(of_weights).chain([sums.norm - before.norm, d_initial.conv, d_initial.rule]);
        for (got, expected) in got.zip(&gradients) {
            assert_close(&got, expected);
        }
    }
}

#[test]
fn packed_delta_net_sequences_equal_separate_ones_bit_for_bit() {
    let single = |t: &Tensor| t.to_kind(Kind::Float);
    let lens = [200, 5, 0, 64, 129, 1, 300];
    let num_tokens: i64 = lens.iter().sum();
    let rows = map_rows(&random_rows(num_tokens), single);
    let weights = map_weights(&random_weights(), single);
    let initial = map_state(&random_state(lens.len()), single);
    let d_o = single(&rand(&rows.z.size()));
    let d_last = map_state(&random_state(lens.len()), single);
    let both = |rows: &DeltaRows, d_o: &Tensor, [initial, d_last]: [&DeltaState; 2], lens: &[i64]| {
        let sequences = sequences(lens);
        let (o, last) = forward(rows, &weights, Some(initial), &sequences, OPTIONS).unwrap();
        let (mut grads, d) = (no_gradients(&weights), (d_o, Some(d_last)));
        let again = Forward::Again(Some(initial));
        let (d_rows, d_initial) = backward(d, rows, &weights, again, &sequences, OPTIONS, &mut grads).unwrap();
        let tokens = [o, d_rows.qkv, d_rows.z, d_rows.b, d_rows.a];
        (tokens, [last.conv, last.rule, d_initial.conv, d_initial.rule])
    };
    let (tokens, states) = both(&rows, &d_o, [&initial, &d_last], &lens);
    let mut start = 0;
    for (n, &len) in lens.iter().enumerate() {
        let own = |t: &Tensor| t.narrow(0, start, len).copy();
        let state = |t: &Tensor| t.narrow(0, n as i64, 1).copy();
        let ends = [&map_state(&initial, state), &map_state(&d_last, state)];
        let (own_tokens, own_states) = both(&map_rows(&rows, own), &own(&d_o), ends, &[len]);
        for (all, one) in tokens.iter().zip(own_tokens) {
            assert!(own(all).equal(&one), "sequence {n} of {len} tokens");
        }
        for (all, one) in states.iter().zip(own_states) {
            assert!(state(all).equal(&one), "sequence {n} of {len} tokens");
        }
        start += len;
    }
}

#[test]
fn chunked_and_recurrent_delta_nets_agree() {
    let single = |t: &Tensor| t.to_kind(Kind::Float);
    let (prompt, all) = (77, 150);
    let rows = map_rows(&random_rows(all), single);
    let weights = map_weights(&random_weights(), single);
    let (expected, last) = forward(&rows, &weights, None, &sequences(&[all]), OPTIONS).unwrap();
    let part = |first, len| map_rows(&rows, |t| t.narrow(0, first, len));
    let (o, mut state) = forward(&part(0, prompt), &weights, None, &sequences(&[prompt]), OPTIONS).unwrap();
    let mut outputs = vec![o];
    for at in prompt..all {
        outputs.push(step(&part(at, 1), &weights, &mut state, OPTIONS).unwrap());
    }
    let error = relative_error(&Tensor::cat(&outputs, 0), &expected);
    assert!(error < 1e-5, "{error:e}");
    assert!(relative_error(&state.rule, &last.rule) < 1e-5);
    assert!(state.conv.equal(&last.conv));
}

/// Two prompts of 65 and 2 tokens, and between them one without completions; completions of 3 and 1 tokens for the first, and of 70 for the last.
#[test]
fn delta_net_states_forked_from_a_prompt_equal_whole_sequences() {
    let shared = Bounds::Shared(SharedBounds {
        prompts: vec![0, 65, 70, 72],
        groups: vec![72, 76, 76, 146],
        completions: vec![72, 75, 76, 146],
    });
    // The rows of each whole sequence within the shared batch.
    let wholes = [[0..65, 72..75], [0..65, 75..76], [65..70, 76..76], [70..72, 76..146]];
    let order: Vec<i64> = wholes.iter().flatten().cloned().flatten().collect();
    let lens: Vec<i64> = wholes.iter().map(|parts| parts.iter().map(|part| part.end - part.start).sum()).collect();
    let (rows, weights, order) = (random_rows(146), random_weights(), Tensor::from_slice(&order));
    let d_o = rand(&rows.z.size());
    // A prompt's own outputs get no gradient, because they appear in several whole sequences.
    let _ = d_o.narrow(0, 0, 72).zero_();
    let run = |bounds: &Bounds, rows: &DeltaRows, d_o: &Tensor| {
        let packed = PackedSequences::new(bounds, HEADS.conv_width, Device::Cpu);
        let mut grads = no_gradients(&weights);
        let (o, _) = packed.forward(rows, &weights, OPTIONS, false).unwrap();
        (o, packed.backward(d_o, rows, &weights, OPTIONS, None, &mut grads).unwrap(), grads)
    };
    let (o, d_rows, grads) = run(&shared, &rows, &d_o);
    let whole = map_rows(&rows, |t| t.index_select(0, &order));
    let (whole_o, d_whole, whole_grads) =
        run(&Bounds::Separate(cu_seqlens(&lens)), &whole, &d_o.index_select(0, &order));
    assert_close(&o.index_select(0, &order), &whole_o);
    for (got, whole) in [(d_rows.qkv, d_whole.qkv), (d_rows.z, d_whole.z), (d_rows.b, d_whole.b), (d_rows.a, d_whole.a)]
    {
        assert_close(&got, &got.zeros_like().index_add_(0, &order, &whole));
    }
    for (got, whole) in
        [(grads.conv, whole_grads.conv), (grads.a_log, whole_grads.a_log), (grads.norm, whole_grads.norm)]
    {
        assert_close(&got, &whole);
    }
}

/// Compares backward with and without kept chunks, for packed sequences and for completions that share prompts. Chunks kept for other rows must
/// change the gradients, which shows that they are read. Sequences too short for chunks keep none.
#[test]
fn keeping_delta_net_chunks_changes_no_bit() {
    let shared = SharedBounds {
        prompts: vec![0, 64, 127, 190],
        groups: vec![190, 316, 316, 506],
        completions: vec![190, 254, 316, 506],
    };
    let (rows, other, weights) = (random_rows(506), random_rows(506), random_weights());
    let d_o = rand(&rows.z.size());
    for bounds in [Bounds::Separate(vec![0, 126, 126, 190, 506]), Bounds::Shared(shared)] {
        let packed = PackedSequences::new(&bounds, HEADS.conv_width, Device::Cpu);
        let run = |keeps: Option<&DeltaRows>| {
            let (o, _) = packed.forward(&rows, &weights, OPTIONS, false).unwrap();
            let kept = keeps.map(|rows| packed.forward(rows, &weights, OPTIONS, true).unwrap());
            let (kept_o, chunks) = kept.map_or((o.copy(), None), |(o, chunks)| (o, Some(chunks.unwrap())));
            let mut grads = no_gradients(&weights);
            let d = packed.backward(&d_o, &rows, &weights, OPTIONS, chunks, &mut grads).unwrap();
            [o, kept_o, d.qkv, d.z, d.b, d.a, grads.conv, grads.a_log, grads.dt_bias, grads.norm]
        };
        let [again, kept, of_other] = [None, Some(&rows), Some(&other)].map(run);
        assert!(again[0].equal(&kept[1]));
        assert!(again.iter().zip(&kept).all(|(again, kept)| again.equal(kept)));
        assert!(again[2..].iter().zip(&of_other[2..]).all(|(again, other)| !again.equal(other)));
    }
    let short = PackedSequences::new(&Bounds::Separate((0..=506).collect()), HEADS.conv_width, Device::Cpu);
    assert!(short.forward(&rows, &weights, OPTIONS, true).unwrap().1.is_none());
}

/// Sequences with various numbers of drafts, some of which are accepted: outputs and states have the same bits as steps with one token each, also if
/// states are rounded.
#[test]
fn delta_net_steps_with_draft_tokens_change_no_bit() {
    let (num_sequences, num_tokens, most) = (3usize, 30usize, 4usize);
    for (kind, stored_kind) in [
        (Kind::Double, Kind::Double),
        (Kind::Float, Kind::Float),
        (Kind::BFloat16, Kind::Float),
        (Kind::Float, Kind::BFloat16),
    ] {
        let weights = map_weights(&random_weights(), |t| t.to_kind(kind));
        let tokens: Vec<DeltaRows> = // by sequence
            (0..num_sequences).map(|_| map_rows(&random_rows(num_tokens as i64), |t| t.to_kind(kind))).collect();
        let start = DeltaState::zeros(HEADS, num_sequences, kind, Device::Cpu).unwrap();
        let rounded = |rule: &Tensor| rule.to_kind(stored_kind).to_kind(rule.kind());
        let (mut plain, mut outputs) = (map_state(&start, |t| t.copy()), Vec::new());
        for at in 0..num_tokens as i64 {
            let row = |f: fn(&DeltaRows) -> &Tensor| {
                Tensor::cat(&tokens.iter().map(|rows| f(rows).narrow(0, at, 1)).collect::<Vec<_>>(), 0)
            };
            let rows = DeltaRows { qkv: row(|r| &r.qkv), z: row(|r| &r.z), b: row(|r| &r.b), a: row(|r| &r.a) };
            outputs.push(step(&rows, &weights, &mut plain, OPTIONS).unwrap());
            plain.rule = rounded(&plain.rule);
        }
        let columns = DraftedState::input_columns(HEADS) as i64 + 3;
        let inputs = Tensor::full([num_sequences as i64, most as i64, columns], f64::NAN, (kind, Device::Cpu));
        let mut drafted = DraftedState { state: start, inputs, kind: stored_kind };
        let (mut at, mut stored) = (vec![0usize; num_sequences], vec![0usize; num_sequences]);
        for turn in 0.. {
            let rows = |sequence: usize| {
                if at[sequence] < num_tokens { 1 + (turn * 5 + sequence * 3) % (most + 1) } else { 1 }
            };
            let sizes: Vec<StoredAndRows> = (0..num_sequences)
                .filter(|&sequence| at[sequence] < num_tokens)
                .map(|sequence| StoredAndRows {
                    stored: stored[sequence],
                    rows: rows(sequence).min(num_tokens - at[sequence]),
                })
                .collect();
            if sizes.len() < num_sequences {
                break;
            }
            // The first drafts of each sequence are right; the others come from another sequence.
            let drawn: Vec<usize> =
                sizes.iter().enumerate().map(|(sequence, own)| (turn + sequence) % own.rows.max(1)).collect();
            let row = |f: fn(&DeltaRows) -> &Tensor| {
                let of = |sequence: usize, depth: usize| {
                    let source = if depth <= drawn[sequence] { sequence } else { (sequence + 1) % num_sequences };
                    f(&tokens[source]).narrow(0, (at[sequence] + depth) as i64, 1)
                };
                let all: Vec<Tensor> = (0..num_sequences)
                    .flat_map(|sequence| (0..sizes[sequence].rows).map(move |depth| (sequence, depth)))
                    .map(|(sequence, depth)| of(sequence, depth))
                    .collect();
                Tensor::cat(&all, 0)
            };
            let rows = DeltaRows { qkv: row(|r| &r.qkv), z: row(|r| &r.z), b: row(|r| &r.b), a: row(|r| &r.a) };
            let layout = DraftedRows::new(&sizes, Device::Cpu).unwrap();
            let o = drafted.step(&rows, &layout, &weights, OPTIONS).unwrap();
            let mut first = 0;
            for sequence in 0..num_sequences {
                for depth in 0..=drawn[sequence] {
                    let expected = outputs[at[sequence] + depth].get(sequence as i64);
                    assert_eq!(o.get((first + depth) as i64), expected, "{kind:?} {stored_kind:?} {turn}");
                }
                first += sizes[sequence].rows;
                at[sequence] += 1 + drawn[sequence];
                stored[sequence] = drawn[sequence];
            }
        }
        assert!(at.iter().sum::<usize>() > num_tokens);
    }
}
