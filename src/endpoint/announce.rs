//! Rank 0's announcement to the other ranks of an engine before a step: the requests that came, and those that nobody waits for.
//!
//! Every turn of the loop has a header of fixed size, the turn's number and how many bytes follow. Most have none.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::dist::World;
use crate::error::{Error, Result};
use crate::rollout::Request;
use crate::tools::GroupKey;
use crate::types::{SamplingParams, Structure, Trajectory};

/// Bytes of a header: turn, length.
const HEADER_BYTES: usize = 16;

/// A request in the form in which it travels; floats as their bits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct WireRequest {
    prompt_id: u64,
    pub token_ids: Vec<u32>,
    num_generations: usize,
    temperature: u32,
    top_p: u32,
    top_k: usize,
    min_p: Option<u32>,
    repetition_penalty: u32,
    max_completion_length: usize,
    stop: Vec<String>,
    top_logprobs: usize,
    structure: Option<Structure>,
    seed: u64,
    step: u64,
    adapter: Option<usize>,
    first_step: u64,
    first_sample: usize,
    begun: Vec<Trajectory>,
}

/// One change of what is under way.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum RequestChange {
    Submit(u64, Box<WireRequest>),
    Cancel(u64),
}

/// Changes that all ranks make before a step.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Announcement {
    pub changes: Vec<RequestChange>,
    pub ends: bool,
}

impl WireRequest {
    pub fn of(request: &Request) -> Self {
        let params = &request.params;
        Self {
            prompt_id: request.prompt_id,
            token_ids: request.token_ids.clone(),
            num_generations: params.num_generations,
            temperature: params.temperature.to_bits(),
            top_p: params.top_p.to_bits(),
            top_k: params.top_k,
            min_p: params.min_p.map(f32::to_bits),
            repetition_penalty: params.repetition_penalty.to_bits(),
            max_completion_length: params.max_completion_length,
            stop: params.stop.clone(),
            top_logprobs: params.top_logprobs,
            structure: params.structure.clone(),
            seed: params.seed,
            step: params.step,
            adapter: request.adapter,
            first_step: request.first_step,
            first_sample: request.first_sample,
            begun: request.begun.clone(),
        }
    }

    /// The group that it belongs to, where it is one of an episode.
    pub fn group(&self) -> GroupKey {
        GroupKey { prompt_id: self.prompt_id, first_step: self.first_step }
    }

    /// The request's random keys, which say whose it is.
    pub fn first_sample(&self) -> usize {
        self.first_sample
    }

    /// Has its tokens sampled by the weights of `version`.
    pub fn sample_by(&mut self, version: u64) {
        self.step = version;
    }

    /// Tokens of its completion that are known before it is sampled.
    pub fn num_begun(&self) -> usize {
        self.begun.first().map_or(0, |begun| begun.token_ids.len())
    }

    /// Lets it go on from a completion as it stands.
    pub fn go_on(&mut self, completion: Trajectory) {
        if !completion.token_ids.is_empty() {
            self.begun = vec![completion];
        }
    }

    pub fn request(self) -> Request {
        let params = SamplingParams {
            num_generations: self.num_generations,
            temperature: f32::from_bits(self.temperature),
            top_p: f32::from_bits(self.top_p),
            top_k: self.top_k,
            min_p: self.min_p.map(f32::from_bits),
            repetition_penalty: f32::from_bits(self.repetition_penalty),
            max_completion_length: self.max_completion_length,
            stop: self.stop,
            top_logprobs: self.top_logprobs,
            structure: self.structure,
            seed: self.seed,
            step: self.step,
        };
        Request {
            prompt_id: self.prompt_id,
            token_ids: self.token_ids,
            first_step: self.first_step,
            params: Arc::new(params),
            begun: self.begun,
            adapter: self.adapter,
            first_sample: self.first_sample,
        }
    }
}

/// Rank 0's `announcement` on every rank; `number` counts the calls. Collective over the world, whose ranks share the engine.
///
/// # Errors
/// The errors of [`World::broadcast_bytes`]; [`Error::Collective`] if a rank is at another turn.
pub(super) fn announce(world: &World, number: u64, announcement: Announcement) -> Result<Announcement> {
    if world.size() == 1 {
        return Ok(announcement);
    }
    let failed = |message: String| Error::Collective {
        op: "announce requests",
        group: "world".to_owned(),
        rank: world.rank(),
        message,
    };
    let is_empty = announcement == Announcement::default();
    let mut body = if world.rank() > 0 || is_empty {
        Vec::new()
    } else {
        serde_json::to_vec(&announcement).map_err(|error| failed(error.to_string()))?
    };
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(&number.to_le_bytes());
    header[8..].copy_from_slice(&(body.len() as u64).to_le_bytes());
    world.broadcast_bytes(&mut header, 0)?;
    let word = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("eight bytes"));
    if word(0) != number {
        return Err(failed(format!("rank 0 is at turn {}, this rank at {number}", word(0))));
    }
    if word(8) == 0 {
        return Ok(announcement);
    }
    body.resize(word(8) as usize, 0);
    world.broadcast_bytes(&mut body, 0)?;
    if world.rank() == 0 {
        Ok(announcement)
    } else {
        serde_json::from_slice(&body).map_err(|error| failed(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dist::testing;

    #[test]
    fn every_rank_hears_what_the_first_one_was_told() {
        let params =
            SamplingParams { top_p: 0.1, min_p: Some(0.3), stop: vec!["é".into()], ..SamplingParams::default() };
        let request = Request {
            prompt_id: 3,
            token_ids: vec![1, u32::MAX],
            first_step: 0,
            params: Arc::new(params),
            begun: Vec::new(),
            adapter: Some(2),
            first_sample: 0,
        };
        testing::worlds(3, |world| {
            let of_first = |announcement| if world.rank() == 0 { announcement } else { Announcement::default() };
            for number in 0..3 {
                let announcement = Announcement {
                    changes: vec![
                        RequestChange::Submit(7, Box::new(WireRequest::of(&request))),
                        RequestChange::Cancel(5),
                    ],
                    ends: false,
                };
                let heard = announce(&world, 2 * number, of_first(announcement)).unwrap();
                let [RequestChange::Submit(7, wanted), RequestChange::Cancel(5)] = &heard.changes[..] else {
                    panic!("{heard:?}")
                };
                assert_eq!(wanted.clone().request(), request);
                assert_eq!(announce(&world, 2 * number + 1, Announcement::default()).unwrap(), Announcement::default());
            }
            assert!(
                announce(&world, 6, of_first(Announcement { ends: true, ..Announcement::default() })).unwrap().ends
            );
        });
    }
}
