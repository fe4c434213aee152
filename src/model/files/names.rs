//! Hugging Face's tensors, and where each is within our parameters.

use tch::Tensor;

use super::interleaved::{InterleavedRows, pieces};
use crate::config::TargetModule;
use crate::model::correction;
use crate::model::families::Whole;
use crate::model::params::UnitLayout;
use crate::model::spec::{LinearSpec, MLP, Matrix, Mixer, ModelSpec, ParamName, Projection, Unit, room};

/// Prefix of the names of a draft head's tensors.
const DRAFT_HEAD: &str = "mtp.";

/// One tensor of a checkpoint, and its place in our parameters.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::model) struct HfTensor {
    /// Full name, such as `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// Shape of the tensor in the file.
    pub shape: Vec<i64>,
    param: ParamName,
    /// The matrix, and the index of its projection that this tensor or bias contains.
    rows: Option<(LinearSpec, usize)>,
    /// Index of the expert, if the matrix belongs to one.
    expert: Option<usize>,
    /// The piece of an interleaved tensor that this is, if the file mixes rows of several matrices.
    piece: Option<InterleavedRows>,
    /// Number of rows of the file's tensor and the first row of this projection, if the tensor fuses several projections.
    within: Option<(usize, usize)>,
    /// Number of rotated columns per head, if the file stores the columns that rotate together next to each other.
    pairs: Option<usize>,
    /// The tensor contains the matrices of all experts, each [in, out], or all of their biases.
    is_stacked: bool,
}

/// A position in a file's tensor where one of our tensors begins.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::model) struct FilePlace {
    pub name: String,
    pub shape: Vec<i64>,
    /// Index of the first element that belongs to our tensor.
    pub first: usize,
}

impl HfTensor {
    /// A tensor that corresponds to a whole parameter.
    fn whole(name: String, shape: Vec<i64>, param: ParamName) -> Self {
        Self { name, shape, param, rows: None, expert: None, piece: None, within: None, pairs: None, is_stacked: false }
    }

    /// Whether the tensor is a matrix of a block or of an expert, and not a norm, a bias or a router.
    pub fn is_projection(&self) -> bool {
        self.rows.is_some() && self.shape.len() == 2
    }

    /// Whether the file's tensor also contains other matrices.
    pub fn is_part(&self) -> bool {
        self.piece.is_some() || self.within.is_some() || self.is_stacked
    }

    /// Whether published FP8 checkpoints quantize this tensor: all matrices of a block except routers, and a gated delta net's write strengths and
    /// decays.
    pub fn is_rounded_as_published(&self) -> bool {
        self.is_projection()
            && self.rows.as_ref().is_some_and(|(linear, _)| !matches!(linear.matrix, Matrix::DeltaB | Matrix::DeltaA))
    }

    /// The tensor of all experts that a checkpoint may have instead of one per expert; an expert's gate rows come before its up rows.
    pub fn fused(&self) -> Option<FilePlace> {
        let (expert, (linear, projection)) = self.expert.zip(self.rows.as_ref())?;
        let (own, is_gate_up) = (format!(".experts.{expert}."), linear.matrix == Matrix::GateUp);
        let (place, _) = self.name.split_once(&own)?;
        let (name, parts) = if is_gate_up { ("gate_up_proj", 2) } else { ("down_proj", 1) };
        let &[rows, columns] = &self.shape[..] else { return None };
        let shape = vec![linear.experts? as i64, parts * rows, columns];
        let first = (expert as i64 * parts + *projection as i64) * rows * columns;
        Some(FilePlace { name: format!("{place}.experts.{name}"), shape, first: first as usize })
    }

    /// The tensor under which this one is written to a checkpoint.
    pub fn place(&self) -> FilePlace {
        let piece = self.piece.as_ref().map(|piece| (piece.num_rows, piece.first));
        let Some((num_rows, first)) = piece.or(self.within) else {
            return FilePlace { name: self.name.clone(), shape: self.shape.clone(), first: 0 };
        };
        let columns = self.shape[1];
        let shape = vec![num_rows as i64, columns];
        FilePlace { name: self.name.clone(), shape, first: first * columns as usize }
    }

