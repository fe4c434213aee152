//! Loads and launches kernels that `nvrtc` compiled.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{CString, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{result, sys};

use super::abilities::has_clusters;
use super::context::{Context, check};
use super::library::environment;
use super::nvrtc::{KernelSource, cubin};
use crate::error::{Error, Result};

/// Shared memory, static and dynamic together, that a block can use without an explicit request to the driver.
const SHARED_UNASKED_BYTES: u32 = 48 << 10;

/// A kernel on one GPU. Its module stays loaded until the process ends.
#[derive(Debug, Clone)]
pub(super) struct Kernel {
    context: Arc<Context>,
    function: sys::CUfunction,
    name: Arc<str>,
    /// Static shared memory of the kernel, in addition to a launch's dynamic shared memory.
    static_bytes: u32,
    /// Whether the GPU supports launches that overlap with preceding work (programmatic dependent launch).
    overlaps: bool,
}

// SAFETY: a function of a module that is never unloaded; the driver's functions may be called from any thread.
unsafe impl Send for Kernel {}

/// The kernels and modules that this process has loaded, by GPU and by name or file.
#[derive(Default)]
struct LoadedKernels {
    kernels: HashMap<(usize, String), Kernel>,
    modules: HashMap<(usize, &'static str), Module>,
}

/// The loaded machine code of one source file on one GPU; it is never unloaded.
struct Module(sys::CUmodule);

// SAFETY: the driver's functions may be called with a module from any thread.
unsafe impl Send for Module {}

/// One argument of a launch; it must have exactly the type that the kernel declares.
#[derive(Debug, Clone, Copy)]
pub(super) enum Argument {
    /// A device address, or null.
    Address(*mut c_void),
    /// A structure of up to eight device addresses.
    Addresses([*mut c_void; 8]),
    /// A `long long`.
    Count(i64),
    /// A `float`.
    Float(f32),
    /// A tensor map (TMA descriptor) for copies of boxes of a matrix.
    TensorMap(sys::CUtensorMap),
}

impl Argument {
    /// The null address.
    pub(super) const NULL: Self = Self::Address(std::ptr::null_mut());
}

impl Kernel {
    /// Returns the function `name` (`extern "C"`) of `source` on GPU `ordinal`, compiled and loaded on first use.
    ///
    /// # Errors
    /// The errors of the compiler; [`Error::InvalidArgument`] with the name if the source has no such kernel; [`Error::Cuda`] if the driver cannot
    /// load it.
    pub(super) fn get(source: &'static KernelSource, name: &str, ordinal: usize) -> Result<Self> {
        static LOADED: Mutex<Option<LoadedKernels>> = Mutex::new(None);
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        let loaded = loaded.get_or_insert_default();
        let key = (ordinal, name.to_owned());
        if let Some(kernel) = loaded.kernels.get(&key) {
            return Ok(kernel.clone());
        }
        let context = Context::retain(ordinal)?;
        let capability = context.compute_capability()?;
        let c_name = CString::new(name).map_err(|_| environment("a kernel's name with a NUL byte"))?;
        let module = match loaded.modules.entry((ordinal, source.file)) {
            Entry::Occupied(module) => module.get().0,
            Entry::Vacant(place) => {
                let image = cubin(source, capability)?;
                // SAFETY: the image is a complete cubin; the driver copies it.
                let module = check("cuModuleLoadData", unsafe { result::module::load_data(image.as_ptr().cast()) })?;
                place.insert(Module(module)).0
            }
        };
        // SAFETY: modules are never unloaded.
        let function = unsafe { result::module::get_function(module, c_name) };
        if function.as_ref().is_err_and(|error| error.0 == sys::CUresult::CUDA_ERROR_NOT_FOUND) {
            return Err(no_kernel(source, name));
        }
        let function = check("cuModuleGetFunction", function)?;
        let static_bytes = static_shared_bytes(function)?;
        let kernel = Self { context, function, name: name.into(), static_bytes, overlaps: has_clusters(capability) };
        loaded.kernels.insert(key, kernel.clone());
        Ok(kernel)
    }

