//! The worker: plans slabs from headers, streams tensors into them, seals them, and offers the result to the daemon.
//! It lives for one load. What it offers is complete and checked, or it offers nothing.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::str::FromStr;
use std::time::Duration;

use crate::checkpoint::Checkpoint;
use crate::manifest::{Digest, ElementType, Manifest};
use crate::protocol::{self, EntryId, EpochId, Member, Progress, Reply, Request};
use crate::quantize::Quantize;
use crate::shard::ShardId;
use crate::slab::{self, DeviceId, Export};
use crate::socket::{Connection, SocketError};

use plan::Plan;
use select::Selection;
use taken::Taken;

pub mod alias;
mod convert;
mod error;
mod held;
pub(crate) mod memory;
mod meter;
pub mod plan;
mod pool;
pub mod select;
pub mod stack;
pub mod stream;
pub mod taken;

pub use error::WorkerError;
pub use held::{Held, already_held, already_held_over};

/// Most threads that fill slabs, unless the caller asks for another number.
pub const DEFAULT_THREADS: usize = 16;
/// Most threads that the caller may ask for: each takes up to four buffers of [`slab::CHUNK`] bytes.
pub const MAX_THREADS: usize = 256;

/// How long the daemon may take to check and publish an offer: its manifest may be large.
const PUBLISH: Duration = Duration::from_secs(60);

/// Takes progress, and stops the load by returning an error. Called from any of the worker's threads, by
/// one at a time, about ten times a second at most.
pub type Report<'a> = dyn Fn(Progress) -> Result<(), WorkerError> + Sync + 'a;

/// What float tensors are stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum TargetDtype {
    /// As they are in the checkpoint.
    #[default]
    Stored,
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
    /// IEEE single.
    F32,
}

impl TargetDtype {
    /// The type that a tensor of type `source` is stored as. Only F64, F32, F16 and BF16 are ever
    /// converted: integers, 8-bit and smaller floats, and GGML blocks stay what they are.
    pub fn of(self, source: ElementType) -> ElementType {
        use ElementType::{BF16, F16, F32, F64};
        match (self, source) {
            (Self::Bf16, F64 | F32 | F16 | BF16) => BF16,
            (Self::F16, F64 | F32 | F16 | BF16) => F16,
            (Self::F32, F64 | F32 | F16 | BF16) => F32,
            _ => source,
        }
    }
}

impl fmt::Display for TargetDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stored => "stored",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F32 => "f32",
        })
    }
}

/// A text that names no [`TargetDtype`].
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is no dtype to store: give `stored`, `bf16`, `f16` or `f32`")]
pub struct NoSuchDtype(pub String);

impl FromStr for TargetDtype {
    type Err = NoSuchDtype;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "stored" => Ok(Self::Stored),
            "bf16" => Ok(Self::Bf16),
            "f16" => Ok(Self::F16),
            "f32" => Ok(Self::F32),
            _ => Err(NoSuchDtype(text.to_string())),
        }
    }
}

/// How to load.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Name of the entry; `None`: the checkpoint's own.
    pub name: Option<String>,
    /// Where the memory is to lie.
    pub device: DeviceId,
    /// What float tensors are stored as.
    pub dtype: TargetDtype,
    /// Which tensors are taken, and how they are cut among ranks.
    pub selection: Selection,
    /// Which part of the model this is.
    pub shard: ShardId,
    /// Whether the experts of a layer are one tensor too.
    pub stack_experts: bool,
    /// Bytes of a slab; `None`: 4 GiB, or a 240th of the whole where that is more. Always raised to
    /// the largest tensor, and until [`MAX_SLABS`](crate::manifest::MAX_SLABS) slabs suffice.
    pub slab_bytes: Option<u64>,
    /// Quantize while loading; `None`: not.
    pub quantize: Option<Quantize>,
    /// Threads that read, hash, convert, quantize and write; `None`: one a core, [`DEFAULT_THREADS`] at most.
    pub threads: Option<usize>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            name: None,
            device: DeviceId::Host,
            dtype: TargetDtype::Stored,
            selection: Selection::default(),
            shard: ShardId::default(),
            stack_experts: false,
            quantize: None,
            slab_bytes: None,
            threads: None,
        }
    }
}