    /// Whether this is the router's score correction, which is float32 in every file and is converted to and from its summands.
    pub fn is_correction(&self) -> bool {
        self.param == ParamName::RouterCorrection
    }

    /// A view of the tensor within its unit's flat tensor; for a router's correction, its whole parameter. Its elements are in the order of `shape`,
    /// but its dimensions may be split further: use `view_as` on a tensor of `shape`.
    pub fn view(&self, layout: &UnitLayout, flat: &Tensor) -> Tensor {
        let whole = layout.view(self.param, flat).expect("tensors() lists parameters of the layout");
        let whole = self.expert.map_or_else(|| whole.shallow_clone(), |expert| whole.get(expert as i64));
        match (&self.piece, &self.rows) {
            (Some(InterleavedRows { rows, .. }), _) => {
                whole.narrow(0, rows.start as i64, rows.len() as i64).unsqueeze(0).unsqueeze(0)
            }
            (None, Some((linear, projection))) => in_pairs(linear.rows_of(*projection, &whole), self.pairs),
            (None, None) if self.is_stacked && whole.dim() == 3 => whole.transpose(1, 2),
            (None, None) => whole,
        }
    }

    /// The shape [E, out, in] of the stacked matrices of all experts, which a file may store in MXFP4 instead.
    pub fn stacked(&self) -> Option<[i64; 3]> {
        match self.shape[..] {
            [experts, columns, rows] if self.is_stacked => Some([experts, rows, columns]),
            _ => None,
        }
    }
}

/// Whether a parameter belongs to the draft head but not to its block.
fn is_of_draft_head(param: ParamName) -> bool {
    use ParamName::{DraftEmbeddingNorm, DraftHiddenNorm, DraftProjection, FinalNorm};
    matches!(param, DraftEmbeddingNorm | DraftHiddenNorm | DraftProjection | FinalNorm)
}

/// The tensors that a checkpoint has for one unit, in Hugging Face's order.
pub(in crate::model) fn tensors(spec: &ModelSpec, unit: Unit) -> Vec<HfTensor> {
    let linears = match unit {
        Unit::Block(layer) => spec.layers[layer].linears(),
        Unit::DraftHead => spec.draft_head.map_or_else(Vec::new, |block| block.linears()),
        Unit::Embedding | Unit::Head => Vec::new(),
    };
    let mut tensors = Vec::new();
    for (param, shape) in spec.shapes(unit) {
        let path = |name: &str| match unit {
            Unit::Block(layer) => format!("{}.layers.{layer}.{name}", decoder(spec)),
            Unit::DraftHead if is_of_draft_head(param) => format!("{DRAFT_HEAD}{name}"),
            Unit::DraftHead => format!("{DRAFT_HEAD}layers.0.{name}"),
            Unit::Embedding | Unit::Head if param == ParamName::LmHead => head(spec).to_owned(),
            Unit::Embedding | Unit::Head => format!("{}.{name}", decoder(spec)),
        };
        let is_weight = |linear: &&LinearSpec| linear.matrix.weight() == param;
        let linear = linears.iter().find(is_weight).map(|linear| (linear, "weight"));
        let biased = || linears.iter().find(|linear| linear.bias == Some(param)).map(|linear| (linear, "bias"));
        let Some((linear, suffix)) = linear.or_else(biased) else {
            // A checkpoint's convolution has an additional dimension of size 1, its input channels.
            let shape = match (param, &shape[..]) {
                (ParamName::RouterCorrection, &[parts]) => vec![parts / correction::PARTS as i64],
                (ParamName::DeltaConv, &[channels, width]) => vec![channels, 1, width],
                _ => shape,
            };
            tensors.push(HfTensor::whole(path(name(spec, param)), shape, param));
            continue;
        };
        let delta_net = spec.delta_net().filter(|_| spec.family.traits().interleaves_delta_nets);
        let pieces = delta_net.map_or_else(Vec::new, |delta_net| pieces(linear.matrix, delta_net.heads));
        for piece in &pieces {
            let (name, shape) = (path(piece.tensor), vec![piece.rows.len() as i64, linear.columns as i64]);
            let rows = Some((linear.clone(), 0));
            tensors.push(HfTensor { rows, piece: Some(piece.clone()), ..HfTensor::whole(name, shape, param) });
        }
        if spec.family.traits().stacks_experts && linear.experts.is_some() {
            let matrix = if linear.matrix == Matrix::GateUp { "gate_up_proj" } else { "down_proj" };
            let (ending, shape) = match shape[..] {
                [experts, rows, columns] => ("", vec![experts, columns, rows]),
                _ => ("_bias", shape),
            };
            let name = path(&format!("{MLP}.experts.{matrix}{ending}"));
            tensors.push(HfTensor { is_stacked: true, ..HfTensor::whole(name, shape, param) });
            continue;
        }
        for expert in linear.each_expert().into_iter().filter(|_| pieces.is_empty()) {
            for (projection, &(matrix, heads)) in linear.projections.iter().enumerate() {
                let fused = fused_place(spec, linear, projection);
                let module = match (matrix, fused) {
                    (_, Some((name, _))) => name.to_owned(),
                    (Projection::Module(module), None) => module_path(module, expert),
                    (Projection::SharedExpert(name), None) => {
                        format!("mlp.{}.{name}", spec.family.traits().shared_expert)
                    }
                };
                let name = path(&format!("{module}.{suffix}"));
                let rows = (linear.groups * heads * linear.inner) as i64;
                let columns = (suffix == "weight").then_some(linear.columns as i64);
                let shape = std::iter::once(rows).chain(columns).collect();
                tensors.push(HfTensor {
                    rows: Some((linear.clone(), projection)),
                    expert,
                    within: fused.map(|(_, rows)| rows),
                    pairs: pairs(spec, unit, matrix),
                    ..HfTensor::whole(name, shape, param)
                });
            }
        }
    }
    tensors
}

