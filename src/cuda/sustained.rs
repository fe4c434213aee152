//! Measures time and energy of work on a GPU under sustained load, limited by its power.

use std::time::Instant;

use super::nvml::EnergyMeter;
use super::torch_stream::TorchStream;
use crate::error::Result;

/// How long work is repeated, in seconds: first as warm-up, so that the GPU's clock settles at its power limit, then again for the measurement.
const SECONDS: f64 = 0.5;
/// Maximum number of repetitions, for work that takes almost no time.
const MOST: f64 = 20_000.0;

/// Time and energy of one run of some work, repeated for half a second so that the GPU's clock is limited by its power.
#[derive(Debug, Clone, Copy)]
pub struct Sustained {
    /// Time in microseconds.
    pub us: f64,
    /// Energy of the whole GPU in joules, including idle units.
    pub joules: f64,
}

impl Sustained {
    /// Measures `work`, which queues on `stream` and takes about `us` microseconds on its own.
    ///
    /// # Errors
    /// The errors of `work`; [`crate::Error::Cuda`]; [`crate::Error::Environment`] for a GPU without an energy counter.
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
