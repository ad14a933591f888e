//! Real daemons for tests, and the paths of fixtures.
#![allow(dead_code, missing_docs, unreachable_pub, clippy::unwrap_used)]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

/// A daemon process with a socket folder of its own. Killed when dropped.
pub struct Daemon {
    pub child: Child,
    pub folder: tempfile::TempDir,
}

pub fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_candle-cache"));
    command.env_remove("CANDLE_CACHE_SOCKET_DIR");
    command
}

impl Daemon {
    pub fn start() -> Self {
        Self::start_in(
            tempfile::Builder::new()
                .prefix("candle-cache-test")
                .tempdir()
                .unwrap(),
            &[],
        )
    }

    pub fn start_in(folder: tempfile::TempDir, args: &[&str]) -> Self {
        let mut child = program()
            .args(["serve", "--socket-dir"])
            .arg(folder.path())
            .args(args)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // The first line says that it listens.
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        assert!(line.contains("daemon.sock"), "the daemon said {line:?}");
        Self { child, folder }
    }

    pub fn dir(&self) -> &Path {
        self.folder.path()
    }

    pub fn run(&self, args: &[&str]) -> Output {
        program()
            .args(args)
            .arg("--socket-dir")
            .arg(self.dir())
            .output()
            .unwrap()
    }

    pub fn load(&self, model: &Path, name: &str) -> Output {
        self.run(&["load", model.to_str().unwrap(), "--name", name])
    }

    pub fn config(&self, name: &str) -> candle_ipc_cache::IpcConfig {
        candle_ipc_cache::IpcConfig::new(name).socket_dir(self.dir())
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn assert_ok(output: &Output) {
    assert!(
        output.status.success(),
        "{}\n{}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// A real model that `scripts/fixtures.sh` brings.
pub fn fixture(name: &str) -> PathBuf {
    let folder = std::env::var_os("CANDLE_CACHE_FIXTURES").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures"),
        PathBuf::from,
    );
    let path = folder.join(name);
    assert!(
        path.exists(),
        "{} is not there: run scripts/fixtures.sh",
        path.display()
    );
    path
}
