//! Watches the device files that travel with GPU slabs: their hang-up says that the GPU is gone.
//! The daemon never opens a GPU itself, so this is all that it can hear of one.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Weak;

use tokio::io::unix::AsyncFd;
use tokio::io::{Interest, Ready};
use tokio::task::AbortHandle;

use super::registry::Registry;
use super::wire::watch_fd;
use crate::protocol::{EntryId, EpochId};

/// A watch over one epoch's anchor. Dropping it ends the watch, and lets its descriptor go.
#[derive(Debug)]
pub(super) struct Watch(AbortHandle);

impl Watch {
    /// Watches `anchor` until it hangs up, and then tells the registry that the GPU of `entry` is gone. `None` where
    /// it cannot be watched: the entry is served all the same.
    pub(super) fn start(
        registry: Weak<Registry>,
        entry: EntryId,
        epoch: EpochId,
        anchor: impl AsFd,
    ) -> Option<Self> {
        let watched = anchor
            .as_fd()
            .try_clone_to_owned()
            .and_then(|fd| watch_fd(fd, Interest::READABLE | Interest::ERROR));
        let watched = match watched {
            Ok(watched) => watched,
            Err(e) => {
                tracing::warn!(
                    "the device file of {entry} cannot be watched ({e}): if its GPU goes away, unload it by hand"
                );
                return None;
            }
        };
        let task = tokio::spawn(async move {
            hung_up(&watched).await;
            if let Some(registry) = registry.upgrade() {
                registry.lose(&entry, epoch);
            }
        });
        Some(Self(task.abort_handle()))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn hung_up(anchor: &AsyncFd<OwnedFd>) {
    loop {
        // It ends with an error when the runtime does: then nobody is left to be told.
        let Ok(mut guard) = anchor.ready(Interest::READABLE | Interest::ERROR).await else {
            return std::future::pending().await;
        };
        let ready = guard.ready();
        if ready.is_read_closed() || ready.is_error() {
            return;
        }
        // News of the device that are not for us. The next wake-up is the next change.
        guard.clear_ready_matching(Ready::READABLE);
    }
}
