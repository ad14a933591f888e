//! The table of entries: what is ready, loading, failed, and what engines still hold of what is gone.
//! Pure bookkeeping behind one lock that is never held across a wait.

use std::collections::{BTreeMap, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Instant, SystemTime};

use tokio::sync::{Notify, watch};

mod load;
mod set;
mod words;

pub(super) use load::Taken;

use super::anchor::Watch;
use super::lock;
use super::offer::{Offered, Summary};
use crate::protocol::{
    self, EntryId, EntryStatus, EpochId, Progress, ReadyStatus, Refusal, Reply, ShardId, clip,
};
use crate::slab::DeviceId;

/// Most holders that a status lists.
const MAX_HOLDERS: usize = 64;
/// Most characters of a text that a status shows.
const MAX_SHOWN: usize = 256;
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
    /// Ranks that were published under this id.
    ranks: u32,
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

/// What engines still hold of an epoch that is not given to new ones.
#[derive(Debug)]
struct Retired {
    epoch: EpochId,
    bytes: u64,
    holders: Holders,
    /// Of a set that was replaced: engines of its other ranks may come and ask for this one.
    kept: Option<Arc<Epoch>>,
}

/// A load that is under way. Each rank of a set refers to the one load of all.
#[derive(Debug)]
struct Loading {
    number: u64,
    /// Dropped when the load is over, whatever its end: that wakes those who wait for it.
    progress: watch::Sender<Progress>,
    last: Mutex<Option<Instant>>,
    /// Dropped with the load: that tells its worker when somebody else ended it.
    _under_way: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct Entry {
    ready: Option<Ready>,
    loading: Option<Arc<Loading>>,
    failed: Option<String>,
    retired: Vec<Retired>,
}

/// A text of a manifest, as much of it as a status shows.
fn shown(text: &str) -> String {
    text.chars().take(MAX_SHOWN).collect()
}

impl Entry {
    fn is_empty(&self) -> bool {
        self.ready.is_none()
            && self.loading.is_none()
            && self.failed.is_none()
            && self.retired.is_empty()
    }

    /// Takes what is ready away from new engines. With `replaced`, the ranks of a set stay for those who ask for
    /// their id: [`set::settle`] says for how long.
    fn retire(&mut self, replaced: bool) {
        if let Some(Ready { epoch, holders, .. }) = self.ready.take() {
            want_back(&holders);
            let kept = (replaced && epoch.ranks > 1).then(|| epoch.clone());
            if !holders.is_empty() || kept.is_some() {
                self.retired.push(Retired {
                    epoch: epoch.id,
                    bytes: epoch.summary.memory_bytes,
                    holders,
                    kept,
                });
            }
        }
    }

