//! The experts that a step's tokens go to: recorded for the trainer, and taken again where a prefix is computed once more, or its keys
//! and values would be others.

use std::cell::RefCell;

use tch::{Device, Kind, Tensor};

use super::scheduler::Step;
use super::sequence::EngineSequence;
use crate::error::Result;
use crate::model::{ModelSpec, Routes};
use crate::ops::router::Routing;
use crate::torch;

/// Routing of one step, T tokens with K experts in each of the layers that have some.
#[derive(Debug)]
pub(super) struct StepRoutes {
    /// Experts of an earlier computation, -1 where there was none.
    recorded: Option<Tensor>, // [T, layers, K] int64
    /// The place of each layer among those that have experts.
    places: Vec<i64>,
    /// Choices of each layer that was computed.
    chosen: RefCell<Vec<Tensor>>, // [T, K] each
}

impl StepRoutes {
    /// `None` for a model without experts.
    pub(super) fn new(
        spec: &ModelSpec,
        step: &Step,
        sequences: &[EngineSequence],
        device: Device,
    ) -> Result<Option<Self>> {
        let Some(experts) = &spec.experts else { return Ok(None) };
        let k = experts.num_experts_per_tok;
        let per_token = spec.num_expert_layers() * k;
        let mut recorded = Vec::new();
        for run in &step.runs {
            for position in run.tokens.clone() {
                match sequences[run.sequence].routed_experts.of(position) {
                    Some(experts) => recorded.extend(experts.iter().map(|&expert| i64::from(expert))),
                    None => recorded.extend(std::iter::repeat_n(-1, per_token)),
                }
            }
        }
        let recorded = match recorded.iter().any(|&expert| expert >= 0) {
            true => Some(torch::tensor_on(&recorded, device)?.f_view([-1, (per_token / k) as i64, k as i64])?),
            false => None,
        };
        let places = spec.places_among_expert_layers();
        Ok(Some(Self { recorded, places, chosen: RefCell::default() }))
    }

    /// The experts of all rows, token by token.
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
