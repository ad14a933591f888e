//! The NVIDIA driver: found at run time, started once, its answers turned into errors.
//! Every call into it from this folder goes through [`check`].

use std::sync::OnceLock;

use cudarc::driver::{DriverError, sys};

use super::CudaError;

/// CUDA 11.4: the first whose driver gives a MIG instance's own UUID.
const WANTED: i32 = 11040;

/// Finds and starts the driver.
///
/// # Errors
/// When there is none, it is too old, or it does not start. `CUDA_ERROR_NO_DEVICE` is no error here:
/// the list of GPUs is empty then.
pub(super) fn start() -> Result<(), CudaError> {
    static STARTED: OnceLock<()> = OnceLock::new();
    if STARTED.get().is_some() {
        return Ok(());
    }
    look()?;
    let mut found = 0;
    // SAFETY: the library is there (`look`), and `found` outlives the call.
    let code = unsafe { sys::cuDriverGetVersion(&mut found) };
    if code == sys::CUresult::CUDA_ERROR_STUB_LIBRARY {
        let why =
            "the libcuda.so found is a toolkit's stand-in to link against, not a driver's".into();
        return Err(CudaError::NoDriver { why });
    }
    check(code, || "asking for the driver's version".into())?;
    if found < WANTED {
        return Err(CudaError::OldDriver {
            found,
            wanted: WANTED,
        });
    }
    // SAFETY: the library is there; starting it twice has no effect.
    let code = unsafe { sys::cuInit(0) };
    if code == sys::CUresult::CUDA_ERROR_NO_DEVICE {
        return Ok(());
    }
    check(code, || "starting the NVIDIA driver".into())?;
    // A failure is not kept: a driver may be installed, or a module loaded, while we run.
    let _ = STARTED.set(());
    Ok(())
}

/// cudarc panics where the library is missing, so it is looked for first.
fn look() -> Result<(), CudaError> {
    let mut why = String::new();
    for name in ["libcuda.so.1", "libcuda.so"] {
        // SAFETY: loading the driver's library runs its initializers, which is what a CUDA program
        // does at its start.
        match unsafe { libloading::Library::new(name) } {
            Ok(_) => return Ok(()),
            // The loader's own words stand behind the error, not in it.
            Err(e) if why.is_empty() => {
                why = std::error::Error::source(&e)
                    .map_or_else(|| e.to_string(), ToString::to_string);
            }
            Err(_) => {}
        }
    }
    Err(CudaError::NoDriver { why })
}

/// Turns the driver's answer into an error that says what was tried.
pub(super) fn check(code: sys::CUresult, what: impl FnOnce() -> String) -> Result<(), CudaError> {
    code.result().map_err(|e| failed(e, what()))
}

/// The driver's own name and words for a failure.
pub(super) fn failed(e: DriverError, what: String) -> CudaError {
    let meaning = e.error_string().map_or_else(
        |_| "no description".into(),
        |s| s.to_string_lossy().into_owned(),
    );
    CudaError::Driver {
        what,
        code: format!("{:?}", e.0),
        meaning,
    }
}
