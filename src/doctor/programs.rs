//! Other programs' answers, with a deadline: `nvidia-smi` may hang on a broken GPU.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;

const PATIENCE: Duration = Duration::from_secs(20);

/// What a program prints; `None` where it is missing, fails, or takes too long.
pub(super) fn output(program: &Path, args: &[&str]) -> Option<String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .ok()?;
    let output = runtime.block_on(async {
        let output = Command::new(program)
            .args(args)
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .output();
        tokio::time::timeout(PATIENCE, output).await
    });
    // A killed program that cannot end is left to the system.
    runtime.shutdown_background();
    let output = output.ok()?.ok()?;
    output
        .status
        .success()
        .then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}