/// The fused tensor that contains a projection: the module's name in its block, its number of rows, and the projection's first row.
fn fused_place(spec: &ModelSpec, linear: &LinearSpec, projection: usize) -> Option<(&'static str, (usize, usize))> {
    let of = |own: Projection| spec.family.traits().fused_tensors.iter().find(|fused| own.is_one_of(fused.modules));
    let fused = of(linear.projections[projection].0)?;
    let rows = |&(own, heads): &(Projection, usize)| match own.is_one_of(fused.modules) {
        true => linear.groups * heads * linear.inner,
        false => 0,
    };
    let [before, all] =
        [projection, linear.projections.len()].map(|end| linear.projections[..end].iter().map(rows).sum());
    Some((fused.name, (all, before)))
}

/// Number of rotated columns per head of a projection, if the file stores them in pairs.
pub(in crate::model) fn pairs(spec: &ModelSpec, unit: Unit, projection: Projection) -> Option<usize> {
    let is_turned = projection.is_one_of(&[TargetModule::QProj, TargetModule::KProj]);
    let (Unit::Block(layer), true) = (unit, is_turned && spec.family.traits().turns_pairs) else { return None };
    let Mixer::Attention(attention) = spec.layers[layer].mixer else { return None };
    Some(attention.rope?.columns(attention.head_dim))
}

/// Reorders the rows [.., inner, ..] of heads into pairs as in a file: of the rotated rows, the first and second half alternate.
pub(in crate::model) fn in_pairs(rows: Tensor /* [groups, heads, inner, ..] */, pairs: Option<usize>) -> Tensor {
    let Some(turned) = pairs else { return rows };
    let (size, turned) = (rows.size(), turned as i64);
    let split = [size[2] / turned, 2, turned / 2];
    rows.view([&size[..2], &split, &size[3..]].concat().as_slice()).transpose(3, 4)
}

/// Prefix in a checkpoint of all tensors except the head.
pub(super) fn decoder(spec: &ModelSpec) -> &'static str {
    whole(spec).map_or("model", |whole| whole.decoder)
}

/// Name of the output head's matrix in a checkpoint.
pub(super) fn head(spec: &ModelSpec) -> &'static str {
    whole(spec).map_or("lm_head.weight", |whole| whole.head)
}

