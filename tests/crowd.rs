//! Many engines at once, each a process of its own, on a real daemon.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};

use candle_core::{DType, Device};
use candle_ipc_cache::{FromIpcCache, IpcConfig};
use candle_nn::VarBuilder;
use common::{Daemon, assert_ok, fixture};

const ENGINES: usize = 64;
const TENSOR: &str = "stft_conv.weight";
/// In a child: the socket folder.
const ROLE: &str = "CROWD_ENGINE_SOCKET_DIR";

fn sum(config: &IpcConfig) -> candle_core::Result<f32> {
    let weights = VarBuilder::from_ipc_cache(config, DType::F32, &Device::Cpu)?;
    weights.get_unchecked(TENSOR)?.abs()?.sum_all()?.to_scalar()
}

/// Does nothing unless the other test started it: then it attaches when its input ends.
#[test]
fn an_engine_attaches_when_it_is_told() {
    let Some(folder) = std::env::var_os(ROLE) else {
        return;
    };
    print!("ready");
    std::io::stdout().flush().unwrap();
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    let config = IpcConfig::new("crowd").socket_dir(folder);
    println!("sum={}", sum(&config).unwrap());
}

#[test]
fn sixty_four_engines_attach_at_the_same_moment() {
    let daemon = Daemon::start();
    assert_ok(&daemon.load(&fixture("silero-vad/silero_vad_16k.safetensors"), "crowd"));
    let wanted = format!("sum={}", sum(&daemon.config("crowd")).unwrap());
    let start = |_| -> Child {
        Command::new(std::env::current_exe().unwrap())
            .args([
                "an_engine_attaches_when_it_is_told",
                "--exact",
                "--nocapture",
            ])
            .env(ROLE, daemon.dir())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let mut engines: Vec<Child> = (0..ENGINES).map(start).collect();
    for engine in &mut engines {
        let (mut said, mut byte) = (String::new(), [0]);
        while !said.ends_with("ready") {
            engine
                .stdout
                .as_mut()
                .unwrap()
                .read_exact(&mut byte)
                .unwrap();
            said.push(byte[0] as char);
        }
    }
    // All of them wait; closing their inputs lets them go.
    for engine in &mut engines {
        drop(engine.stdin.take());
    }
    let right = engines
        .into_iter()
        .map(|engine| engine.wait_with_output().unwrap())
        .filter(|output| {
            output.status.success() && String::from_utf8_lossy(&output.stdout).contains(&wanted)
        })
        .count();
    println!("{right} of {ENGINES} engines attached and read the right values");
    assert_eq!(right, ENGINES);
}
