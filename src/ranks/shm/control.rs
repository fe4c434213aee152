//! The control plane of ranks on one host, in their shared memory.

use std::sync::Arc;

use tch::Tensor;

use super::{Member, ShmGroup};
use crate::error::{Error, Result};
use crate::ranks::control::{ControlPlane, RankFailure, RankGroup};
use crate::ranks::{Collective, all_gather_bytes};
use crate::torch;

/// One rank's end of the control plane.
#[derive(Debug)]
pub(in crate::ranks) struct ShmControl {
    member: Arc<Member>,
    attempt: u64,
}

impl ShmControl {
    pub(in crate::ranks) fn new(member: Arc<Member>, attempt: u64) -> Self {
        Self { member, attempt }
    }

    fn group(&self, group: &Arc<RankGroup>) -> ShmGroup {
        ShmGroup::new(self.member.clone(), group.clone())
    }
}

impl ControlPlane for ShmControl {
    fn attempt(&self) -> u64 {
        self.attempt
    }

    fn post_failure(&self, error: &Error) {
        let _ = self.member.post(error);
    }

    fn failure(&self) -> Option<RankFailure> {
        self.member.failure()
    }

    fn agree(&self) -> Result<Option<RankFailure>> {
        self.member.agree()
    }

    fn is_waiting(&self, rank: usize) -> bool {
        self.member.is_waiting(rank)
    }

    fn barrier(&self, group: &Arc<RankGroup>) -> Result<()> {
        self.group(group).barrier()
    }

    fn all_gather_bytes(&self, group: &Arc<RankGroup>, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        all_gather_bytes(&self.group(group), bytes)
    }

    fn broadcast(&self, group: &Arc<RankGroup>, bytes: &mut [u8], root: usize) -> Result<()> {
        let mut tensor = Tensor::from_slice(bytes);
        self.group(group).broadcast(&mut tensor, root)?;
        bytes.copy_from_slice(&torch::byte_vec(&tensor)?);
        Ok(())
    }
}
