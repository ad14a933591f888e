//! One connection on the daemon's side: packets without a thread that waits for them.
//! Every wait for a peer is bounded, here or by the caller.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use serde::Serialize;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::closer::{self, Sent};
use crate::protocol;
use crate::socket::{Received, SocketError, receive_now, send_error, send_now};

/// How long to wait before descriptors are tried again that the kernel refused to queue.
const RETRY: Duration = Duration::from_millis(20);

/// A connected socket.
#[derive(Debug)]
pub(super) struct Wire(AsyncFd<OwnedFd>);

impl Wire {
    pub(super) fn new(fd: OwnedFd) -> std::io::Result<Self> {
        watch_fd(fd, Interest::READABLE | Interest::WRITABLE).map(Self)
    }

    /// The next packet. Waits without end: the caller bounds it. Nothing is lost when it is given up.
    pub(super) async fn receive(&self) -> Result<(Vec<u8>, Sent), SocketError> {
        loop {
            let mut ready = self
                .0
                .readable()
                .await
                .map_err(|e| SocketError::system("watching a connection", e))?;
            match receive_now(self.0.as_fd())? {
                Received::Packet(packet, fds) => return Ok((packet, Sent::new(fds))),
                Received::Closed => return Err(SocketError::Closed),
                Received::Nothing => ready.clear_ready(),
            }
        }
    }

    /// Waits, without end, until something has come. Takes nothing.
    pub(super) async fn wait(&self) {
        let _ = self.0.readable().await;
    }

    /// Sends a message with descriptors.
    ///
    /// # Errors
    /// When the peer is gone, does not read within `step`, or too many descriptors are under way.
    pub(super) async fn send<T: Serialize>(
        &self,
        message: &T,
        fds: &[BorrowedFd<'_>],
        step: Duration,
    ) -> Result<(), SocketError> {
        self.send_packet(&protocol::encode(message)?, fds, step)
            .await
    }

    /// Sends a packet as it is.
    ///
    /// # Errors
    /// As [`Wire::send`].
    pub(super) async fn send_packet(
        &self,
        packet: &[u8],
        fds: &[BorrowedFd<'_>],
        step: Duration,
    ) -> Result<(), SocketError> {
        let mut last = None;
        // Half a step: the peer, who waits for a step, is to hear why it gets nothing.
        let give_up = Instant::now() + step / 2;
        let sending = async {
            loop {
                match send_now(self.0.as_fd(), packet, fds) {
                    Ok(()) => return Ok(()),
                    Err(Errno::AGAIN) => {
                        let mut ready = self
                            .0
                            .writable()
                            .await
                            .map_err(|e| SocketError::system("watching a connection", e))?;
                        match send_now(self.0.as_fd(), packet, fds) {
                            Err(Errno::AGAIN) => ready.clear_ready(),
                            Err(Errno::TOOMANYREFS) => {}
                            other => return other.map_err(|e| send_error(e, fds.len())),
                        }
                    }
                    // It passes when other peers read theirs; nothing tells when.
                    Err(Errno::TOOMANYREFS) => {
                        let refused = send_error(Errno::TOOMANYREFS, fds.len());
                        if Instant::now() >= give_up {
                            return Err(refused);
                        }
                        last = Some(refused);
                        tokio::time::sleep(RETRY).await;
                    }
                    Err(e) => return Err(send_error(e, fds.len())),
                }
            }
        };
        match tokio::time::timeout(step, sending).await {
            Ok(result) => result,
            Err(_) => Err(last.unwrap_or(SocketError::Deadline(step))),
        }
    }
}

impl AsFd for Wire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        discard(self.0.as_fd());
        let _ = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Both);
        // More descriptors may lie in its queue: the last one to hold the socket closes those too.
        if let Ok(last) = self.0.get_ref().try_clone() {
            closer::close(vec![last]);
        }
    }
}

/// Lets the runtime watch a descriptor.
pub(super) fn watch_fd(fd: OwnedFd, interest: Interest) -> std::io::Result<AsyncFd<OwnedFd>> {
    // Deprecated for types whose descriptor may change while it is watched; the way around it is
    // unsafe. An `OwnedFd` stays the same descriptor until it is dropped, here by `AsyncFd` itself.
    #[expect(deprecated)]
    AsyncFd::with_interest(fd, interest)
}

/// Takes what a peer sent and nobody will read: otherwise the kernel turns the end of the connection
/// into an error at the peer's side, which may hide the last reply.
pub(super) fn discard(socket: BorrowedFd<'_>) {
    for _ in 0..16 {
        match receive_now(socket) {
            Ok(Received::Nothing | Received::Closed) => return,
            Ok(Received::Packet(_, fds)) => closer::close(fds),
            Err(_) => {}
        }
    }
}
