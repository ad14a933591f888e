//! The table of entries: what is ready, loading, failed, and what engines still hold of what is gone.
//! Pure bookkeeping behind one lock that is never held across a wait.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Instant, SystemTime};

use tokio::sync::{Notify, watch};

mod load;
mod words;

use super::anchor::Watch;
use super::lock;
use super::offer::{Offered, Summary};
use crate::protocol::{
    self, EntryId, EntryStatus, EpochId, Progress, ReadyStatus, Refusal, Reply, clip,
};
use crate::slab::DeviceId;

/// Most holders that a status lists.
const MAX_HOLDERS: usize = 64;
/// Bytes of one status page.
const PAGE: usize = protocol::MAX_PACKET - 1024;

/// A refusal on its way to a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refused {
    pub(super) code: Refusal,
    pub(super) reason: String,
}

impl Refused {
    pub(super) fn new(code: Refusal, reason: impl Into<String>) -> Self {
        Self {
            code,
            reason: reason.into(),
        }
    }
}

impl From<Refused> for Reply {
    fn from(refused: Refused) -> Self {
        Self::Refused {
            code: refused.code,
            reason: clip(&refused.reason),
        }
    }
}

/// The descriptors of a published load.
#[derive(Debug)]
pub(super) struct Epoch {
    pub(super) id: EpochId,
    pub(super) manifest: Arc<OwnedFd>,
    pub(super) anchor: Option<OwnedFd>,
    pub(super) slabs: Arc<Vec<OwnedFd>>,
    pub(super) summary: Summary,
    published: Instant,
}

impl Epoch {
    /// `[manifest, anchor, slab…]`, as messages carry them.
    pub(super) fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        std::iter::once(self.manifest.as_fd())
            .chain(self.anchor.iter().map(AsFd::as_fd))
            .chain(self.slabs.iter().map(AsFd::as_fd))
            .collect()
    }
}

/// Who holds an epoch, by lease number.
type Holders = BTreeMap<u64, Holder>;

#[derive(Debug)]
struct Holder {
    pid: i32,
    /// Tells the lease's session that the memory is wanted back.
    wanted: Arc<Notify>,
}

#[derive(Debug)]
struct Ready {
    epoch: Arc<Epoch>,
    holders: Holders,
    _watch: Option<Watch>,
}

/// What engines still hold of an epoch whose descriptors are gone from here.
#[derive(Debug)]
struct Retired {
    epoch: EpochId,
    bytes: u64,
    holders: Holders,
}

#[derive(Debug)]
struct Loading {
    number: u64,
    /// Dropped when the load is over, whatever its end: that wakes those who wait for it.
    progress: watch::Sender<Progress>,
    last: Option<Instant>,
    /// Dropped with the load: that tells its worker when somebody else ended it.
    _under_way: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct Entry {
    ready: Option<Ready>,
    loading: Option<Loading>,
    failed: Option<String>,
    retired: Vec<Retired>,
}

impl Entry {
    fn is_empty(&self) -> bool {
        self.ready.is_none()
            && self.loading.is_none()
            && self.failed.is_none()
            && self.retired.is_empty()
    }

    fn retire(&mut self) {
        if let Some(Ready { epoch, holders, .. }) = self.ready.take()
            && !holders.is_empty()
        {
            want_back(&holders);
            self.retired.push(Retired {
                epoch: epoch.id,
                bytes: epoch.summary.memory_bytes,
                holders,
            });
        }
    }

    fn status(&self, entry: &EntryId) -> EntryStatus {
        EntryStatus {
            entry: entry.clone(),
            ready: self.ready.as_ref().map(|ready| ReadyStatus {
                epoch: ready.epoch.id,
                root: ready.epoch.summary.root.to_string(),
                tensors: ready.epoch.summary.tensors,
                memory_bytes: ready.epoch.summary.memory_bytes,
                leases: ready.holders.len() as u64,
                holders: (ready.holders.values().map(|holder| holder.pid))
                    .take(MAX_HOLDERS)
                    .collect(),
                age_seconds: ready.epoch.published.elapsed().as_secs(),
            }),
            loading: self
                .loading
                .as_ref()
                .map(|loading| loading.progress.borrow().clone()),
            failed: self.failed.clone(),
            retired_bytes: self
                .retired
                .iter()
                .fold(0, |sum, retired| sum.saturating_add(retired.bytes)),
        }
    }
}

fn want_back(holders: &Holders) {
    holders.values().for_each(|h| h.wanted.notify_one());
}

/// Which entries a peer wants unloaded.
#[derive(Clone, Debug, Default)]
pub(super) struct Unload {
    pub(super) name: String,
    /// None: every role.
    pub(super) role: Option<String>,
    /// None: every device.
    pub(super) device: Option<DeviceId>,
    /// None: whichever epoch is there.
    pub(super) epoch: Option<EpochId>,
    pub(super) force: bool,
}

/// Every entry.
#[derive(Debug)]
pub(super) struct Registry {
    table: Mutex<BTreeMap<EntryId, Entry>>,
    /// Counts leases that have ended.
    ended: watch::Sender<u64>,
    numbers: AtomicU64,
    max_entries: usize,
}

/// What an attach finds.
#[derive(Debug)]
pub(super) enum Found {
    /// The descriptors, and the lease that counts from now on.
    Ready(Arc<Epoch>, Lease),
    /// Not yet; the channel closes when the load is over.
    Loading(watch::Receiver<Progress>),
}

/// An announced load. Dropping it says that the worker ended too early.
#[derive(Debug)]
pub(super) struct Load {
    registry: Arc<Registry>,
    pub(super) entry: EntryId,
    number: u64,
    under_way: watch::Receiver<()>,
}

/// An engine's hold on an epoch. Dropping it ends it.
#[derive(Debug)]
pub(super) struct Lease {
    registry: Arc<Registry>,
    entry: EntryId,
    epoch: EpochId,
    number: u64,
    wanted: Arc<Notify>,
}

impl Registry {
    pub(super) fn new(max_entries: usize) -> Self {
        Self {
            table: Mutex::default(),
            ended: watch::Sender::new(0),
            numbers: AtomicU64::new(0),
            max_entries,
        }
    }

