//! Closes what peers sent, on a thread of its own: the sender decides how long a close may block (a socket that
//! lingers, a file on a slow filesystem), and no thread that serves others may wait for that.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};

/// Descriptors that a peer sent and nobody has looked at yet.
#[derive(Debug, Default)]
pub(super) struct Sent(Vec<OwnedFd>);

impl Sent {
    pub(super) fn new(fds: Vec<OwnedFd>) -> Self {
        Self(fds)
    }

    /// Takes them over.
    pub(super) fn into_vec(mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.0)
    }
}

impl std::ops::Deref for Sent {
    type Target = [OwnedFd];

    fn deref(&self) -> &[OwnedFd] {
        &self.0
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        close(std::mem::take(&mut self.0));
    }
}

/// Closes descriptors without waiting for it.
pub(super) fn close(fds: Vec<OwnedFd>) {
    static THREAD: OnceLock<Option<Sender<OwnedFd>>> = OnceLock::new();
    if fds.is_empty() {
        return;
    }
    let thread = THREAD.get_or_init(|| {
        let (sender, receiver) = channel::<OwnedFd>();
        let run = move || {
            for fd in receiver {
                // Refused by everything but a socket, and then there is nothing to clear.
                let _ = rustix::net::sockopt::set_socket_linger(fd.as_fd(), None);
                drop(fd);
            }
        };
        let spawned = std::thread::Builder::new().name("closer".into()).spawn(run);
        if let Err(e) = &spawned {
            tracing::error!("no thread to close descriptors on: {e}");
        }
        spawned.is_ok().then_some(sender)
    });
    if let Some(thread) = thread {
        for fd in fds {
            // The thread ends with the process only.
            let _ = thread.send(fd);
        }
    }
}
