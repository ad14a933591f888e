//! `candle-cache load`: stands here until the worker's own command replaces it on merge.

use crate::{Global, exit};

/// Flags of `load`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder or file
    #[arg(env = "CANDLE_CACHE_MODEL")]
    model: std::path::PathBuf,
    /// Name of the entry
    #[arg(long)]
    name: Option<String>,
    /// Device
    #[arg(long, default_value = "host")]
    device: String,
    /// Type of float tensors
    #[arg(long, default_value = "stored")]
    dtype: String,
}

/// Runs the command.
pub fn run(args: Args, _global: &Global) -> u8 {
    eprintln!(
        "candle-cache: {} ({:?}, {}, {}): this build has no worker",
        args.model.display(),
        args.name,
        args.device,
        args.dtype
    );
    exit::FAILED
}
