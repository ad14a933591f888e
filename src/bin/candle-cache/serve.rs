//! `candle-cache serve`: runs the daemon in the foreground until it is told to stop.

use std::ffi::OsString;
use std::path::Path;

use anyhow::Context;
use candle_ipc_cache::daemon::{self, Config, DaemonError, Listener, WorkerCommand};
use candle_ipc_cache::protocol::LoadRequest;
use candle_ipc_cache::shard::ShardId;
use candle_ipc_cache::socket::folder;
use tokio::signal::unix::{SignalKind, signal};

use crate::quantize::QuantizeArgs;
use crate::{Global, client, exit};

/// Flags of `serve`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Models to load, one after the other, once the daemon listens; in the variable, one a line
    #[arg(
        value_name = "MODEL",
        env = "CANDLE_CACHE_SERVE",
        value_delimiter = '\n'
    )]
    models: Vec<OsString>,
    /// Device for these models: host, cuda:N or a GPU's UUID
    #[arg(long, env = "CANDLE_CACHE_DEVICE", default_value = "host")]
    device: String,
    /// Type for their float tensors: stored, bf16, f16 or f32
    #[arg(long, env = "CANDLE_CACHE_DTYPE", default_value = "stored")]
    dtype: String,
    /// How to quantize these models.
    #[command(flatten)]
    quantize: QuantizeArgs,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> u8 {
    match serve(args, global) {
        Ok(()) => exit::DONE,
        Err(e) => {
            eprintln!("candle-cache: {}", client::told(&e));
            match e.downcast_ref::<DaemonError>() {
                Some(DaemonError::Served { .. }) => exit::REFUSED,
                _ => exit::FAILED,
            }
        }
    }
}

fn serve(args: Args, global: &Global) -> anyhow::Result<()> {
    let preload = requests(&args)?;
    let resolved = folder::for_daemon(global.socket_dir.as_deref())?;
    for note in &resolved.notes {
        tracing::info!("{note}");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("starting the runtime")?;
    runtime.block_on(async {
        // Before anybody can know of the socket: a signal must find its handler.
        let stop = stop_signal()?;
        let mut listener = Listener::bind(&resolved.socket)?;
        if resolved.derived {
            listener.remove_folder();
        }
        if !global.allow_uid.is_empty() {
            listener.open_to_others()?;
            if resolved.derived {
                tracing::warn!(
                    "--allow-uid: only root can enter {}, which is for this user alone; give others a way in with \
                     --socket-dir (a folder of mode 0711)",
                    resolved.folder.display()
                );
            }
        }
        let socket = resolved.socket.display();
        if global.json {
            let line = serde_json::json!({ "socket": resolved.socket, "pid": std::process::id() });
            println!("{line}");
        } else {
            println!("listening on {socket}");
        }
        let config = Config {
            worker: Some(WorkerCommand {
                // The very program that is running, even where its file was replaced meanwhile.
                program: "/proc/self/exe".into(),
                args: vec!["load".into()],
            }),
            preload,
            allow_uids: global.allow_uid.clone(),
            ..Config::default()
        };
        daemon::run(listener, config, stop).await?;
        tracing::info!("stopped; engines keep what they have mapped");
        anyhow::Ok(())
    })
}

fn requests(args: &Args) -> anyhow::Result<Vec<LoadRequest>> {
    // A worker is given the recipe itself: a file may be another by then.
    let how = args.quantize.read()?;
    let recipe = how.map(|how| how.recipe.to_string());
    let imatrix = args.quantize.imatrix.as_deref().map(absolute).transpose()?;
    args.models
        .iter()
        .map(|model| {
            let model = absolute(Path::new(model))?;
            Ok(LoadRequest {
                model,
                name: None,
                device: args.device.clone(),
                dtype: args.dtype.clone(),
                quantize: recipe.clone(),
                imatrix: imatrix.clone(),
                allow_nonfinite: args.quantize.allow_nonfinite,
                requantize: args.quantize.requantize,
                only: None,
                shard: ShardId::default(),
            })
        })
        .collect()
}

fn absolute(path: &Path) -> anyhow::Result<String> {
    let absolute = std::fs::canonicalize(path).with_context(|| {
        format!(
            "{} is not there: name a file or folder that is, or leave it out and `candle-cache load` it later",
            path.display()
        )
    })?;
    let text = absolute.to_str().map(str::to_owned);
    text.with_context(|| {
        format!(
            "the path {} is not UTF-8: load it by another path",
            absolute.display()
        )
    })
}

fn stop_signal() -> anyhow::Result<impl Future<Output = ()>> {
    let watch = |kind| signal(kind).context("watching for signals");
    let mut terminate = watch(SignalKind::terminate())?;
    let mut interrupt = watch(SignalKind::interrupt())?;
    let mut hangup = watch(SignalKind::hangup())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            _ = hangup.recv() => {}
        }
    })
}
