//! The engine's hold on an entry: an open connection, and a thread that hears what the daemon says on it.
//! It ends when nothing refers to the shared memory any more, or at once by [`Lease::end`].

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};

use crate::protocol::{self, Reply, Request};
use crate::socket::{Connection, Received, SocketError, receive_now};
use crate::tensors;

/// The open connection that says to the daemon: these weights are in use here.
#[derive(Debug)]
pub(super) struct Lease {
    connection: Arc<Connection>,
    ended: AtomicBool,
}

impl Lease {
    pub(super) fn new(connection: Connection) -> Self {
        Self {
            connection: Arc::new(connection),
            ended: AtomicBool::new(false),
        }
    }

    /// Listens to the daemon from now on, on a thread of its own that ends with the lease.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub(super) fn watch(&self) -> Result<(), SocketError> {
        let connection = self.connection.clone();
        std::thread::Builder::new()
            .name("candle-cache-lease".into())
            .spawn(move || listen(&connection))
            .map_err(|e| SocketError::system("starting a thread", e))?;
        Ok(())
    }

    /// Whether the daemon has gone while the lease lasted. Does not wait.
    pub(super) fn daemon_lost(&self) -> bool {
        !self.ended.load(Ordering::Acquire) && self.connection.is_closed()
    }

    /// Says goodbye within `timeout` and closes the connection. The second call does nothing.
    ///
    /// # Errors
    /// When the daemon is gone or does not read; the connection is closed all the same.
    pub(super) fn end(&self, timeout: Duration) -> Result<(), SocketError> {
        if self.ended.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let said = self.connection.send(&Request::Goodbye, &[], timeout);
        self.close();
        said
    }

    /// Ends a lease that nobody watches, and asks one thing more. The daemon takes both in this order.
    ///
    /// # Errors
    /// When the daemon is gone, or does not answer within `timeout`.
    pub(super) fn end_and_ask(
        &self,
        request: &Request,
        timeout: Duration,
    ) -> Result<Reply, SocketError> {
        let end = Instant::now() + timeout;
        self.ended.store(true, Ordering::Release);
        let answered = self
            .connection
            .send(&Request::Goodbye, &[], timeout)
            .and_then(|()| ask(&self.connection, request, end));
        self.close();
        answered
    }

    /// Wakes the thread that listens, which holds the connection too, and tells the daemon at once.
    fn close(&self) {
        if let Err(e) = shutdown(self.connection.as_fd(), Shutdown::Both) {
            tracing::debug!("closing the connection to the daemon: {e}");
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // Best effort, without a wait: the daemon also sees the connection close.
        if let Err(e) = self.end(Duration::ZERO) {
            tracing::debug!("saying goodbye to the daemon: {e}");
        }
    }
}

/// One question, one answer, until `end`. What a daemon said before it closed is still an answer.
pub(super) fn ask(
    connection: &Connection,
    request: &Request,
    end: Instant,
) -> Result<Reply, SocketError> {
    let left = || end.saturating_duration_since(Instant::now());
    match connection.send(request, &[], left()) {
        Ok(()) | Err(SocketError::Closed) => {}
        Err(e) => return Err(e),
    }
    loop {
        match connection.receive::<Reply>(left())? {
            // Meant for a lease, and on its way before that ended.
            (Reply::Sweep, _) => {}
            (reply, _) => return Ok(reply),
        }
    }
}

/// Does what the daemon asks for, until the connection ends. Also takes what is left in it then: an
/// end with something unread would reach the daemon as an error.
fn listen(connection: &Connection) {
    loop {
        match receive_now(connection.as_fd()) {
            Ok(Received::Packet(packet, _)) => match protocol::decode::<Reply>(&packet) {
                Ok(Reply::Sweep) => {
                    // May end leases, this one included. Host memory needs no sweep: it goes with the
                    // last tensor over it.
                    let alive = tensors::cuda::sweep();
                    tracing::debug!(?alive, "swept on the daemon's word");
                }
                Ok(other) => tracing::debug!("the daemon said {other:?} on a lease: ignored"),
                Err(e) => tracing::debug!("the daemon said something unknown on a lease: {e}"),
            },
            Ok(Received::Closed) => return,
            Ok(Received::Nothing) => {
                let mut fds = [PollFd::new(connection, PollFlags::IN)];
                match poll(&mut fds, None) {
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(e) => return tracing::warn!("waiting for the daemon's word: {e}"),
                }
            }
            Err(e) => return tracing::warn!("the daemon is not listened to any more: {e}"),
        }
    }
}