    fn status(&self, entry: &EntryId) -> EntryStatus {
        EntryStatus {
            entry: entry.clone(),
            ready: self.ready.as_ref().map(|ready| ReadyStatus {
                epoch: ready.epoch.id,
                ranks: ready.epoch.ranks,
                root: ready.epoch.summary.root.to_string(),
                dtype: shown(&ready.epoch.summary.key.dtype),
                recipe: shown(&ready.epoch.summary.key.recipe),
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
    /// None: every part of the model.
    pub(super) shard: Option<ShardId>,
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
    /// Descriptors of ranks that wait for the rest of their set.
    aside: AtomicUsize,
}

/// What an attach finds.
#[derive(Debug)]
pub(super) enum Found {
    /// The descriptors, and the lease that counts from now on.
    Ready(Arc<Epoch>, Lease),
    /// Not yet; the channel closes when the load is over.
    Loading(watch::Receiver<Progress>),
}

/// An announced load of one entry, or of all ranks of a set. Dropping it says that the worker ended too early.
#[derive(Debug)]
pub(super) struct Load {
    registry: Arc<Registry>,
    /// One, or the ranks in the order in which they are offered.
    entries: Vec<EntryId>,
    /// The ranks that have been offered so far.
    aside: Vec<Offered>,
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
            aside: AtomicUsize::new(0),
        }
    }

    /// Begins a load of one entry, or of all ranks of a set; `bytes` of slabs altogether.
    pub(super) fn announce(
        self: &Arc<Self>,
        entries: &[EntryId],
        bytes: u64,
    ) -> Result<Load, Refused> {
        let mut table = lock(&self.table);
        for (i, entry) in entries.iter().enumerate() {
            if entries[..i].contains(entry) {
                return Err(Refused::new(
                    Refusal::BadRequest,
                    format!("the set announces {entry} twice"),
                ));
            }
            if let Some(loading) = table.get(entry).and_then(|slot| slot.loading.as_ref()) {
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
        }
        self.make_room(&mut table, entries)?;
        let number = self.number();
        let (under_way, watched) = watch::channel(());
        let loading = Arc::new(Loading {
            number,
            progress: watch::Sender::new(Progress {
                phase: "plan".into(),
                done: 0,
                total: bytes,
            }),
            last: Mutex::new(None),
            _under_way: under_way,
        });
        for entry in entries {
            table.entry(entry.clone()).or_default().loading = Some(loading.clone());
        }
        Ok(Load {
            registry: self.clone(),
            entries: entries.to_vec(),
            aside: Vec::new(),
            number,
            under_way: watched,
        })
    }

    /// What is there for its failure's sake alone makes room for new entries.
    fn make_room(
        &self,
        table: &mut BTreeMap<EntryId, Entry>,
        entries: &[EntryId],
    ) -> Result<(), Refused> {
        let new = |table: &BTreeMap<EntryId, Entry>| {
            entries.iter().filter(|e| !table.contains_key(e)).count()
        };
        while table.len() + new(table) > self.max_entries {
            let failed = table.iter().find(|(id, slot)| {
                slot.ready.is_none()
                    && slot.loading.is_none()
                    && slot.retired.is_empty()
                    && !entries.contains(id)
            });
            let Some(id) = failed.map(|(id, _)| id.clone()) else {
                return Err(Refused::new(
                    Refusal::Busy,
                    format!(
                        "the daemon has {} entries, and room for {}: unload some",
                        table.len(),
                        self.max_entries
                    ),
                ));
            };
            table.remove(&id);
        }
        Ok(())
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
        let lease = |holders: &mut Holders, epoch: &Arc<Epoch>| {
            let number = self.number();
            let wanted = Arc::new(Notify::new());
            let holder = Holder {
                pid,
                wanted: wanted.clone(),
            };
            holders.insert(number, holder);
            let lease = Lease {
                registry: self.clone(),
                entry: entry.clone(),
                epoch: epoch.id,
                number,
                wanted,
            };
            Found::Ready(epoch.clone(), lease)
        };
        if let Some(ready) = &mut slot.ready
            && epoch.is_none_or(|wanted| wanted == ready.epoch.id)
        {
            return Ok(lease(&mut ready.holders, &ready.epoch));
        }
        // A load makes a new epoch: who wants an old one need not wait for it.
        if let Some(wanted) = epoch {
            for retired in &mut slot.retired {
                if let Some(kept) = retired.kept.as_ref().filter(|kept| kept.id == wanted) {
                    return Ok(lease(&mut retired.holders, kept));
                }
            }
            let held = slot.ready.as_ref().map(|ready| &*ready.epoch);
            return Err(words::no_epoch(entry, wanted, held));
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
        let mut abandoned = HashSet::new();
        for id in &matching {
            if let Some(slot) = table.get_mut(id) {
                slot.retire(false);
                slot.retired.retain_mut(|retired| {
                    retired.kept = None;
                    !retired.holders.is_empty()
                });
                abandoned.extend(slot.loading.take().map(|loading| loading.number));
                slot.failed = None;
            }
        }
        // A set is published whole, or not at all.
        for slot in table.values_mut() {
            if let Some(loading) = &slot.loading
                && abandoned.contains(&loading.number)
            {
                slot.loading = None;
            }
        }
        for id in &matching {
            set::settle(&mut table, id);
        }
        table.retain(|_, slot| !slot.is_empty());
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

    /// Descriptors that epochs hold, those that wait for the rest of their set included.
    pub(super) fn descriptors(&self) -> usize {
        let table = lock(&self.table);
        let ready = table.values().filter_map(|slot| slot.ready.as_ref());
        let retired = table.values().flat_map(|slot| &slot.retired);
        let kept = retired.filter_map(|retired| retired.kept.as_ref());
        let held = ready.map(|ready| &ready.epoch).chain(kept);
        held.map(|epoch| epoch.slabs.len() + 2).sum::<usize>() + self.aside.load(Ordering::Relaxed)
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
        set::settle_all(&mut table);
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

    /// Ends a load without a result. False where somebody else has ended it.
    fn over(&self, load: &Load, failed: &str) -> bool {
        let mut table = lock(&self.table);
        let mut there = false;
        for entry in &load.entries {
            if let Some(slot) = table.get_mut(entry)
                && load.is_in(slot)
            {
                slot.failed = Some(failed.into());
                slot.loading = None;
                there = true;
            }
        }
        there
    }
}

impl Unload {
    fn means(&self, id: &EntryId, slot: &Entry) -> bool {
        let ready = slot.ready.as_ref().map(|ready| ready.epoch.id);
        id.name == self.name
            && self.role.as_ref().is_none_or(|role| *role == id.role)
            && self.device.is_none_or(|device| device == id.device)
            && self.shard.is_none_or(|shard| shard == id.shard)
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
        set::settle(&mut table, &self.entry);
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
