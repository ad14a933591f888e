//! The engine's side of an attach: find the daemon, see who it is, ask, and take the descriptors.
//! The connection stays open afterwards: it becomes the [`Lease`](super::lease::Lease).

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use super::config::IpcConfig;
use super::error::{AttachError, Tried};
use crate::manifest::MAX_SLABS;
use crate::protocol::{EntryId, EpochId, Progress, Reply, Request, STEP};
use crate::socket::folder::{for_engine_allowing, peer_allowed};
use crate::socket::{self, Connection, Peer, SocketError};

/// What the daemon gave.
#[derive(Debug)]
pub(super) struct Given {
    pub(super) connection: Connection,
    pub(super) epoch: EpochId,
    pub(super) manifest: OwnedFd,
    pub(super) slabs: Vec<OwnedFd>,
    pub(super) memory_bytes: u64,
}

/// Connects to the first socket behind which a daemon of an accepted user listens.
pub(super) fn connect(config: &IpcConfig, end: Instant) -> Result<Connection, AttachError> {
    socket::raise_descriptor_limit();
    let mut tried = Vec::new();
    let allow = &config.allow_uids;
    for path in for_engine_allowing(config.socket_dir.as_deref(), allow)? {
        let left = end.saturating_duration_since(Instant::now());
        let connected = Connection::connect(&path, left).and_then(|connection| {
            peer_allowed(&Peer::of(&connection)?, allow, &path)?;
            Ok(connection)
        });
        match connected {
            Ok(connection) => return Ok(connection),
            Err(source @ SocketError::Deadline(_)) => {
                return Err(AttachError::Socket {
                    path,
                    step: "connecting to the daemon",
                    source: Box::new(source),
                });
            }
            Err(error) => tried.push(Tried { path, error }),
        }
    }
    let nobody = |t: &Tried| matches!(t.error, SocketError::NobodyListens(_));
    Err(if tried.iter().all(nobody) {
        AttachError::NoDaemon { tried }
    } else {
        AttachError::Unreachable { tried }
    })
}

/// Asks for the entry's descriptors, waits while it loads, and acknowledges them.
pub(super) fn request(
    connection: Connection,
    entry: &EntryId,
    config: &IpcConfig,
    end: Instant,
) -> Result<Given, AttachError> {
    let path = connection.path().to_path_buf();
    let broken = |step| {
        let path = path.clone();
        move |source| AttachError::Socket {
            path,
            step,
            source: Box::new(source),
        }
    };
    let bad = |what: String| AttachError::BadAnswer {
        path: path.clone(),
        what,
    };
    let left = |end: Instant| end.saturating_duration_since(Instant::now());
    let wait = if config.wait {
        config.state_timeout
    } else {
        Duration::ZERO
    };
    let ask = Request::Attach {
        entry: entry.clone(),
        epoch: config.epoch,
        wait,
    };
    match connection.send(&ask, &[], left(end)) {
        // A daemon that refuses may have said so and closed before it was asked: read on.
        Ok(()) | Err(SocketError::Closed) => {}
        Err(source) => return Err(broken("asking the daemon")(source)),
    }

    // While the entry loads, the daemon's own word that the wait is over should come first.
    let loaded_by = Instant::now() + wait + STEP;
    let mut loading: Option<Progress> = None;
    let (reply, fds) = loop {
        let end = if loading.is_some() { loaded_by } else { end };
        let received = match left(end) {
            Duration::ZERO => Err(SocketError::Deadline(config.connect_timeout)),
            left => connection.receive::<Reply>(left),
        };
        match (received, &loading) {
            (Ok((Reply::Loading(progress), _)), before) => {
                let phase = before.as_ref().map(|p| p.phase.as_str());
                if phase == Some(&progress.phase) {
                    tracing::debug!(%entry, done = progress.done, total = progress.total, "loading");
                } else {
                    tracing::info!(%entry, phase = progress.phase, total = progress.total, "waiting for a load");
                }
                loading = Some(progress);
            }
            (Ok(answer), _) => break answer,
            (Err(SocketError::Deadline(_)), Some(progress)) => {
                return Err(AttachError::StillLoading {
                    entry: entry.clone(),
                    waited: wait,
                    progress: Box::new(progress.clone()),
                });
            }
            (Err(SocketError::Deadline(_)), None) => {
                let source = SocketError::Deadline(config.connect_timeout);
                return Err(broken("waiting for the daemon's answer")(source));
            }
            (Err(source), _) => return Err(broken("waiting for the daemon's answer")(source)),
        }
    };
    let (epoch, anchor, slabs, memory_bytes) = match reply {
        Reply::Attached {
            epoch,
            anchor,
            slabs,
            memory_bytes,
        } => (epoch, anchor, slabs as usize, memory_bytes),
        Reply::Refused { code, reason } => {
            return Err(AttachError::Refused {
                entry: entry.clone(),
                code,
                reason,
            });
        }
        other => return Err(bad(format!("{other:?} in answer to an attach"))),
    };
    let wanted = 1 + usize::from(anchor) + slabs.min(MAX_SLABS + 1);
    if slabs > MAX_SLABS || fds.len() != wanted {
        return Err(bad(format!(
            "it announced {slabs} slabs and sent {} descriptors",
            fds.len()
        )));
    }
    connection
        .send(&Request::Received, &[], STEP)
        .map_err(broken("acknowledging the descriptors"))?;
    if let Some(wanted) = config.epoch.filter(|e| *e != epoch) {
        return Err(AttachError::OtherEpoch {
            wanted,
            found: epoch,
        });
    }
    let mut fds = fds.into_iter();
    let manifest = fds.next().ok_or_else(|| bad("no manifest".into()))?;
    // The daemon holds the anchor; an engine's own mapping keeps its device alive.
    Ok(Given {
        connection,
        epoch,
        manifest,
        slabs: fds.skip(usize::from(anchor)).collect(),
        memory_bytes,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::Path;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;
    use crate::protocol::Refusal;
    use crate::slab::DeviceId;

    #[test]
    fn a_refusal_from_a_daemon_that_has_closed_already_is_still_read() {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let path = Path::new("daemon.sock");
        let daemon = Connection::from_fd(theirs, path);
        let busy = Reply::Refused {
            code: Refusal::Busy,
            reason: "at its limit".into(),
        };
        daemon.send(&busy, &[], STEP).unwrap();
        drop(daemon);
        let entry = EntryId::new("m", DeviceId::Host);
        let config = IpcConfig::new("m");
        let end = Instant::now() + STEP;
        let error = request(Connection::from_fd(ours, path), &entry, &config, end).unwrap_err();
        let code = match error {
            AttachError::Refused { code, .. } => code,
            other => panic!("{other}"),
        };
        assert_eq!(code, Refusal::Busy);
    }
}
