//! Rank 0 broadcasts new and cancelled requests to the other ranks of an engine before each step.
//!
//! Each iteration of the engine's loop sends a header of fixed size with the iteration's number and the size of the message after it. Most messages
//! are empty.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::ranks::World;
use crate::rollout::Request;

/// Size in bytes of a header: iteration number and message length.
const HEADER_BYTES: usize = 16;

/// A new or cancelled request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum RequestChange {
    Submit(u64, Box<Request>),
    Cancel(u64),
}

/// Requests that all ranks submit or cancel before a step.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Announcement {
    pub changes: Vec<RequestChange>,
    pub ends: bool,
}

/// Broadcasts rank 0's `announcement` to every rank; `number` is the number of earlier calls. Collective over the world, whose ranks share the
/// engine.
///
/// # Errors
/// The errors of [`World::broadcast_bytes`]; [`Error::Collective`] if a rank is at another iteration.
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
        return Err(failed(format!(
            "ranks are out of step: rank 0 announces scheduling round {}, this rank expects {number}",
            word(0)
        )));
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
    use std::sync::Arc;

    use super::*;
    use crate::ranks::testing;
    use crate::types::SamplingParams;

    #[test]
    fn requests_to_rank_0_are_broadcast_to_all_ranks() {
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
                    changes: vec![RequestChange::Submit(7, Box::new(request.clone())), RequestChange::Cancel(5)],
                    ends: false,
                };
                let heard = announce(&world, 2 * number, of_first(announcement)).unwrap();
                let [RequestChange::Submit(7, wanted), RequestChange::Cancel(5)] = &heard.changes[..] else {
                    panic!("{heard:?}")
                };
                assert_eq!(**wanted, request);
                assert_eq!(announce(&world, 2 * number + 1, Announcement::default()).unwrap(), Announcement::default());
            }
            assert!(
                announce(&world, 6, of_first(Announcement { ends: true, ..Announcement::default() })).unwrap().ends
            );
        });
    }
}
