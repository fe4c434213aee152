//! A group of one rank, in which every operation copies or does nothing.

use std::sync::Arc;

use tch::{Device, Tensor};

use super::collective::{Collective, ReduceOp};
use super::control::RankGroup;
use crate::error::{Error, Result};

/// A group with only this rank, for library use, tests and mesh axes of size 1.
#[derive(Debug, Clone)]
pub struct SingleRank {
    group: Arc<RankGroup>,
    device: Device,
}

impl SingleRank {
    /// A group called `name` with only world rank `rank`, for tensors on `device`.
    pub fn new(name: &str, rank: usize, device: Device) -> Self {
        Self { group: RankGroup::new(0, name, &[rank], rank), device }
    }
}

impl Default for SingleRank {
    fn default() -> Self {
        Self::new("single", 0, Device::Cpu)
    }
}

impl Collective for SingleRank {
    fn members(&self) -> &RankGroup {
        &self.group
    }

    fn device(&self) -> Device {
        self.device
    }

    fn all_reduce(&self, _: &mut Tensor, _: ReduceOp) -> Result<()> {
        Ok(())
    }

    fn all_gather(&self, input: &Tensor, output: &mut Tensor) -> Result<()> {
        copy("all_gather", input, output)
    }

    fn reduce_scatter(&self, input: &Tensor, output: &mut Tensor) -> Result<()> {
        copy("reduce_scatter", input, output)
    }

    fn broadcast(&self, _: &mut Tensor, _: usize) -> Result<()> {
        Ok(())
    }

    fn all_to_all(&self, input: &Tensor, output: &mut Tensor) -> Result<()> {
        copy("all_to_all", input, output)
    }

    fn barrier(&self) -> Result<()> {
        Ok(())
    }
}

fn copy(op: &'static str, input: &Tensor, output: &mut Tensor) -> Result<()> {
    if input.numel() != output.numel() || input.kind() != output.kind() {
        let describe = |tensor: &Tensor| format!("{} x {:?}", tensor.numel(), tensor.kind());
        return Err(Error::InvalidArgument { op, expected: describe(input), got: describe(output) });
    }
    if input.data_ptr() != output.data_ptr() {
        output.f_view_as(input)?.f_copy_(input)?;
    }
    Ok(())
}