    /// Begins a load.
    pub(super) fn announce(self: &Arc<Self>, entry: &EntryId, bytes: u64) -> Result<Load, Refused> {
        let mut table = lock(&self.table);
        if !table.contains_key(entry) && table.len() >= self.max_entries {
            // What is there for its failure's sake alone makes room first.
            let failed = table.iter().find(|(_, slot)| {
                slot.ready.is_none() && slot.loading.is_none() && slot.retired.is_empty()
            });
            if let Some(id) = failed.map(|(id, _)| id.clone()) {
                table.remove(&id);
            }
        }
        if !table.contains_key(entry) && table.len() >= self.max_entries {
            return Err(Refused::new(
                Refusal::Busy,
                format!(
                    "the daemon has {} entries, its limit: unload one",
                    self.max_entries
                ),
            ));
        }
        let slot = table.entry(entry.clone()).or_default();
        if let Some(loading) = &slot.loading {
            let progress = loading.progress.borrow();
            return Err(Refused::new(
                Refusal::AlreadyLoading,
                format!(
                    "another worker is loading {entry} ({} of {} bytes): wait for it, or abandon it with \
                     `candle-cache unload {} --force`",
                    progress.done, progress.total, entry.name
                ),
            ));
        }
        let number = self.number();
        let (under_way, watched) = watch::channel(());
        slot.loading = Some(Loading {
            number,
            progress: watch::Sender::new(Progress {
                phase: "plan".into(),
                done: 0,
                total: bytes,
            }),
            last: None,
            _under_way: under_way,
        });
        Ok(Load {
            registry: self.clone(),
            entry: entry.clone(),
            number,
            under_way: watched,
        })
    }

    /// Looks an entry up for process `pid`.
    pub(super) fn find(
        self: &Arc<Self>,
        entry: &EntryId,
        epoch: Option<EpochId>,
        pid: i32,
    ) -> Result<Found, Refused> {
        let mut table = lock(&self.table);
        let Some(slot) = table.get_mut(entry) else {
            return Err(words::absent(&table, entry));
        };
        if let Some(ready) = &mut slot.ready {
            if let Some(wanted) = epoch.filter(|e| *e != ready.epoch.id) {
                return Err(Refused::new(
                    Refusal::NoEpoch,
                    format!(
                        "epoch {wanted} of {entry} is gone, the daemon holds epoch {}: attach without an epoch, or \
                         to that one",
                        ready.epoch.id
                    ),
                ));
            }
            let number = self.number();
            let wanted = Arc::new(Notify::new());
            let holder = Holder {
                pid,
                wanted: wanted.clone(),
            };
            ready.holders.insert(number, holder);
            let lease = Lease {
                registry: self.clone(),
                entry: entry.clone(),
                epoch: ready.epoch.id,
                number,
                wanted,
            };
            return Ok(Found::Ready(ready.epoch.clone(), lease));
        }
        // A load makes a new epoch: who wants an old one need not wait for it.
        if let Some(wanted) = epoch {
            return Err(Refused::new(
                Refusal::NoEpoch,
                format!("epoch {wanted} of {entry} is gone: attach without an epoch"),
            ));
        }
        if let Some(loading) = &slot.loading {
            return Ok(Found::Loading(loading.progress.subscribe()));
        }
        if let Some(reason) = &slot.failed {
            return Err(Refused::new(
                Refusal::LoadFailed,
                format!("loading {entry} failed: {reason}"),
            ));
        }
        Err(words::absent(&table, entry))
    }

    /// Removes entries of that name; all that match, or none.
    pub(super) fn unload(&self, unload: &Unload) -> Result<(), Refused> {
        let mut table = lock(&self.table);
        let matching: Vec<EntryId> = table
            .iter()
            .filter(|(id, slot)| unload.means(id, slot))
            .map(|(id, _)| id.clone())
            .collect();
        if matching.is_empty() {
            return Err(words::nothing_to_unload(&table, unload));
        }
        if !unload.force {
            for id in &matching {
                words::in_use(id, &table[id])?;
            }
        }
        for id in matching {
            if let Some(slot) = table.get_mut(&id) {
                slot.retire();
                slot.loading = None;
                slot.failed = None;
                if slot.is_empty() {
                    table.remove(&id);
                }
            }
        }
        Ok(())
    }

