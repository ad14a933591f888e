//! The driver, every visible GPU, and the toolkit that engines are built with.

use std::path::{Path, PathBuf};

use indicatif::BinaryBytes;

use super::programs::output;
use super::{Check, State};
use crate::slab::cuda::{ComputeMode, CudaError, Facts, Gpu, Version, driver_version, gpus};

const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";
const NONE_USABLE: &str = "GPU entries cannot be used; entries in host memory can";

pub(super) fn checks() -> Vec<Check> {
    let mut checks = Vec::new();
    let driver = driver_version();
    checks.push(driver_check(&driver));
    let found = match &driver {
        Ok(_) => gpus(),
        Err(_) => Ok(Vec::new()),
    };
    match found {
        Ok(gpus) => {
            checks.push(visible(&gpus, driver.is_ok()));
            let modes = if gpus.is_empty() {
                None
            } else {
                persistence_modes()
            };
            checks.extend(gpus.iter().map(|gpu| check(gpu, modes.as_deref())));
        }
        Err(e) => checks.push(Check::error("GPUs", State::Wrong, &e)),
    }
    checks.push(toolkit(driver.ok()));
    checks
}

fn driver_check(driver: &Result<Version, CudaError>) -> Check {
    match driver {
        Ok(version) => {
            let module = std::fs::read_to_string("/sys/module/nvidia/version").ok();
            let module = module.as_deref().map(str::trim);
            let mut found = format!("CUDA {version}");
            if let Some(module) = module {
                found.push_str(&format!(", NVIDIA driver {module}"));
            }
            Check::ok("driver", found)
                .fact("present", true)
                .fact("cuda", version.to_string())
                .fact("version", module)
        }
        Err(e) => {
            let absent =
                matches!(e, CudaError::NoDriver { .. }) && !Path::new("/dev/nvidiactl").exists();
            let state = if absent { State::Warning } else { State::Wrong };
            Check::new("driver", state, format!("{NONE_USABLE}: {e}")).fact("present", false)
        }
    }
}

fn visible(gpus: &[Gpu], driver: bool) -> Check {
    let variable = std::env::var_os(VISIBLE).map(|v| v.to_string_lossy().into_owned());
    let set = match &variable {
        Some(value) => format!("{VISIBLE} is `{value}`"),
        None => format!("{VISIBLE} is not set"),
    };
    let check = match gpus.len() {
        0 if driver => Check::warning(
            "GPUs",
            format!("the driver shows no GPU here, so {NONE_USABLE}; {set}"),
            "give the container its GPUs (`--gpus all`), or set CUDA_VISIBLE_DEVICES to a GPU of `nvidia-smi -L`: \
             at the first that is not there the driver stops reading",
        ),
        0 => Check::ok("GPUs", format!("none; {set}")),
        1 => Check::ok("GPUs", format!("1; {set}")),
        n => Check::ok("GPUs", format!("{n}; {set}")),
    };
    check
        .fact("count", gpus.len())
        .fact("cuda_visible_devices", variable)
}

fn check(gpu: &Gpu, modes: Option<&str>) -> Check {
    let name = format!("cuda:{}", gpu.ordinal);
    let facts = match gpu.facts() {
        Ok(facts) => facts,
        Err(e) => return Check::error(name, State::Wrong, &e),
    };
    let persistence = persistence(modes, facts.bus.as_deref());
    // Whatever is missing is found by trying, and said by the step that fails.
    let trial = gpu
        .anchor()
        .map_err(|e| e.to_string())
        .and_then(|_| gpu.try_sharing().map_err(|e| e.to_string()));
    let free = match &trial {
        Ok(()) => gpu.memory().ok().map(|(free, _)| free),
        Err(_) => None,
    };
    verdict(name, gpu, &facts, persistence, &trial)
        .fact("ordinal", gpu.ordinal)
        .fact("name", gpu.name.as_str())
        .fact("uuid", gpu.id.to_string())
        .fact("memory_bytes", facts.memory_bytes)
        .fact("free_bytes", free)
        .fact("virtual_memory", facts.virtual_memory)
        .fact("posix_descriptors", facts.descriptors)
        .fact("compute_mode", mode(facts.compute_mode))
        .fact("persistence", persistence)
        .fact("integrated", facts.integrated)
        .fact("mig", facts.mig)
        .fact("shares_memory", trial.is_ok())
        .with_free(free)
}

impl Check {
    fn with_free(mut self, free: Option<u64>) -> Self {
        if let Some(free) = free {
            self.found
                .push_str(&format!("; {} free", BinaryBytes(free)));
        }
        self
    }
}

