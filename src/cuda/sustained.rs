//! Time and energy of work on a GPU that is held to its power limit.

use std::time::Instant;

use super::nvml::EnergyMeter;
use super::torch_stream::TorchStream;
use crate::error::Result;

/// How long work is repeated: before it counts, so that the chip's clock is what its power allows, and then again.
const SECONDS: f64 = 0.5;
/// Most repetitions for that: some work takes next to no time.
const MOST: f64 = 20_000.0;

/// Time and energy of work when nothing else runs for half a second, as the chip's clock then follows its power.
#[derive(Debug, Clone, Copy)]
pub struct Sustained {
    /// Microseconds.
    pub us: f64,
    /// Energy of the GPU, idle parts included.
    pub joules: f64,
}

impl Sustained {
    /// Measures `work`, which queues on `stream` and takes about `us` microseconds alone.
    ///
    /// # Errors
    /// The errors of `work`; [`crate::Error::Cuda`]; [`crate::Error::Environment`] for a GPU that does not count its energy.
    pub fn measure(
        meter: &EnergyMeter,
        stream: &TorchStream,
        us: f64,
        mut work: impl FnMut() -> Result<()>,
    ) -> Result<Self> {
        let times = (1e6 * SECONDS / us).clamp(1.0, MOST).ceil() as usize;
        let mut run = || -> Result<()> {
            (0..times).try_for_each(|_| work())?;
            stream.synchronize()
        };
        run()?;
        let (joules, start) = (meter.joules()?, Instant::now());
        run()?;
        let us = start.elapsed().as_secs_f64() * 1e6 / times as f64;
        Ok(Self { us, joules: (meter.joules()? - joules) / times as f64 })
    }
}
