//! The process behind a connection, watched through a pidfd.
//! A forked child may hold a connection open after the process that made it has ended.

use std::os::fd::OwnedFd;

use nix::sys::socket::{getsockopt, sockopt::PeerPidfd};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::wire::{Wire, watch_fd};
use crate::socket::Peer;

/// The process that made a connection, as far as it can be watched.
#[derive(Debug)]
pub(super) struct Process(Option<AsyncFd<OwnedFd>>);

/// The process has ended already.
#[derive(Debug)]
pub(super) struct Ended;

impl Process {
    /// The process at the other end.
    pub(super) fn of(wire: &Wire, peer: &Peer) -> Result<Self, Ended> {
        let pidfd = match getsockopt(wire, PeerPidfd) {
            Ok(fd) => Some(fd),
            // Before Linux 6.5.
            Err(nix::Error::ENOPROTOOPT) => match Pid::from_raw(peer.pid) {
                Some(pid) => match pidfd_open(pid, PidfdFlags::empty()) {
                    Ok(fd) => Some(fd),
                    Err(Errno::SRCH) => return Err(Ended),
                    Err(_) => None,
                },
                None => None,
            },
            // What kernels say of a process that has ended and been reaped.
            Err(nix::Error::ESRCH | nix::Error::EINVAL) if peer.pid > 0 => return Err(Ended),
            Err(_) => None,
        };
        Ok(Self(
            pidfd.and_then(|fd| watch_fd(fd, Interest::READABLE).ok()),
        ))
    }

    /// Waits until it has ended; for ever where it cannot be watched.
    pub(super) async fn ended(&self) {
        match &self.0 {
            // An error is no proof of an end; the connection's own end still is.
            Some(process) if process.readable().await.is_ok() => {}
            _ => std::future::pending().await,
        }
    }
}
