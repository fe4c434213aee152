//! Predicts the activation memory of one micro-batch: what the explicit forward and backward passes hold at their peak. Exact for bfloat16 on a GPU,
//! where kernels work in place as stated here; a CPU holds a little more.

use super::bytes::TrainedModel;
use super::offload::ALIGNMENT_BYTES as OFFLOAD_ALIGNMENT_BYTES;
use crate::config::GradientCheckpointing;
use crate::model::{BlockSpec, ElementBytes, RowsShape, head_chunk_tokens};
use crate::ops::delta_net::DeltaHeads;

/// Bytes of the cuBLAS workspace on a GPU.
pub const WORKSPACE_BYTES: usize = 32 << 20;

/// Bytes for one of the teacher's tokens at a scored token: its id, and the sixteen numbers that its loss holds at the peak.
const TOP_BYTES: usize = 8 + 16 * 4;

/// The sizes of a micro-batch that its memory depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MicroBatchShape {
    /// Tokens that run through the network (T).
    pub tokens: usize,
    /// Tokens that are scored (C).
    pub scored_tokens: usize,
    /// Number of sequences; prompts that completions share are sequences of their own.
    pub num_sequences: usize,
    /// Whether completions share prompts.
    pub shares_prompts: bool,
    /// Number of a teacher's tokens at each scored token (K).
    pub num_top: usize,
}

impl MicroBatchShape {
    /// Maximum number of rows of one of `sharers` parts that come before scored tokens. The last row of a shared prompt comes before the first token
    /// of each of its completions, and counts for each.
    pub(super) fn most_scored_rows(&self, sharers: usize) -> usize {
        self.scored_tokens.min(self.tokens.div_ceil(sharers) + self.num_sequences)
    }

    /// The mean length of a sequence. For shorter ones than a typical mean the plan is too low.
    pub(super) fn mean_tokens(&self) -> usize {
        (self.tokens / self.num_sequences.max(1)).max(DeltaHeads::MEAN_TOKENS)
    }
}

/// Bytes of activations on one rank, by their purpose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ActivationBytes {
    /// Entry i: bytes that the first i blocks keep for their backward; from 0 to the number of blocks.
    pub saved: Vec<usize>,
    /// For each block: bytes of the block below that are copied back from the host during its backward.
    pub arriving: Vec<usize>,
    /// Bytes that are offloaded to the host.
    pub offloaded: usize,
    /// Bytes held during the whole pass: the last block's output and the rotary tables.
    pub pass: usize,
    /// Bytes of the gradient of the residual stream between two units.
    pub stream: usize,
    /// Peak bytes of each block's forward without a backward.
    pub block_forward: Vec<usize>,
    /// Peak bytes of each block's backward.
    pub block_backward: Vec<usize>,
    /// Peak bytes of the head.
    pub head: usize,
    /// Peak bytes of the head's forward without a backward.
    pub head_forward: usize,
}

impl ActivationBytes {
    /// Predicts the bytes for a micro-batch.
    pub fn new(model: &TrainedModel<'_>, keep: GradientCheckpointing, shape: MicroBatchShape) -> Self {
        let (spec, sharers) = (&model.table.spec, model.sharers);
        let MicroBatchShape { shares_prompts, .. } = shape;
        let rows = RowsShape { shares_rows: sharers > 1, shares_prompts, mean_tokens: shape.mean_tokens() };
        let tokens = shape.tokens.div_ceil(sharers);
        let layers: Vec<BlockSpec> = spec.layers.iter().map(|block| block.with_shared_rows(sharers)).collect();
        let format = model.format;
        let bytes = format.element_bytes(ElementBytes::new(model.kind, model.residual), model.lora.is_some());
        let matrix = format.matrix_bytes(spec);
        let ElementBytes { narrow, wide, residual, .. } = bytes;
        let hidden = spec.hidden_size;
        let [head, head_forward] = head_bytes(bytes, [hidden, spec.vocab_size], sharers, shape);
        let expanded = model.lora.as_ref().map_or(0, |lora| lora.num_expanded(spec).most);
        let drops = model.lora.as_ref().is_some_and(|lora| lora.dropout > 0.0);
        let movable = |layer: usize| layers[layer].movable_bytes(bytes, keep).map(|of_token| of_token * tokens);
        let (mut saved, mut arriving, mut offloaded, mut kept) = (vec![0], vec![0], 0, 0);
        for (layer, block) in layers.iter().enumerate() {
            let all = block.saved_bytes(bytes, keep, rows) * tokens;
            let moves = if model.offloads { movable(layer) } else { [0; 2] };
            saved.push(kept + all);
            kept += all - moves.iter().sum::<usize>();
            if layer + 1 < layers.len() {
                arriving.push(moves.iter().sum());
                offloaded += moves.iter().map(|bytes| bytes.next_multiple_of(OFFLOAD_ALIGNMENT_BYTES)).sum::<usize>();
            }
        }
        // In the forward of many tokens the largest matrix is not the one that is quantized at the peak.
        let forward = |block: &BlockSpec| block.forward_bytes(bytes, rows) * tokens + narrow * expanded + matrix;
        let backward = |block: &BlockSpec| {
            let all = block.backward_bytes(bytes, keep, rows, drops) * tokens;
            // With a quantized format and few tokens, the peak is at the input gradient, while the weight matrix is quantized.
            let input_gradient =
                if format.rounds() { block.input_gradient_bytes(bytes, keep) * tokens + matrix } else { 0 };
            all.max(input_gradient) + (narrow + wide) * expanded
        };
        Self {
            saved,
            arriving,
            offloaded,
            // The last block's output; cosines and sines of the rotated columns.
            pass: (residual * hidden + 2 * wide * spec.ropes().columns()) * tokens,
            stream: narrow * hidden * tokens,
            block_forward: of_blocks(&layers, forward),
            block_backward: of_blocks(&layers, backward),
            head,
            head_forward,
        }
    }