/// Name in transformers 5 of the module that contains everything except the head.
pub(in crate::model) fn decoder_module(spec: &ModelSpec) -> &'static str {
    if spec.is_text_part { "model.language_model" } else { "model" }
}

/// How files with a vision tower name the text part, if the model is such a part.
fn whole(spec: &ModelSpec) -> Option<Whole> {
    spec.family.traits().whole.filter(|_| spec.is_text_part)
}

/// Path of a module in its block: `self_attn.q_proj`, or `mlp.experts.3.up_proj` for an expert.
pub(in crate::model) fn module_path(module: TargetModule, expert: Option<usize>) -> String {
    let (room, name) = (room(module), module.name());
    match expert {
        Some(expert) => format!("{room}.experts.{expert}.{name}"),
        None => format!("{room}.{name}"),
    }
}

/// Name of a whole parameter, within its block or within the decoder.
fn name(spec: &ModelSpec, param: ParamName) -> &'static str {
    if let Some((_, own)) = spec.family.traits().tensor_names.iter().find(|(own, _)| *own == param) {
        return own;
    }
    match param {
        ParamName::Embedding => "embed_tokens.weight",
        ParamName::InputNorm => "input_layernorm.weight",
        ParamName::QNorm => "self_attn.q_norm.weight",
        ParamName::KNorm => "self_attn.k_norm.weight",
        ParamName::PostNorm | ParamName::MixerPostNorm => "post_attention_layernorm.weight",
        ParamName::MlpPostNorm => "post_feedforward_layernorm.weight",
        ParamName::FinalNorm => "norm.weight",
        ParamName::LmHead => head(spec),
        ParamName::Router => "mlp.gate.weight",
        ParamName::RouterCorrection => "mlp.gate.e_score_correction_bias",
        ParamName::RouterBias => "mlp.router.bias",
        ParamName::Sinks => "self_attn.sinks",
        ParamName::DraftEmbeddingNorm => "pre_fc_norm_embedding.weight",
        ParamName::DraftHiddenNorm => "pre_fc_norm_hidden.weight",
        ParamName::DraftProjection => "fc.weight",
        ParamName::SharedGate => "mlp.shared_expert_gate.weight",
        ParamName::DeltaConv => "linear_attn.conv1d.weight",
        ParamName::DeltaALog => "linear_attn.A_log",
        ParamName::DeltaDtBias => "linear_attn.dt_bias",
        ParamName::DeltaNorm => "linear_attn.norm.weight",
        other => unreachable!("{other:?} is a matrix, or an adapter's"),
    }
}

/// Whether a checkpoint may contain this tensor although we do not read it, as in transformers: the head of a tied model, which equals the table;
/// rotary frequencies in old checkpoints; and tensors that are copied unchanged.
pub(super) fn is_ignored(spec: &ModelSpec, name: &str) -> bool {
    (spec.tie_word_embeddings && name == head(spec))
        || name.ends_with(".self_attn.rotary_emb.inv_freq")
        || is_kept(spec, name)
}

/// Names of the modules whose tensors are copied unchanged; see [`is_kept`].
pub(in crate::model) fn kept_modules(spec: &ModelSpec) -> impl Iterator<Item = String> {
    let kept = whole(spec).map_or(&[][..], |whole| whole.kept).iter().map(|kept| kept.trim_end_matches('.').to_owned());
    kept.chain(spec.delta_net().filter(|_| spec.draft_head.is_none()).map(|_| "mtp".to_owned()))
}

/// Whether a tensor is not part of the model and is copied unchanged to written checkpoints: a vision tower, or a draft head that is not in use (only
/// families with gated delta nets have one).
pub(super) fn is_kept(spec: &ModelSpec, name: &str) -> bool {
    let further = |name: &str| {
        let layer = name.strip_prefix("model.layers.")?.split('.').next()?.parse::<usize>().ok()?;
        Some(spec.keeps_further_layers() && layer >= spec.num_layers())
    };
    whole(spec).is_some_and(|whole| whole.kept.iter().any(|kept| name.starts_with(kept)))
        || further(name).unwrap_or(false)
        || (spec.delta_net().is_some() && spec.draft_head.is_none() && name.starts_with(DRAFT_HEAD))
}