impl LoadOptions {
    /// The entry's name: the one given, or the checkpoint's own.
    pub fn entry_name<'a>(&'a self, checkpoint: &'a Checkpoint) -> &'a str {
        self.name.as_deref().unwrap_or(&checkpoint.name)
    }

    fn threads(&self) -> usize {
        let cores = || {
            std::thread::available_parallelism()
                .map_or(1, usize::from)
                .min(DEFAULT_THREADS)
        };
        self.threads.unwrap_or_else(cores).clamp(1, MAX_THREADS)
    }
}

/// A finished load: sealed slabs, and the manifest that describes them.
#[derive(Debug)]
pub struct Loaded {
    /// The entry's name.
    pub name: String,
    /// The manifest.
    pub manifest: Manifest,
    /// The manifest with its small files, as sealed memory.
    pub manifest_fd: OwnedFd,
    /// The slabs.
    pub export: Export,
}

/// What the daemon made of a finished load.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Published {
    /// The epoch it is published under.
    pub epoch: EpochId,
    /// The daemon held the very same weights already, and kept those.
    pub unchanged: bool,
    /// The root over all tensors.
    pub root: Digest,
    /// Tensors, aliases not counted.
    pub tensors: usize,
    /// Second names of tensors.
    pub aliases: usize,
    /// Slabs.
    pub slabs: usize,
    /// Bytes of all slabs.
    pub memory_bytes: u64,
}