    /// Peak bytes of a block's backward, of the block with the highest peak.
    pub fn most_of_block_backward(&self) -> usize {
        self.block_backward.iter().copied().max().unwrap_or(0)
    }
}

/// Bytes of every block, computed once for equal blocks.
fn of_blocks(blocks: &[BlockSpec], bytes_of: impl Fn(&BlockSpec) -> usize) -> Vec<usize> {
    let mut known: Vec<(&BlockSpec, usize)> = Vec::new();
    let of = |block| {
        if let Some(&(_, bytes)) = known.iter().find(|(equal, _)| *equal == block) {
            return bytes;
        }
        let bytes = bytes_of(block);
        known.push((block, bytes));
        bytes
    };
    blocks.iter().map(of).collect()
}

/// Peak bytes of the head, and of its forward without a backward.
fn head_bytes(
    ElementBytes { narrow, wide, residual, .. }: ElementBytes,
    [hidden, vocab_size]: [usize; 2],
    sharers: usize,
    shape: MicroBatchShape,
) -> [usize; 2] {
    let (tokens, scored) = (shape.tokens.div_ceil(sharers), shape.scored_tokens.div_ceil(sharers));
    let [row, stream_row] = [narrow, residual].map(|bytes| bytes * hidden);
    let logits = wide * head_chunk_tokens(vocab_size, true).min(scored) * vocab_size;
    // Every rank computes the whole loss.
    let [numbers, forward_numbers] =
        [8, 4].map(|count| (count * wide + TOP_BYTES * shape.num_top) * shape.scored_tokens);
    // The rows, also normalized, with the gradient of the latter; and first one chunk of logits, turned in place into their gradient, then the
    // rows' gradient.
    let forward = (stream_row + row) * scored + logits;
    let backward = (stream_row + 2 * row) * scored + logits.max(row * scored);
    // If ranks share a micro-batch, the rows of their equal parts are sent, received and put in order, and their gradients on the way back.
    let most = shape.most_scored_rows(sharers);
    let traded = if sharers == 1 { scored } else { scored + most.max(scored) };
    let forward = forward.max(stream_row * traded);
    // The gradients are then added to those of all rows.
    let returned = row * traded.max(most + tokens);
    [numbers + forward.max(backward).max(returned), forward_numbers + forward]
}

