//! Decides on which device and in which dtype a run computes.

use serde_json::Value;
use tch::{Device, Kind};

use super::abilities::shortfalls;
use super::devices;
use super::library::environment;
use crate::config::{self, Dtype, ResidualDtype};
use crate::error::{Error, Result};
use crate::phase;

/// The device of a run's tensors, and the dtype of its weights and activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// Whether tensors are on GPUs, one per process, or on the CPU.
    pub on_cuda: bool,
    /// Dtype of weights and activations.
    pub kind: Kind,
}

impl Placement {
    /// Chooses the placement from the configuration and this machine, before any process group is joined. Creates no context on a GPU.
    ///
    /// # Errors
    /// [`Error::Environment`] if CUDA is requested but no GPU is visible, if there is an NVIDIA driver that does not work, or if a GPU is too old.
    pub fn new(device: config::Device, dtype: Dtype) -> Result<Self> {
        let on_cuda = device != config::Device::Cpu && !devices()?.is_empty();
        if device == config::Device::Cuda && !on_cuda {
            return Err(environment(
                "device = cuda, but no GPU is visible: check the NVIDIA driver and CUDA_VISIBLE_DEVICES, or set device = cpu",
            ));
        }
        if on_cuda {
            let lines = shortfalls()?;
            let speaks = !phase::is_watched(); // the launcher prints messages for its workers
            lines.iter().filter(|_| speaks).for_each(|line| tracing::info!("{line}"));
        }
        Ok(Self::of(on_cuda, dtype))
    }

    /// The placement for a process group whose tensors are on `actual`.
    ///
    /// # Errors
    /// [`Error::Environment`] if that is another device than `device` requests.
    pub fn in_world(device: config::Device, dtype: Dtype, actual: Device) -> Result<Self> {
        let on_cuda = actual.is_cuda();
        if (device == config::Device::Cuda && !on_cuda) || (device == config::Device::Cpu && on_cuda) {
            let message = format!(
                "device = {}, but this process group was created on {actual:?}; set device = auto, or create it with the other backend",
                device.name()
            );
            return Err(Error::Environment { message });
        }
        Ok(Self::of(on_cuda, dtype))
    }

    /// The placement of a run on GPUs of another machine, for predictions.
    pub fn on_other_gpus(dtype: Dtype) -> Self {
        Self::of(true, dtype)
    }

    /// The configuration keys that follow from the placement, for the check of combinations.
    pub fn settings(self) -> [(&'static str, Value); 2] {
        let device = if self.on_cuda { config::Device::Cuda } else { config::Device::Cpu };
        let dtype = if self.kind == Kind::BFloat16 { Dtype::Bfloat16 } else { Dtype::Float32 };
        [("device", device.name().into()), ("dtype", dtype.name().into())]
    }

    fn of(on_cuda: bool, dtype: Dtype) -> Self {
        let kind = match dtype {
            Dtype::Float32 => Kind::Float,
            Dtype::Bfloat16 => Kind::BFloat16,
            Dtype::Auto if on_cuda => Kind::BFloat16,
            Dtype::Auto => Kind::Float,
        };
        Self { on_cuda, kind }
    }
}

/// Type of the residual stream of a network with weights of `kind`, in training and in generation.
pub fn residual_kind(choice: ResidualDtype, kind: Kind) -> Kind {
    match choice {
        ResidualDtype::Auto => kind,
        ResidualDtype::Float32 => Kind::Float,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dtype_follows_the_device_unless_given() {
        let place = |dtype, on| Placement::in_world(config::Device::Auto, dtype, on).unwrap();
        assert_eq!(place(Dtype::Auto, Device::Cpu), Placement { on_cuda: false, kind: Kind::Float });
        assert_eq!(place(Dtype::Auto, Device::Cuda(1)), Placement { on_cuda: true, kind: Kind::BFloat16 });
        assert_eq!(place(Dtype::Float32, Device::Cuda(0)).kind, Kind::Float);
        assert_eq!(Placement::new(config::Device::Cpu, Dtype::Bfloat16).unwrap().kind, Kind::BFloat16);
        assert_eq!(residual_kind(ResidualDtype::Auto, Kind::BFloat16), Kind::BFloat16);
        assert_eq!(residual_kind(ResidualDtype::Float32, Kind::BFloat16), Kind::Float);
    }

    #[test]
    fn a_process_group_on_another_device_is_refused() {
        let refused = |device, actual| Placement::in_world(device, Dtype::Auto, actual).is_err();
        assert!(refused(config::Device::Cuda, Device::Cpu) && refused(config::Device::Cpu, Device::Cuda(0)));
        assert!(!refused(config::Device::Cuda, Device::Cuda(3)));
    }
}
