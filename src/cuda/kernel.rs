//! Loading and launching what `nvrtc` compiled.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{result, sys};

use super::abilities::has_clusters;
use super::context::{Context, check};
use super::library::environment;
use super::nvrtc::{KernelSource, cubin};
use crate::error::{Error, Result};

/// Dynamic shared memory that a kernel has without asking for it.
const SHARED_UNASKED_BYTES: u32 = 48 << 10;

/// A kernel on one GPU. Its module stays loaded until the process ends.
#[derive(Debug, Clone)]
pub(super) struct Kernel {
    context: Arc<Context>,
    function: sys::CUfunction,
    /// Whether its launches may overlap with the work before them.
    overlaps: bool,
}

// SAFETY: a function of a module that is never unloaded; the driver's functions may be called from any thread.
unsafe impl Send for Kernel {}

/// One argument of a launch, of the exact type that the kernel declares.
#[derive(Debug, Clone, Copy)]
pub(super) enum Argument {
    /// A device address, or null.
    Address(*mut c_void),
    /// A structure of addresses.
    Addresses([*mut c_void; 8]),
    /// `long long`.
    Count(i64),
    /// `float`.
    Float(f32),
    /// The descriptor by which boxes of a matrix are copied.
    TensorMap(sys::CUtensorMap),
}

impl Argument {
    /// The address of nothing.
    pub(super) const NULL: Self = Self::Address(std::ptr::null_mut());
}

impl Kernel {
    /// The function `name` (`extern "C"`) of `source` on GPU `ordinal`, compiled and loaded on first use.
    ///
    /// # Errors
    /// The errors of the compiler; [`Error::InvalidArgument`] with the name where the source has no such kernel;
    /// [`Error::Cuda`] when the driver cannot load it.
    pub(super) fn get(source: &'static KernelSource, name: &str, ordinal: usize) -> Result<Self> {
        static LOADED: Mutex<Option<HashMap<(usize, String), Kernel>>> = Mutex::new(None);
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        let loaded = loaded.get_or_insert_default();
        let key = (ordinal, name.to_owned());
        if let Some(kernel) = loaded.get(&key) {
            return Ok(kernel.clone());
        }
        let context = Context::retain(ordinal)?;
        let capability = context.compute_capability()?;
        let image = cubin(source, capability)?;
        let c_name = CString::new(name).map_err(|_| environment("a kernel's name with a NUL byte"))?;
        // SAFETY: the image is a complete cubin; the driver copies it.
        let module = check("cuModuleLoadData", unsafe { result::module::load_data(image.as_ptr().cast()) })?;
        // SAFETY: the module was loaded just now.
        let function = unsafe { result::module::get_function(module, c_name) };
        if function.as_ref().is_err_and(|error| error.0 == sys::CUresult::CUDA_ERROR_NOT_FOUND) {
            return Err(no_kernel(source, name));
        }
        let function = check("cuModuleGetFunction", function)?;
        let kernel = Self { context, function, overlaps: has_clusters(capability) };
        loaded.insert(key, kernel.clone());
        Ok(kernel)
    }

    /// Queues the kernel on `stream` with `grid` blocks of `block` threads and `shared_bytes` of dynamic shared memory. An
    /// `early` one is brought to the processors while the work before it ends, which hides its launch (programmatic
    /// dependent launch); before `wait_for_inputs` of scalar.cuh it writes nothing and reads only what the work before it does not
    /// write. Chips that have no such launches take an ordinary one. `cluster` neighbours run at the same time.
    ///
    /// # Safety
    /// The arguments are those that the kernel declares, in number and type, and every address is valid on this GPU for
    /// what the kernel does there, until `stream` has passed it.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub(super) unsafe fn launch(
        &self,
        (grid, block, shared_bytes): (u32, u32, u32),
        (cluster, early): (u32, bool),
        stream: *mut c_void,
        arguments: &[Argument],
    ) -> Result<()> {
        self.context.make_current()?;
        let mut addresses: Vec<*mut c_void> = arguments
            .iter()
            .map(|argument| match argument {
                Argument::Address(value) => (&raw const *value).cast_mut().cast(),
                Argument::Addresses(values) => (&raw const *values).cast_mut().cast(),
                Argument::Count(value) => (&raw const *value).cast_mut().cast(),
                Argument::Float(value) => (&raw const *value).cast_mut().cast(),
                Argument::TensorMap(value) => (&raw const *value).cast_mut().cast(),
            })
            .collect();
        if shared_bytes > SHARED_UNASKED_BYTES {
            let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: sets a number of a function that stays loaded.
            let code = unsafe { sys::cuFuncSetAttribute(self.function, most, shared_bytes as i32) };
            check("cuFuncSetAttribute", code.result())?;
        }
        use sys::{CUlaunchAttributeID as Id, CUlaunchAttributeValue as Value};
        let attribute = |id, value| sys::CUlaunchAttribute { id, pad: [0; 4], value };
        let mut attributes = Vec::with_capacity(2);
        if early && self.overlaps {
            let value = Value { programmaticStreamSerializationAllowed: 1 };
            attributes.push(attribute(Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, value));
        }
        if cluster > 1 {
            let value =
                Value { clusterDim: sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: cluster, y: 1, z: 1 } };
            attributes.push(attribute(Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value));
        }
        let config = sys::CUlaunchConfig {
            gridDimX: grid,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared_bytes,
            hStream: stream.cast(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        };
        // SAFETY: the caller's promise; the driver copies configuration and arguments before it returns.
        check("cuLaunchKernelEx", unsafe {
            sys::cuLaunchKernelEx(&raw const config, self.function, addresses.as_mut_ptr(), std::ptr::null_mut())
                .result()
        })
    }
}

/// Names are put together from the kinds and sizes of an operation's tensors: those of this one have no kernel.
fn no_kernel(source: &KernelSource, name: &str) -> Error {
    let expected = "kinds and sizes of tensors that one of its kernels is for".to_owned();
    Error::InvalidArgument { op: source.file, expected, got: name.to_owned() }
}