    /// Queues the kernel on `stream` with `grid` blocks of `block` threads and `shared_bytes` of dynamic shared memory. With `early`, blocks are
    /// scheduled while the preceding work still runs, which hides launch latency (programmatic dependent launch); before `wait_for_inputs` in
    /// scalar.cuh such a kernel must write nothing, and must not read memory that the preceding work writes. On GPUs without this feature the launch
    /// is an ordinary one. The blocks of a `cluster` run at the same time.
    ///
    /// # Safety
    /// The arguments match the kernel's declaration in number and type. Every address is valid on this GPU for the kernel's accesses, until `stream`
    /// has passed it.
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
        let shape = LaunchShape { grid, block, shared_bytes, cluster };
        let named = |error| shape.name(error, &self.name, self.static_bytes);
        if must_ask(self.static_bytes, shared_bytes) {
            let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: sets a number of a function that stays loaded.
            let code = unsafe { sys::cuFuncSetAttribute(self.function, most, shared_bytes as i32) };
            check("cuFuncSetAttribute", code.result()).map_err(named)?;
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
        // SAFETY: guaranteed by the caller; the driver copies configuration and arguments before it returns.
        let code = unsafe {
            sys::cuLaunchKernelEx(&raw const config, self.function, addresses.as_mut_ptr(), std::ptr::null_mut())
        };
        check("cuLaunchKernelEx", code.result()).map_err(named)
    }
}

/// Whether a launch must explicitly request its shared memory. The kernel's static shared memory counts too.
pub(super) fn must_ask(static_bytes: u32, dynamic_bytes: u32) -> bool {
    static_bytes + dynamic_bytes > SHARED_UNASKED_BYTES
}

fn static_shared_bytes(function: sys::CUfunction) -> Result<u32> {
    let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
    let mut bytes = 0;
    // SAFETY: the number outlives the call; the function stays loaded.
    let code = unsafe { sys::cuFuncGetAttribute(&raw mut bytes, which, function) };
    check("cuFuncGetAttribute", code.result())?;
    Ok(bytes as u32)
}

/// The configuration of a launch, for error messages.
#[derive(Debug, Clone, Copy)]
struct LaunchShape {
    grid: u32,
    block: u32,
    shared_bytes: u32,
    cluster: u32,
}

impl LaunchShape {
    /// Adds the kernel's name and the launch configuration to `error`, because the driver's message does not identify the launch.
    fn name(self, error: Error, kernel: &str, static_bytes: u32) -> Error {
        let Error::Cuda { op, code, message } = error else { return error };
        let Self { grid, block, shared_bytes, cluster } = self;
        let clusters = if cluster > 1 { format!(" in clusters of {cluster}") } else { String::new() };
        let shape = format!("{grid} blocks of {block} threads{clusters}");
        let shared = format!("{shared_bytes} bytes of dynamic and {static_bytes} of static shared memory");
        Error::Cuda { op, code, message: format!("{message}, in a launch of {kernel}: {shape}, {shared}") }
    }
}

/// The error for a kernel name that the source does not define. Names are built from the types and sizes of an operation's tensors, so this means
/// that no kernel supports them.
fn no_kernel(source: &KernelSource, name: &str) -> Error {
    let expected = "dtypes and sizes that one of its kernels supports".to_owned();
    Error::InvalidArgument { op: source.file, expected, got: name.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn static_shared_memory_counts_towards_the_limit() {
        assert!(!must_ask(0, 48 << 10) && !must_ask(128, (48 << 10) - 128));
        assert!(must_ask(128, 48 << 10) && must_ask(0, (48 << 10) + 16));
    }

    #[test]
    fn a_failed_launch_names_kernel_and_grid() {
        let shape = LaunchShape { grid: 16_384, block: 512, shared_bytes: 49_152, cluster: 2 };
        let refused = Error::Cuda { op: "cuLaunchKernelEx", code: 1, message: "invalid argument".to_owned() };
        let message = shape.name(refused, "swiglu_backward_fp8", 128).to_string();
        for part in [
            "cuLaunchKernelEx: CUDA code 1, invalid argument, in a launch of swiglu_backward_fp8: 16384 blocks of 512 threads in clusters of 2",
            "49152 bytes of dynamic and 128 of static shared memory",
        ] {
            assert!(message.contains(part), "{message}");
        }
    }
}