impl TrainedModel<'_> {
    /// Bytes of host memory for the offloaded tensors of blocks, for a micro-batch of this many tokens.
    pub fn offloaded_bytes(&self, keep: GradientCheckpointing, tokens: usize) -> usize {
        let shape = MicroBatchShape { tokens, scored_tokens: 0, num_sequences: 1, shares_prompts: false, num_top: 0 };
        ActivationBytes::new(self, keep, shape).offloaded
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tch::Kind;

    use super::*;
    use crate::config::TargetModule;
    use crate::model::{Fp8, LoraSpec, ModelSpec, ParamTable};
    use crate::train::GradientOptions;

    const SHAPE: MicroBatchShape =
        MicroBatchShape { tokens: 1000, scored_tokens: 10, num_sequences: 4, shares_prompts: false, num_top: 0 };

    /// Computed by hand for Qwen2.5-7B: D = W = 3584, K = 512, F = 18944, 28 heads.
    #[test]
    fn activation_bytes_match_what_backward_reads() {
        let table = ParamTable::new(Arc::new(ModelSpec::preset("qwen2.5-7b").unwrap()), 1);
        let model = TrainedModel::whole(&table, 0, Kind::BFloat16, GradientOptions::default());
        let bytes = |keep| ActivationBytes::new(&model, keep, SHAPE);
        let (full, selective, none) = (
            bytes(GradientCheckpointing::Full),
            bytes(GradientCheckpointing::Selective),
            bytes(GradientCheckpointing::None),
        );
        assert_eq!((full.saved[0], full.saved[1], full.saved[28]), (0, 1000 * 2 * 3584, 28 * 1000 * 2 * 3584));
        assert_eq!(selective.saved[1], 1000 * (2 * (3584 + 4608 + 3584 + 3584) + 4 * 28));
        assert_eq!(none.saved[1] - selective.saved[1], 1000 * 2 * 2 * 18944);
        assert_eq!(selective.pass, 1000 * (2 * 3584 + 8 * 128));
        let attention = bytes(GradientCheckpointing::KeepAttention);
        assert_eq!(attention.saved[1] - full.saved[1], 1000 * (2 * 3584 + 4 * 28));
        assert_eq!(full.block_backward[0] - attention.block_backward[0], 1000 * (2 * 3584 + 4 * 28));
        // Its MLP's backward: two rows of D, four of F.
        assert_eq!(selective.block_backward, [1000 * 2 * (2 * 3584 + 4 * 18944); 28]);
        assert_eq!(full.block_backward[0] - selective.block_backward[0], 1000 * (2 * (4608 + 3584 + 3584) + 4 * 28));
        assert!(none.block_backward[0] < selective.block_backward[0] && none.block_forward == full.block_forward);
        // In float32 each element of the residual stream takes two more bytes: x and h of a block and its output, but no gradient.
        let wide = TrainedModel { residual: Kind::Float, ..model };
        let bytes = |keep| ActivationBytes::new(&wide, keep, SHAPE);
        let (wide_full, wide_none) = (bytes(GradientCheckpointing::Full), bytes(GradientCheckpointing::None));
        assert_eq!(wide_full.saved[1] - full.saved[1], 1000 * 2 * 3584);
        assert_eq!(wide_none.saved[1] - none.saved[1], 1000 * 2 * 2 * 3584);
        assert_eq!(wide_none.pass - none.pass, 1000 * 2 * 3584);
        assert_eq!(wide_none.block_forward[0] - none.block_forward[0], 1000 * 2 * 2 * 3584);
        assert_eq!(wide_full.block_backward[0] - full.block_backward[0], 1000 * 2 * 3584);
        assert_eq!((&wide_none.block_backward, wide_none.stream), (&none.block_backward, none.stream));
        assert_eq!(wide_none.head_forward - none.head_forward, 10 * 2 * 3584);
        // With few scored rows the head's peak is where their gradients are added to those of all rows.
        assert_eq!((none.head, wide_none.head), (10 * 32 + 1010 * 2 * 3584, none.head));
        let with_top =
            ActivationBytes::new(&wide, GradientCheckpointing::None, MicroBatchShape { num_top: 64, ..SHAPE });
        assert_eq!(with_top.head - wide_none.head, 10 * 64 * 72);
    }

    /// In a forward of a 7B model in FP8, the activation takes one byte per element, and there is space for the largest matrix (gate and up) with its
    /// scales and maxima. A backward of many tokens peaks with the quantized gradients of gate and up beside the activation and its gradient; one of
    /// few tokens peaks with that matrix.
    #[test]
    fn planned_bytes_of_fp8_rows_match_the_kernels() {
        let table = ParamTable::new(Arc::new(ModelSpec::preset("qwen2.5-7b").unwrap()), 1);
        let plain = TrainedModel::whole(&table, 0, Kind::BFloat16, GradientOptions::default());
        let matrix = 37_888 * 3584 + 8 * 37_888;
        let many = MicroBatchShape { tokens: 16_384, ..SHAPE };
        let lora = LoraSpec { r: 64, alpha: 32.0, dropout: 0.0, targets: TargetModule::ALL.to_vec() };
        for (lora, forward) in [(None, -18_944), (Some(lora), 18_944)] {
            let plain = TrainedModel { lora, ..plain.clone() };
            let rounded = TrainedModel { format: &Fp8::ROWS, ..plain.clone() };
            let expanded = plain.lora.as_ref().map_or(0, |lora| 6 * lora.num_expanded(&table.spec).most);
            for &keep in GradientCheckpointing::ALL {
                let of = |shape| [&plain, &rounded].map(|model| ActivationBytes::new(model, keep, shape));
                let [plain, rounded] = of(many);
                assert_eq!(rounded.saved, plain.saved);
                let beside = rounded.block_forward[0] as i64 - plain.block_forward[0] as i64;
                assert_eq!(beside, 16_384 * forward + matrix as i64);
                assert_eq!(rounded.block_backward[0] - plain.block_backward[0], 16_384 * 2 * 18_944, "{keep:?}");
                let [_, rounded] = of(SHAPE);
                let recomputed = match keep {
                    GradientCheckpointing::None | GradientCheckpointing::KeepChunks => 0,
                    GradientCheckpointing::Selective => 2 * 2 * 18_944,
                    GradientCheckpointing::Full => 2 * 2 * 18_944 + 2 * (4608 + 3584 + 3584) + 4 * 28,
                    GradientCheckpointing::KeepAttention => 2 * 2 * 18_944 + 2 * (4608 + 3584),
                };
                let token = 3 * 2 * 3584 + 2 * 18_944 + recomputed;
                assert_eq!(rounded.block_backward, [1000 * token + matrix + expanded; 28], "{keep:?}");
            }
        }
    }

    /// Computed by hand for Qwen3.5-9B, with the MLP narrowed so that it never is the peak: D = 4096; 32 value heads of width 128 with as many keys
    /// and 2 x 128 x 16 shared ones, C = 8192. The states of a chunk take 8,192 elements per token, its pairs 2,048.
    #[test]
    fn planned_bytes_of_delta_nets_match_the_kernels() {
        let spec = ModelSpec::preset("qwen3.5-9b").unwrap().with_widths(4096, 1024);
        let table = ParamTable::new(Arc::new(spec), 1);
        let model = TrainedModel::whole(&table, 0, Kind::BFloat16, GradientOptions::default());
        let bytes = |keep| ActivationBytes::new(&model, keep, SHAPE);
        let selective = bytes(GradientCheckpointing::Selective);
        let kept = 2 * (8192 + 2 * 4096 + 2 * 32);
        let of_attention = 2 * (2 * (4096 + 2 * 1024) + 2 * 4096) + 4 * 16; // every fourth layer, with an output gate
        assert_eq!(selective.saved[1], 1000 * (2 * 2 * 4096 + kept));
        assert_eq!(selective.saved[32], 1000 * (32 * 2 * 2 * 4096 + 24 * kept + 8 * of_attention));
        let decays = 5 * 4 * 32;
        let states = 4 * 32 * 128 * 128 / 256; // for sequences of 256 tokens
        let padded = |of_chunks: usize| (of_chunks + decays) * 9 / 8;
        let forward = 2 * (4096 + 8192) + padded(2 * (2 * 4096 + 2048)) + states;
        assert_eq!(selective.block_forward[0], 1000 * (2 * 4096 + 2 * 4096 + kept + forward));
        let chunks = padded(2 * (3 * 4096 + 2 * 2048 + 2 * 8192));
        let backward = 2 * (2 * 4096 + 2 * 8192 + 2 * 4096) + 2 * 2 * 32 + chunks + states;
        assert_eq!(selective.block_backward[0], 1000 * backward);
        // Attention's backward, whose keys and values are summed for each query head, and the gradient of its gate.
        let attended = 2 * (2 * 4096) + 2 * (4096 + 4096 + 2 * 1024 + 2 * 4096 + 2 * 4096) + 2 * 4 * 16;
        assert_eq!(selective.block_backward[3], 1000 * attended);
        assert_eq!(selective.pass, 1000 * (2 * 4096 + 8 * 64)); // a quarter of a head's 256 columns is rotated
        let full = bytes(GradientCheckpointing::Full);
        assert_eq!(
            (full.saved[32], full.block_backward[30]),
            (32 * 1000 * 2 * 4096, 1000 * (backward + 2 * 4096 + kept))
        );
        assert_eq!(full.block_backward[31], 1000 * (attended + 2 * 4096 + of_attention));
        assert_eq!(full.most_of_block_backward(), full.block_backward[0]);
        // Chunks that are kept are not computed again in the backward.
        let [none, keeping] = [GradientCheckpointing::None, GradientCheckpointing::KeepChunks].map(bytes);
        let of_chunks = 2 * 4096 + padded(2 * (2 * 4096 + 2 * 2048 + 8192));
        assert_eq!((keeping.saved[1] - none.saved[1], of_chunks), (1000 * of_chunks, 54_992));
        assert_eq!(keeping.saved[32] - none.saved[32], 24 * 1000 * of_chunks);
        let gate_up = 2 * 2 * 1024;
        assert_eq!(none.block_backward[0], 1000 * (backward - gate_up));
        assert_eq!(keeping.block_backward[0], 1000 * (backward - gate_up - of_chunks));
        assert_eq!((&keeping.block_forward, keeping.head), (&none.block_forward, none.head));
        let of_shared = MicroBatchShape { shares_prompts: true, ..SHAPE };
        let of_shared = ActivationBytes::new(&model, GradientCheckpointing::Selective, of_shared);
        assert_eq!(of_shared.block_backward[0], 1000 * (backward + 2 * states));
        // One long sequence has hardly any padding and few states.
        let long = MicroBatchShape { tokens: 65_536, num_sequences: 1, ..SHAPE };
        let of_long = ActivationBytes::new(&model, GradientCheckpointing::Selective, long).block_backward[0];
        let chunks = 2 * (3 * 4096 + 2 * 2048 + 2 * 8192) + decays;
        let whole = backward - padded(2 * (3 * 4096 + 2 * 2048 + 2 * 8192)) - states + chunks;
        assert_eq!(of_long, 65_536 * (whole + chunks * 32 / 65_536 + 4 * 32 * 128 * 128 / 65_536));
        // Two ranks hold half of that each. In a forward without gate and up, the projected rows are exchanged at the peak.
        let shared =
            ActivationBytes::new(&TrainedModel { sharers: 2, ..model.clone() }, GradientCheckpointing::Selective, long);
        assert_eq!(2 * shared.block_backward[0], of_long);
        let rows = 2 * (8192 + 4096 + 2 * 32);
        assert_eq!(shared.block_forward[0], 32_768 * (2 * 4096 + 2 * 4096 + 2 * 4096 + 3 * rows));
        // In float32, without kernels, it takes three times as many elements.
        let single = TrainedModel { kind: Kind::Float, residual: Kind::Float, ..model };
        let composed = ActivationBytes::new(&single, GradientCheckpointing::Selective, SHAPE);
        assert!(composed.block_backward[0] > 3 * selective.block_backward[0], "{composed:?}");
    }

    /// Two ranks that score all tokens of a 7B model. One of them may have all rows before scored tokens, and send and get back twice its share.
    #[test]
    fn planned_bytes_of_a_shared_head_match_its_rows() {
        let table = ParamTable::new(Arc::new(ModelSpec::preset("qwen2.5-7b").unwrap()), 1);
        let model = TrainedModel::whole(&table, 0, Kind::BFloat16, GradientOptions::default());
        let shared = TrainedModel { sharers: 2, ..model.clone() };
        let row = 2 * 3584;
        for (tokens, num_sequences, most) in [(131_072, 1, 65_537), (131_072, 1000, 66_536), (8, 7, 8)] {
            let shape =
                MicroBatchShape { tokens, scored_tokens: tokens, num_sequences, shares_prompts: true, num_top: 0 };
            assert_eq!(shape.most_scored_rows(2), most);
            let bytes = ActivationBytes::new(&shared, GradientCheckpointing::Full, shape);
            let (part, logits) = (tokens / 2, 4 * 152_064 * 768.min(tokens / 2));
            let backward = 3 * row * part + logits.max(row * part);
            assert_eq!(bytes.head, 32 * tokens + backward.max(row * (most + part)));
            assert_eq!(bytes.head_forward, 16 * tokens + (row * (most + part)).max(2 * row * part + logits));
        }
    }

    /// Head memory for 16,384 scored tokens with 152,064 logits each stays under 1 GB.
    #[test]
    fn the_head_never_holds_all_logits() {
        let table = ParamTable::new(Arc::new(ModelSpec::preset("qwen2.5-7b").unwrap()), 1);
        let model = TrainedModel::whole(&table, 0, Kind::BFloat16, GradientOptions::default());
        let shape = MicroBatchShape { tokens: 16_384, scored_tokens: 16_384, ..SHAPE };
        let bytes = ActivationBytes::new(&model, GradientCheckpointing::None, shape);
        assert!(bytes.head_forward < bytes.head && bytes.head < 1_000_000_000, "{bytes:?}");
    }
}
