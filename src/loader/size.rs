//! What an entry takes from its device, asked of the daemon without a lease.
//! An engine that sizes its own buffers needs the number before it attaches.

use std::time::{Duration, Instant};

use super::config::IpcConfig;
use super::error::AttachError;
use super::lease::ask;
use crate::protocol::{EntryId, EntryStatus, Refusal, Reply, Request};
use crate::socket::Connection;

/// The sum of the entry's slabs, in bytes.
pub(super) fn memory_bytes(
    connection: &Connection,
    entry: &EntryId,
    config: &IpcConfig,
    end: Instant,
) -> Result<u64, AttachError> {
    let refused = |code, reason: String| AttachError::Refused {
        entry: entry.clone(),
        code,
        reason,
    };
    let Found {
        status,
        elsewhere,
        parts,
    } = find(connection, entry, end)?;
    let Some(status) = status else {
        return Err(if !parts.is_empty() && elsewhere.is_empty() {
            let held = parts.join(", ");
            refused(Refusal::OtherShard, format!("the daemon has {held}"))
        } else if elsewhere.is_empty() {
            let reason = "the daemon holds no such entry: see `candle-cache status`";
            refused(Refusal::NoEntry, reason.into())
        } else {
            let held = elsewhere.join(", ");
            refused(Refusal::OtherDevice, format!("the daemon has {held}"))
        });
    };
    match (status.ready, status.loading, status.failed) {
        (Some(ready), _, _) => match config.epoch.filter(|wanted| *wanted != ready.epoch) {
            None => Ok(ready.memory_bytes),
            Some(wanted) => Err(AttachError::OtherEpoch {
                wanted,
                found: ready.epoch,
            }),
        },
        (None, Some(progress), _) => Err(AttachError::StillLoading {
            entry: entry.clone(),
            waited: Duration::ZERO,
            progress: Box::new(progress),
        }),
        (None, None, Some(reason)) => Err(refused(Refusal::LoadFailed, reason)),
        (None, None, None) => Err(refused(
            Refusal::NoEntry,
            "it was unloaded, though engines still hold it: load it again".into(),
        )),
    }
}

/// What the daemon says of an entry.
struct Found {
    status: Option<EntryStatus>,
    /// The same part of the model on other devices.
    elsewhere: Vec<String>,
    /// Other parts of the model.
    parts: Vec<String>,
}

fn find(connection: &Connection, entry: &EntryId, end: Instant) -> Result<Found, AttachError> {
    let path = || connection.path().to_path_buf();
    let bad = |what: String| AttachError::BadAnswer { path: path(), what };
    let (mut after, mut elsewhere, mut parts) = (None::<EntryId>, Vec::new(), Vec::new());
    loop {
        let request = Request::Status {
            after: after.clone(),
        };
        let reply = ask(connection, &request, end).map_err(|source| AttachError::Socket {
            path: path(),
            step: "asking the daemon what it holds",
            source: Box::new(source),
        })?;
        let (entries, more) = match reply {
            Reply::Status { entries, more } => (entries, more),
            Reply::Refused { code, reason } => {
                let entry = entry.clone();
                return Err(AttachError::Refused {
                    entry,
                    code,
                    reason,
                });
            }
            other => return Err(bad(format!("{other:?} in answer to a status request"))),
        };
        for status in entries {
            if Some(&status.entry) <= after.as_ref() {
                return Err(bad("entries that are not in order".into()));
            }
            after = Some(status.entry.clone());
            if status.entry == *entry {
                return Ok(Found {
                    status: Some(status),
                    elsewhere,
                    parts,
                });
            }
            let same = (&status.entry.name, &status.entry.role) == (&entry.name, &entry.role);
            if same && status.ready.is_some() {
                let of = match status.entry.shard == entry.shard {
                    true => &mut elsewhere,
                    false => &mut parts,
                };
                of.push(status.entry.to_string());
            }
        }
        // Pages are in order: nothing that matters lies beyond the name.
        let beyond = after.as_ref().is_some_and(|a| a.name > entry.name);
        if !more || beyond {
            return Ok(Found {
                status: None,
                elsewhere,
                parts,
            });
        }
    }
}
