//! Whether the daemon already holds what a load would make, so that nothing has to be read again.
//! The same means: same key, every file untouched since it was hashed, and the same small files.

use std::os::fd::{AsFd, OwnedFd};

use crate::checkpoint::Checkpoint;
use crate::key::{Freshness, Key};
use crate::manifest::{self, Manifest};
use crate::protocol::{self, EntryId, EpochId, Refusal, Reply, Request};
use crate::slab::host::{self, HostMapping};
use crate::socket::Connection;

use super::taken::Taken;
use super::{LoadOptions, WorkerError, unexpected};

/// What the daemon holds already.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Held {
    /// The epoch.
    pub epoch: EpochId,
    /// The root over its tensors.
    pub root: manifest::Digest,
    /// Tensors, aliases not counted.
    pub tensors: usize,
    /// Second names of tensors.
    pub aliases: usize,
    /// Bytes of its slabs.
    pub memory_bytes: u64,
}

/// Asks the daemon whether `entry` is there and is what loading `checkpoint` would make. Takes a lease for a moment,
/// so the connection is used up.
///
/// `None` means that it must be loaded: it is not there, is something else, or cannot be told to be the same.
///
/// # Errors
/// When the daemon cannot be talked to, or the selection or the recipe does not fit the checkpoint.
pub fn already_held(
    conn: Connection,
    entry: &EntryId,
    checkpoint: &Checkpoint,
    options: &LoadOptions,
) -> Result<Option<Held>, WorkerError> {
    already_held_over(|| Ok(conn), entry, checkpoint, options)
}

/// As [`already_held`], but connects only when it is clear what a load would make: a daemon waits for nobody's rules
/// to be worked out.
///
/// # Errors
/// As [`already_held`]; and those of `connect`.
pub fn already_held_over<E: From<WorkerError>>(
    connect: impl FnOnce() -> Result<Connection, E>,
    entry: &EntryId,
    checkpoint: &Checkpoint,
    options: &LoadOptions,
) -> Result<Option<Held>, E> {
    let options = LoadOptions {
        name: Some(entry.name.clone()),
        device: entry.device,
        shard: entry.shard,
        ..options.clone()
    };
    let wanted = Taken::of(checkpoint, &options)?.key(&options);
    let conn = connect()?;
    Ok(ask_for(conn, entry, &wanted, checkpoint)?)
}

fn ask_for(
    conn: Connection,
    entry: &EntryId,
    wanted: &Key,
    checkpoint: &Checkpoint,
) -> Result<Option<Held>, WorkerError> {
    let attach = Request::Attach {
        entry: entry.clone(),
        epoch: None,
        wait: std::time::Duration::ZERO,
    };
    conn.send(&attach, &[], protocol::STEP)?;
    let (epoch, fds) = loop {
        let (reply, fds) = conn.receive::<Reply>(protocol::STEP)?;
        match reply {
            Reply::Attached { epoch, .. } => break (epoch, fds),
            Reply::Loading(_) => {}
            Reply::Refused {
                code:
                    Refusal::NoEntry
                    | Refusal::OtherDevice
                    | Refusal::OtherShard
                    | Refusal::NoEpoch
                    | Refusal::StillLoading
                    | Refusal::LoadFailed,
                ..
            } => return Ok(None),
            other => return Err(unexpected("whether the entry is there", other)),
        }
    };
    conn.send(&Request::Received, &[], protocol::STEP)?;
    let held = fds.first().and_then(|fd| same(fd, wanted, checkpoint));
    conn.send(&Request::Goodbye, &[], protocol::STEP)?;
    Ok(held.map(|manifest| Held {
        epoch,
        root: manifest.root,
        tensors: manifest.tensors.len(),
        aliases: manifest.aliases.len(),
        memory_bytes: manifest.memory_bytes(),
    }))
}

/// The held manifest, if it is what a load would make. Whatever is odd about it is a reason to load again.
fn same(fd: &OwnedFd, wanted: &Key, checkpoint: &Checkpoint) -> Option<Manifest> {
    let length = host::check_sealed(fd.as_fd(), "the manifest").ok()?;
    if length > manifest::MAX_BYTES {
        return None;
    }
    let memory = HostMapping::map(fd.as_fd(), Some(length), "the manifest").ok()?;
    let held = Manifest::decode(memory.as_slice()).ok()?;

    let same_sources = held.key.sources.len() == wanted.sources.len()
        && held
            .key
            .sources
            .iter()
            .zip(&wanted.sources)
            .all(|(h, w)| h.same_file(w) && h.freshness_at(&w.path) == Freshness::Same);
    // They are part of no digest: a new chat template beside old weights is a reason to load.
    let mut files: Vec<_> = checkpoint.small_files.iter().collect();
    files.sort();
    let same_files = held.files.len() == files.len()
        && held.files.iter().zip(files).all(|(h, (name, bytes))| {
            let there = (h.offset as usize).checked_add(h.bytes as usize);
            let there = there.and_then(|end| memory.as_slice().get(h.offset as usize..end));
            h.name == *name && there == Some(bytes.as_slice())
        });
    let mut attributes = checkpoint.attributes.clone();
    attributes.sort();
    let same = held.key.differences(wanted).is_empty()
        && same_sources
        && same_files
        && held.attributes == attributes;
    same.then_some(held)
}
