//! Routing of a step's tokens to experts. It is recorded for the trainer. When a prefix is computed again, the recorded experts are used again,
//! because other experts would give other keys and values.

use std::cell::RefCell;
use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::scheduler::{Step, TokenRun};
use super::sequence::EngineSequence;
use crate::error::{Error, Result};
use crate::model::{ModelSpec, Routes};
use crate::ops::router::Routing;
use crate::torch;

/// Routing of one step: T tokens with K experts in each layer that has experts.
#[derive(Debug)]
pub(super) struct StepRoutes {
    /// Recorded experts of an earlier computation, -1 where there is none.
    recorded: Option<Tensor>, // [T, layers, K] int64
    /// For each layer of the stage, its index among the model's layers that have experts.
    places: Vec<i64>,
    /// Chosen experts of each layer that has been computed.
    chosen: RefCell<Vec<Tensor>>, // [T, K] each
}

/// The recorded experts of a step's tokens, token by token in all layers with experts, -1 where none is recorded; `None` if no token has any.
pub(super) fn recorded_experts(spec: &ModelSpec, step: &Step, sequences: &[EngineSequence]) -> Option<Vec<i16>> {
    let of = |run: &TokenRun| {
        let routed = &sequences[run.sequence].routed_experts;
        run.tokens.clone().map(|position| routed.of(position))
    };
    if !step.runs.iter().flat_map(of).any(|known| known.is_some()) {
        return None;
    }
    let per_token = spec.routed_experts_per_token();
    let mut recorded = Vec::new();
    for known in step.runs.iter().flat_map(of) {
        match known {
            Some(experts) => recorded.extend(experts.iter().map(|&expert| expert as i16)),
            None => recorded.extend(std::iter::repeat_n(-1, per_token)),
        }
    }
    Some(recorded)
}

impl StepRoutes {
    /// The routing of a step in the `layers` of a stage; `None` if they have no experts.
    pub(super) fn new(
        (spec, layers): (&ModelSpec, &Range<usize>),
        step: &Step,
        sequences: &[EngineSequence],
        device: Device,
    ) -> Result<Option<Self>> {
        let Some(experts) = spec.experts() else { return Ok(None) };
        if !spec.layers[layers.clone()].iter().any(|block| block.has_experts()) {
            return Ok(None);
        }
        let k = experts.router.num_experts_per_tok;
        let recorded = recorded_experts(spec, step, sequences).map(|recorded| {
            let shape = [-1, spec.num_expert_layers() as i64, k as i64];
            Ok::<_, Error>(torch::tensor_on(&recorded, device)?.f_to_kind(Kind::Int64)?.f_view(shape)?)
        });
        let recorded = recorded.transpose()?;
        let places = spec.places_among_expert_layers()[layers.clone()].to_vec();
        Ok(Some(Self { recorded, places, chosen: RefCell::default() }))
    }

    /// The chosen experts of all rows, token by token.
    pub(super) fn into_experts(self) -> Result<Vec<u16>> {
        let all = Tensor::f_stack(&self.chosen.into_inner(), 1)?; // [T, layers, K]
        Ok(torch::i64_vec(&all)?.into_iter().map(|expert| expert as u16).collect())
    }
}

impl Routes for StepRoutes {
    fn choose(&self, layer: usize, own: Tensor) -> Result<Tensor> {
        let Some(recorded) = &self.recorded else { return Ok(own) };
        let recorded = recorded.f_select(1, self.places[layer])?;
        Ok(recorded.f_where_self(&recorded.f_ge(0)?, &own)?)
    }

    fn observe(&self, _layer: usize, routing: &Routing, _own: &Tensor) -> Result<()> {
        self.chosen.borrow_mut().push(routing.experts.f_to_kind(Kind::Int64)?);
        Ok(())
    }

    fn d_probs(&self, _layer: usize) -> Result<Option<Tensor>> {
        Ok(None)
    }
}
