//! An announced load's life: progress, rank after rank set aside, then all published at once, or failed.

use super::*;

/// What came of a rank that was offered.
#[derive(Debug)]
pub(in crate::daemon) enum Taken {
    /// It waits for the rest of its set.
    Aside(Load),
    /// All is published under this id; and whether it was held already.
    Published(EpochId, bool),
}

impl Load {
    /// The entry that is to be offered next.
    pub(in crate::daemon) fn next(&self) -> &EntryId {
        // An offer that completes the set ends the load, so there is a next one.
        &self.entries[self.aside.len().min(self.entries.len() - 1)]
    }

    /// What this load is of, for people.
    fn what(&self) -> String {
        match self.entries.as_slice() {
            [entry] => entry.to_string(),
            ranks => format!("{} and {} more", ranks[0], ranks.len() - 1),
        }
    }

    /// Whether this is the load that `slot` waits for.
    pub(super) fn is_in(&self, slot: &Entry) -> bool {
        let loading = slot.loading.as_ref();
        loading.is_some_and(|loading| loading.number == self.number)
    }

    /// Notes how far it has come. More than ten a second are not noted.
    pub(in crate::daemon) fn progress(&self, progress: Progress) {
        let table = lock(&self.registry.table);
        // All ranks of a set have the same.
        let slot = table.get(&self.entries[0]).filter(|slot| self.is_in(slot));
        let Some(loading) = slot.and_then(|slot| slot.loading.as_ref()) else {
            return;
        };
        let mut last = lock(&loading.last);
        let early = last.is_some_and(|last| last.elapsed().as_millis() < 100);
        if early && loading.progress.borrow().phase == progress.phase {
            return;
        }
        *last = Some(Instant::now());
        loading.progress.send_replace(progress);
    }

    /// Waits until somebody unloads the entry, and says so.
    pub(in crate::daemon) async fn abandoned(&mut self) -> Refused {
        // Nothing is ever sent: the channel can only close.
        while self.under_way.changed().await.is_ok() {}
        words::abandoned(&self.entries[0])
    }

    /// Ends it without a result. Ranks that were set aside are let go.
    pub(in crate::daemon) fn fail(self, reason: impl Into<String>) {
        let reason = clip(&reason.into());
        tracing::warn!("loading {} failed: {reason}", self.what());
        self.registry.over(&self, &reason);
    }

    /// Takes what was offered for [`Load::next`]. With the last one, everything is published: at once for everybody
    /// who attaches from now on.
    pub(in crate::daemon) fn take(mut self, offered: Offered) -> Result<Taken, Refused> {
        let registry = self.registry.clone();
        let mut table = lock(&registry.table);
        let expected = |id: &EntryId| table.get(id).is_some_and(|slot| self.is_in(slot));
        if !self.entries.iter().all(expected) {
            return Err(words::abandoned(&self.entries[0]));
        }
        if self.aside.len() + 1 < self.entries.len() {
            registry
                .aside
                .fetch_add(offered.descriptors(), Ordering::Relaxed);
            self.aside.push(offered);
            return Ok(Taken::Aside(self));
        }
        let mut ranks = self.clear();
        ranks.push(offered);
        let entries = std::mem::take(&mut self.entries);
        for entry in &entries {
            if let Some(slot) = table.get_mut(entry) {
                slot.loading = None;
                slot.failed = None;
            }
        }
        if let Some(id) = unchanged(&table, &entries, &ranks) {
            for (entry, offered) in entries.iter().zip(ranks) {
                if let Some(ready) = table.get_mut(entry).and_then(|slot| slot.ready.as_mut()) {
                    refresh(ready, offered);
                }
                tracing::info!("{entry} is unchanged: epoch {id}");
            }
            return Ok(Taken::Published(id, true));
        }
        let id = random_id(self.number);
        for (entry, offered) in entries.iter().zip(ranks) {
            if let Some(slot) = table.get_mut(entry) {
                slot.retire(true);
                slot.ready = Some(registry.ready(entry, id, entries.len() as u32, offered));
            }
        }
        set::settle(&mut table, &entries[0]);
        Ok(Taken::Published(id, false))
    }

    /// The ranks that were set aside.
    fn clear(&mut self) -> Vec<Offered> {
        let ranks = std::mem::take(&mut self.aside);
        let descriptors = ranks.iter().map(Offered::descriptors).sum();
        self.registry
            .aside
            .fetch_sub(descriptors, Ordering::Relaxed);
        ranks
    }
}

/// The epoch under which the very same content is published already, as one set.
fn unchanged(
    table: &BTreeMap<EntryId, Entry>,
    entries: &[EntryId],
    ranks: &[Offered],
) -> Option<EpochId> {
    let held = |entry: &EntryId| {
        let ready = table.get(entry)?.ready.as_ref()?;
        Some(ready.epoch.clone())
    };
    let id = held(&entries[0])?.id;
    let same = |(entry, offered): (&EntryId, &Offered)| {
        held(entry).is_some_and(|epoch| {
            epoch.id == id
                && epoch.ranks as usize == entries.len()
                && epoch.summary.same_content(&offered.summary)
        })
    };
    entries.iter().zip(ranks).all(same).then_some(id)
}

/// The same bytes in the same places, perhaps with newer receipts: those are worth having, since engines compare files
/// with them.
fn refresh(ready: &mut Ready, offered: Offered) {
    let old = &ready.epoch;
    if old.summary.layout != offered.summary.layout {
        return;
    }
    let anchor = old.anchor.as_ref().and_then(|fd| fd.try_clone().ok());
    if anchor.is_some() == old.anchor.is_some() {
        ready.epoch = Arc::new(Epoch {
            id: old.id,
            manifest: offered.manifest,
            anchor,
            slabs: old.slabs.clone(),
            summary: offered.summary,
            ranks: old.ranks,
            published: old.published,
        });
    }
}

impl Registry {
    fn ready(
        self: &Arc<Self>,
        entry: &EntryId,
        id: EpochId,
        ranks: u32,
        offered: Offered,
    ) -> Ready {
        let epoch = Epoch {
            id,
            manifest: offered.manifest,
            anchor: offered.anchor,
            slabs: Arc::new(offered.slabs),
            summary: offered.summary,
            ranks,
            published: Instant::now(),
        };
        tracing::info!(
            "published {entry} as epoch {id}: {} tensors, {} bytes",
            epoch.summary.tensors,
            epoch.summary.memory_bytes
        );
        // It cannot find the table without this epoch: the table is locked until the epoch stands there.
        let watch = epoch.anchor.as_ref().and_then(|anchor| {
            let registry = Arc::downgrade(self);
            Watch::start(registry, entry.clone(), id, anchor)
        });
        Ready {
            epoch: Arc::new(epoch),
            holders: Holders::new(),
            _watch: watch,
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.clear();
        let reason = "the worker ended before it finished";
        if self.registry.over(self, reason) {
            tracing::warn!("loading {} failed: {reason}", self.what());
        }
    }
}
