//! An engine that finds no entry has the daemon load one: a checkpoint, or of it the tensors that a trace names, each
//! whole or as the slice that the engine's rank needs.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use candle_core::Device;

use super::IpcCache;
use super::config::IpcConfig;
use super::connect;
use super::device_id;
use super::error::AttachError;
use super::lease::ask;
use crate::protocol::{EntryId, LoadRequest, Refusal, Reply, Request};
use crate::trace::Trace;

/// What the daemon is to load for an engine that finds nothing to attach to.
#[derive(Clone, Debug)]
pub struct Wanted {
    model: PathBuf,
    dtype: String,
    quantize: Option<String>,
    trace: Option<Trace>,
}

impl Wanted {
    /// All of this checkpoint: a folder or a file that the daemon can read.
    pub fn new(model: impl Into<PathBuf>) -> Self {
        Self {
            model: model.into(),
            dtype: "stored".into(),
            quantize: None,
            trace: None,
        }
    }

    /// What float tensors are stored as: `stored`, `bf16`, `f16` or `f32`.
    pub fn dtype(mut self, dtype: impl Into<String>) -> Self {
        self.dtype = dtype.into();
        self
    }

    /// The recipe to quantize by, as `candle-cache load --quantize` takes it.
    pub fn quantize(mut self, recipe: impl Into<String>) -> Self {
        self.quantize = Some(recipe.into());
        self
    }

    /// Only the tensors that this trace names. Where the engine is one of several tensor-parallel ranks
    /// ([`IpcConfig::tensor_parallel`]), each that the trace has a shard of is cut along its dimension.
    pub fn trace(mut self, trace: Trace) -> Self {
        self.trace = Some(trace);
        self
    }
}

/// A file that goes when this does.
struct Written(PathBuf);

impl Drop for Written {
    fn drop(&mut self) {
        if let Err(e) = std::fs::remove_file(&self.0) {
            tracing::debug!("{} stays behind: {e}", self.0.display());
        }
    }
}

impl IpcCache {
    /// Attaches to the entry that `config` names, and has the daemon load what is `wanted` first where there is no such
    /// entry. What is there already is taken as it is: [`IpcConfig::checkpoint`] says what it must be.
    ///
    /// The daemon's worker reads the checkpoint, as the daemon's user. A rank of a set is loaded by itself here; ranks
    /// that must be of one load are loaded by `candle-cache load --tp`.
    ///
    /// # Errors
    /// As [`IpcCache::attach`], and when the load cannot be started or fails.
    pub fn attach_or_load(
        config: &IpcConfig,
        device: &Device,
        wanted: &Wanted,
    ) -> Result<Self, AttachError> {
        match Self::attach(config, device) {
            Err(AttachError::Refused {
                code:
                    Refusal::NoEntry | Refusal::OtherDevice | Refusal::OtherShard | Refusal::LoadFailed,
                ..
            }) => {}
            other => return other,
        }
        let entry = EntryId {
            name: config.name.clone(),
            role: config.role.clone(),
            device: device_id(device)?,
            shard: config.shard,
        };
        let refused = |code, reason| AttachError::Refused {
            entry: entry.clone(),
            code,
            reason,
        };
        let bad = |reason: String| refused(Refusal::BadRequest, reason);
        let model = std::fs::canonicalize(&wanted.model)
            .map_err(|e| bad(format!("the checkpoint {}: {e}", wanted.model.display())))?;
        let connection = connect::connect(config, Instant::now() + config.connect_timeout)?;
        let folder = connection.path().parent().unwrap_or(Path::new("/"));
        let written = match &wanted.trace {
            Some(trace) => Some(write(trace, folder).map_err(|e| bad(e.to_string()))?),
            None => None,
        };
        let text = |path: &Path| {
            let text = path.to_str().map(str::to_owned);
            text.ok_or_else(|| bad(format!("the path {} is not UTF-8", path.display())))
        };
        let request = Request::Load(LoadRequest {
            model: text(&model)?,
            name: Some(config.name.clone()),
            device: entry.device.to_string(),
            dtype: wanted.dtype.clone(),
            quantize: wanted.quantize.clone(),
            imatrix: None,
            allow_nonfinite: false,
            requantize: false,
            only: written.as_ref().map(|w| text(&w.0)).transpose()?,
            shard: config.shard,
        });
        let socket = connection.path().to_path_buf();
        let reply = ask(&connection, &request, Instant::now() + config.state_timeout);
        match reply {
            // Somebody else is at it.
            Ok(
                Reply::Done
                | Reply::Refused {
                    code: Refusal::AlreadyLoading,
                    ..
                },
            ) => Self::attach(config, device),
            Ok(Reply::Refused { code, reason }) => Err(refused(code, reason)),
            Ok(other) => Err(AttachError::BadAnswer {
                path: socket,
                what: format!("to a load it answered {other:?}"),
            }),
            Err(source) => Err(AttachError::Socket {
                path: socket,
                step: "asking the daemon to load",
                source: Box::new(source),
            }),
        }
    }
}

/// Puts a trace where the daemon's worker reads it.
fn write(trace: &Trace, folder: &Path) -> Result<Written, crate::trace::TraceError> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let path = folder.join(format!("trace-{}-{number}.json", std::process::id()));
    trace.write(&path)?;
    Ok(Written(path))
}