    /// Tells everybody who holds what `unload` means that it is wanted back.
    pub(super) fn want_back(&self, unload: &Unload) {
        let table = lock(&self.table);
        let matching = table.iter().filter(|(id, slot)| unload.means(id, slot));
        matching
            .filter_map(|(_, slot)| slot.ready.as_ref())
            .for_each(|ready| want_back(&ready.holders));
    }

    /// Descriptors that published epochs hold.
    pub(super) fn descriptors(&self) -> usize {
        let table = lock(&self.table);
        let ready = table.values().filter_map(|slot| slot.ready.as_ref());
        ready.map(|ready| ready.epoch.slabs.len() + 2).sum()
    }

    /// Changes whenever a lease has ended.
    pub(super) fn ended(&self) -> watch::Receiver<u64> {
        self.ended.subscribe()
    }

    /// The GPU of `entry` is gone, says the anchor of its `epoch`: so are all entries on it, and what engines hold of
    /// them is no memory any more.
    pub(super) fn lose(&self, entry: &EntryId, epoch: EpochId) {
        let device = entry.device;
        let mut table = lock(&self.table);
        let there = table.get(entry).and_then(|slot| slot.ready.as_ref());
        if there.is_none_or(|ready| ready.epoch.id != epoch) {
            return;
        }
        for (id, slot) in table.iter_mut().filter(|(id, _)| id.device == device) {
            slot.retired.clear();
            if slot.ready.take().is_some() {
                let reason =
                    format!("{device} is gone (its device file hung up): load the model again");
                tracing::error!("{id} is lost: {reason}");
                slot.failed = Some(reason);
            }
        }
        table.retain(|_, slot| !slot.is_empty());
    }

    /// One page of entries after `after`, and whether there are more.
    pub(super) fn page(&self, after: Option<&EntryId>) -> (Vec<EntryStatus>, bool) {
        use std::ops::Bound::{Excluded, Unbounded};
        let table = lock(&self.table);
        let mut entries = Vec::new();
        let mut room = PAGE;
        let rest = match after {
            Some(after) => table.range::<EntryId, _>((Excluded(after), Unbounded)),
            None => table.range::<EntryId, _>(..),
        };
        for (id, slot) in rest {
            let status = slot.status(id);
            let bytes = protocol::encode(&status).map_or(usize::MAX, |packet| packet.len());
            if bytes > room {
                return (entries, true);
            }
            room -= bytes;
            entries.push(status);
        }
        (entries, false)
    }

    fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    fn over(&self, load: &Load, failed: Option<String>) -> bool {
        let mut table = lock(&self.table);
        let Some(slot) = table.get_mut(&load.entry) else {
            return false;
        };
        if slot
            .loading
            .as_ref()
            .is_none_or(|l| l.number != load.number)
        {
            return false;
        }
        slot.failed = failed;
        slot.loading = None;
        true
    }
}

impl Unload {
    fn means(&self, id: &EntryId, slot: &Entry) -> bool {
        let ready = slot.ready.as_ref().map(|ready| ready.epoch.id);
        id.name == self.name
            && self.role.as_ref().is_none_or(|role| *role == id.role)
            && self.device.is_none_or(|device| device == id.device)
            && match self.epoch {
                Some(epoch) => ready == Some(epoch),
                None => ready.is_some() || slot.loading.is_some() || slot.failed.is_some(),
            }
    }
}

impl Lease {
    /// Waits until somebody wants the memory back.
    pub(super) async fn wanted(&self) {
        self.wanted.notified().await;
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut table = lock(&self.registry.table);
        let Some(slot) = table.get_mut(&self.entry) else {
            return;
        };
        if let Some(ready) = &mut slot.ready
            && ready.epoch.id == self.epoch
        {
            ready.holders.remove(&self.number);
        }
        for retired in &mut slot.retired {
            if retired.epoch == self.epoch {
                retired.holders.remove(&self.number);
            }
        }
        slot.retired.retain(|retired| !retired.holders.is_empty());
        if slot.is_empty() {
            table.remove(&self.entry);
        }
        drop(table);
        self.registry.ended.send_modify(|count| *count += 1);
    }
}

/// An id that nobody has had: the standard library's hash keys come from the system's random
/// source, and the number never repeats in this process.
fn random_id(number: u64) -> EpochId {
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    let seed = (
        RandomState::new().hash_one(number),
        RandomState::new().hash_one(now),
        std::process::id(),
        number,
        now.as_nanos(),
    );
    let hash = blake3::hash(format!("{seed:?}").as_bytes());
    let mut id = [0; 16];
    id.copy_from_slice(&hash.as_bytes()[..16]);
    EpochId(id)
}

#[cfg(test)]
mod tests;