/// Loads a checkpoint into new slabs and seals them.
///
/// `progress` is called from the worker's threads, by one at a time: at the start and the end of each
/// phase (`plan`, `load`, `seal`), and about ten times a second between.
///
/// # Errors
/// When the checkpoint cannot be read or changes meanwhile, or there is no room for it. Nothing is
/// left behind then.
pub fn fill(
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<Loaded, WorkerError> {
    fill_until(checkpoint, options, &|p| {
        progress(p);
        Ok(())
    })
}

fn fill_until(
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    report: &Report<'_>,
) -> Result<Loaded, WorkerError> {
    let threads = options.threads();
    // What cannot be followed is found out before a tensor is looked at.
    let taken = Taken::of(checkpoint, options)?;
    let checkpoint = taken.checkpoint();
    let aliases = alias::find(checkpoint, threads, report)?;
    let plan = Plan::new(&taken, options, &aliases)?;
    let key = taken.key(options);
    // What no manifest can hold is found out now, and not after everything has been read.
    plan.manifest(checkpoint, key.clone(), &[])
        .encode(Vec::new())?;
    let (each, mut fillers) = (plan.buffer_bytes(checkpoint), threads);
    if options.device == DeviceId::Host {
        fillers = memory::threads(plan.memory_bytes(), each, threads)?;
    }

    let writer = slab::writer(options.device, &plan.slabs)?;
    let digests = stream::fill_slabs(checkpoint, &plan, &*writer, fillers, report)?;
    aliases.confirm(checkpoint, &plan, &digests)?;
    checkpoint.check_unchanged()?;

    let meter = meter::Meter::start(report, "seal", plan.memory_bytes())?;
    let mut manifest = plan.manifest(checkpoint, key, &digests);
    let encoded = manifest.encode(taken.small_files().to_vec())?;
    let manifest_fd = slab::host::sealed("candle-ipc-cache manifest", &encoded)?;
    let export = writer.finish()?;
    meter.finish()?;
    Ok(Loaded {
        name: manifest.key.model.clone(),
        manifest,
        manifest_fd,
        export,
    })
}

/// Announces `entry` to the daemon behind `conn`, loads the checkpoint, and offers the result.
///
/// The name, the device and the part are those of `entry`, whatever `options` say. A load that fails is reported to
/// the daemon; a daemon that closes the connection stops the load.
///
/// # Errors
/// As [`fill`]; and when the daemon refuses the announcement or the offer, or goes away.
pub fn publish(
    conn: &Connection,
    entry: &EntryId,
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<Published, WorkerError> {
    let entries = std::slice::from_ref(entry);
    let mut published = publish_set(conn, entries, checkpoint, options, progress)?;
    published.pop().ok_or(WorkerError::UnexpectedReply {
        what: "the announcement",
    })
}

/// As [`publish`], for the ranks of a set: one after the other is loaded and offered, and with the last all of them
/// are published under one epoch. Until then nothing changes for anybody.
///
/// `entries` have one name and one role. What is published comes back in their order.
///
/// # Errors
/// As [`publish`].
pub fn publish_set(
    conn: &Connection,
    entries: &[EntryId],
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<Vec<Published>, WorkerError> {
    let ranks = ranked(entries, checkpoint, options)?;
    publish_ranks(conn, entries, &ranks, checkpoint, progress)
}

/// As [`publish_set`], but connects only when it is clear what is loaded: a daemon waits for nobody's rules to be
/// worked out.
///
/// # Errors
/// As [`publish_set`]; and those of `connect`.
pub fn publish_set_over<E: From<WorkerError>>(
    connect: impl FnOnce() -> Result<Connection, E>,
    entries: &[EntryId],
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<Vec<Published>, E> {
    let ranks = ranked(entries, checkpoint, options)?;
    let conn = connect()?;
    Ok(publish_ranks(&conn, entries, &ranks, checkpoint, progress)?)
}

fn ranked(
    entries: &[EntryId],
    checkpoint: &Checkpoint,
    options: &LoadOptions,
) -> Result<Vec<Ranked>, WorkerError> {
    let ranked = entries
        .iter()
        .map(|entry| Ranked::new(entry, checkpoint, options));
    ranked.collect()
}

fn publish_ranks(
    conn: &Connection,
    entries: &[EntryId],
    ranks: &[Ranked],
    checkpoint: &Checkpoint,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<Vec<Published>, WorkerError> {
    let Some(first) = ranks.first() else {
        return Ok(Vec::new());
    };
    let announce = Request::Announce {
        entry: entries[0].clone(),
        bytes: first.memory,
        set: ranks.iter().skip(1).map(Ranked::member).collect(),
    };
    match ask(conn, &announce, &[], protocol::STEP)? {
        Reply::Done => {}
        other => return Err(unexpected("the announcement", other)),
    }

    let total = ranks.iter().map(|rank| rank.source).sum();
    let mut before = 0;
    let mut published = Vec::with_capacity(ranks.len());
    for (i, rank) in ranks.iter().enumerate() {
        let report = |mut p: Progress| {
            if conn.is_closed() {
                return Err(SocketError::Closed.into());
            }
            if p.phase == "load" && ranks.len() > 1 {
                p.done += before;
                p.total = total;
            }
            progress(p.clone());
            // Never waits: a daemon that is behind with reading misses a figure, not a load.
            match conn.send(&Request::Progress(p), &[], Duration::ZERO) {
                Ok(()) | Err(SocketError::Deadline(_)) => Ok(()),
                Err(e) => Err(e.into()),
            }
        };
        let loaded = match fill_until(checkpoint, &rank.options, &report) {
            Ok(loaded) => loaded,
            Err(e) => return Err(failed(conn, e)),
        };
        before += rank.source;
        let last = i + 1 == ranks.len();
        published.push(offer(conn, &loaded, last)?);
    }
    // The daemon names the epoch when it has them all.
    if let Some(Published {
        epoch, unchanged, ..
    }) = published.last().cloned()
    {
        for rank in &mut published {
            (rank.epoch, rank.unchanged) = (epoch, unchanged);
        }
    }
    Ok(published)
}

/// One rank of a set, before it is loaded.
struct Ranked {
    options: LoadOptions,
    /// Bytes of its slabs. Which tensors are equal is not known yet, so this is the most that it can take.
    memory: u64,
    /// Bytes that are read for it.
    source: u64,
}

impl Ranked {
    fn new(
        entry: &EntryId,
        checkpoint: &Checkpoint,
        options: &LoadOptions,
    ) -> Result<Self, WorkerError> {
        let options = LoadOptions {
            name: Some(entry.name.clone()),
            device: entry.device,
            shard: entry.shard,
            ..options.clone()
        };
        let taken = Taken::of(checkpoint, &options)?;
        let plan = Plan::new(&taken, &options, &alias::Aliases::none())?;
        Ok(Self {
            memory: plan.memory_bytes(),
            source: plan.source_bytes(taken.checkpoint()),
            options,
        })
    }

    fn member(&self) -> Member {
        Member {
            shard: self.options.shard,
            device: self.options.device,
            bytes: self.memory,
        }
    }
}

/// Tells the daemon that a load failed, and says why it did.
fn failed(conn: &Connection, e: WorkerError) -> WorkerError {
    match e {
        // A daemon that told the load to stop has said why.
        WorkerError::Socket(closed) => match conn.receive::<Reply>(Duration::ZERO) {
            Ok((Reply::Refused { code, reason }, _)) => WorkerError::Refused { code, reason },
            _ if matches!(closed, SocketError::Closed) => WorkerError::DaemonGone,
            _ => closed.into(),
        },
        e => {
            let reason = protocol::clip(&e.to_string());
            let told = ask(conn, &Request::Failed { reason }, &[], protocol::STEP);
            if let Err(untold) = told {
                tracing::debug!("the daemon was not told that the load failed: {untold}");
            }
            e
        }
    }
}

fn offer(conn: &Connection, loaded: &Loaded, last: bool) -> Result<Published, WorkerError> {
    let Loaded {
        manifest, export, ..
    } = loaded;
    let mut fds = vec![loaded.manifest_fd.as_fd()];
    fds.extend(export.anchor.as_ref().map(AsFd::as_fd));
    fds.extend(export.slabs.iter().map(AsFd::as_fd));
    let offer = Request::Offer {
        anchor: export.anchor.is_some(),
        slabs: export.slabs.len() as u32,
    };
    let (epoch, unchanged) = match (ask(conn, &offer, &fds, PUBLISH)?, last) {
        (Reply::Accepted { epoch, unchanged }, true) => (epoch, unchanged),
        // Not named yet.
        (Reply::Done, false) => (EpochId([0; 16]), false),
        (other, _) => return Err(unexpected("the offer", other)),
    };
    Ok(Published {
        epoch,
        unchanged,
        root: manifest.root,
        tensors: manifest.tensors.len(),
        aliases: manifest.aliases.len(),
        slabs: manifest.slabs.len(),
        memory_bytes: manifest.memory_bytes(),
    })
}

/// Asks, and waits `timeout` for the answer.
fn ask(
    conn: &Connection,
    request: &Request,
    fds: &[std::os::fd::BorrowedFd<'_>],
    timeout: Duration,
) -> Result<Reply, WorkerError> {
    // A daemon that refused and closed at once has left its reason to read.
    let sent = conn.send(request, fds, protocol::STEP);
    if let Err(e) = sent
        && !matches!(e, SocketError::Closed)
    {
        return Err(e.into());
    }
    Ok(conn.receive::<Reply>(timeout)?.0)
}

fn unexpected(what: &'static str, reply: Reply) -> WorkerError {
    match reply {
        Reply::Refused { code, reason } => WorkerError::Refused { code, reason },
        _ => WorkerError::UnexpectedReply { what },
    }
}