fn verdict(
    name: String,
    gpu: &Gpu,
    facts: &Facts,
    persistence: Option<bool>,
    trial: &Result<(), String>,
) -> Check {
    let kind = match (facts.mig, facts.integrated) {
        (true, _) => ", a MIG instance",
        (_, true) => ", integrated: its memory is the host's",
        _ => "",
    };
    let found = format!(
        "{}, {}{kind}, {}, compute mode {}, persistence mode {}",
        gpu.name,
        gpu.id,
        BinaryBytes(facts.memory_bytes),
        mode(facts.compute_mode),
        match persistence {
            Some(true) => "on",
            Some(false) => "off",
            None => "unknown",
        },
    );
    if let Err(why) = trial {
        let way_out = match facts.compute_mode {
            ComputeMode::Prohibited | ComputeMode::Exclusive => {
                "let processes share it: `nvidia-smi -c DEFAULT`"
            }
            _ => "until that is solved use another GPU, or `--device host`",
        };
        return Check::wrong(name, format!("{found}; it cannot be used: {why}"), way_out);
    }
    let found = format!("{found}; a slab was shared and read");
    match facts.compute_mode {
        ComputeMode::Exclusive => Check::warning(
            name,
            found,
            "only one process at a time may open this GPU, so no engine can run while a model loads: \
             `nvidia-smi -c DEFAULT`",
        ),
        _ => Check::ok(name, found),
    }
}

fn mode(mode: ComputeMode) -> String {
    match mode {
        ComputeMode::Shared => "shared".into(),
        ComputeMode::Exclusive => "exclusive".into(),
        ComputeMode::Prohibited => "prohibited".into(),
        ComputeMode::Other(number) => format!("number {number}"),
    }
}

/// `BUS, Enabled|Disabled` a line.
fn persistence_modes() -> Option<String> {
    let args = [
        "--query-gpu=pci.bus_id,persistence_mode",
        "--format=csv,noheader",
    ];
    output(Path::new("nvidia-smi"), &args)
}

fn persistence(modes: Option<&str>, bus: Option<&str>) -> Option<bool> {
    let bus = bus?;
    modes?.lines().find_map(|line| {
        let (place, mode) = line.split_once(',')?;
        // It writes the domain with eight digits, the driver with four.
        if !place.trim().to_lowercase().ends_with(bus) {
            return None;
        }
        match mode.trim() {
            "Enabled" => Some(true),
            "Disabled" => Some(false),
            _ => None,
        }
    })
}

fn toolkit(driver: Option<Version>) -> Check {
    let nvcc = ["CUDA_HOME", "CUDA_PATH"]
        .iter()
        .filter_map(std::env::var_os)
        .map(|home| PathBuf::from(home).join("bin/nvcc"))
        .find(|nvcc| nvcc.exists())
        .unwrap_or_else(|| "nvcc".into());
    let Some(version) = output(&nvcc, &["--version"]).as_deref().and_then(release) else {
        return Check::ok(
            "toolkit",
            "no nvcc on PATH or in CUDA_HOME: needed only where engines are built with the feature `cuda`",
        )
        .way_out("`scripts/cuda-toolkit.sh` in the repository brings one")
        .fact("cuda", None::<String>);
    };
    let found = format!("{} is of CUDA {version}", nvcc.display());
    let check = match driver.filter(|driver| *driver < version) {
        Some(driver) => Check::warning(
            "toolkit",
            format!(
                "{found}, the driver speaks CUDA {driver}: it may refuse the kernels that this nvcc makes"
            ),
            "build with a toolkit no newer than the driver, or update the driver",
        ),
        None => Check::ok("toolkit", found),
    };
    check
        .fact("cuda", version.to_string())
        .fact("nvcc", nvcc.display().to_string())
}

/// The version in what `nvcc --version` prints: `…, release 13.0, V13.0.88`.
fn release(text: &str) -> Option<Version> {
    let (_, rest) = text.split_once("release ")?;
    let (version, _) = rest.split_once(',')?;
    let (major, minor) = version.split_once('.')?;
    Some(Version {
        major: major.parse().ok()?,
        minor: minor.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn persistence_is_found_by_the_place_on_the_bus() {
        let modes =
            "00000000:18:00.0, Enabled\n00000000:2A:00.0, Disabled\n00000000:3B:00.0, [N/A]\n";
        let of = |bus| persistence(Some(modes), Some(bus));
        assert_eq!(of("0000:18:00.0"), Some(true));
        assert_eq!(of("0000:2a:00.0"), Some(false));
        assert_eq!(of("0000:3b:00.0"), None);
        assert_eq!(of("0000:99:00.0"), None);
        assert_eq!(persistence(None, Some("0000:18:00.0")), None);
        assert_eq!(persistence(Some(modes), None), None);
    }

    #[test]
    fn the_toolkits_version_is_read_from_nvccs_words() {
        let text = "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 13.0, V13.0.88\n";
        let version = release(text);
        assert_eq!(version.map(|v| v.to_string()).as_deref(), Some("13.0"));
        assert_eq!(release("release thirteen, "), None);
        assert_eq!(release(""), None);
    }

    #[test]
    fn versions_compare_by_number() {
        let version = |major, minor| Version { major, minor };
        assert!(version(12, 10) > version(12, 9));
        assert!(version(13, 0) > version(12, 9));
    }
}
