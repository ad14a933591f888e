//! An announced load's life: progress, then published or failed.

use super::*;

impl Load {
    /// Notes how far it has come. More than ten a second are not noted.
    pub(in crate::daemon) fn progress(&self, progress: Progress) {
        let mut table = lock(&self.registry.table);
        let loading = table
            .get_mut(&self.entry)
            .and_then(|slot| slot.loading.as_mut())
            .filter(|loading| loading.number == self.number);
        let Some(loading) = loading else { return };
        let early = loading
            .last
            .is_some_and(|last| last.elapsed().as_millis() < 100);
        if early && loading.progress.borrow().phase == progress.phase {
            return;
        }
        loading.last = Some(Instant::now());
        loading.progress.send_replace(progress);
    }

    /// Waits until somebody unloads the entry, and says so.
    pub(in crate::daemon) async fn abandoned(&mut self) -> Refused {
        // Nothing is ever sent: the channel can only close.
        while self.under_way.changed().await.is_ok() {}
        words::abandoned(&self.entry)
    }

    /// Ends it without a result.
    pub(in crate::daemon) fn fail(self, reason: impl Into<String>) {
        let reason = clip(&reason.into());
        tracing::warn!("loading {} failed: {reason}", self.entry);
        self.registry.over(&self, Some(reason));
    }

    /// Publishes its result: at once for everybody who attaches from now on.
    pub(in crate::daemon) fn publish(self, offered: Offered) -> Result<(EpochId, bool), Refused> {
        let mut table = lock(&self.registry.table);
        let slot = table
            .get_mut(&self.entry)
            .filter(|slot| {
                slot.loading
                    .as_ref()
                    .is_some_and(|l| l.number == self.number)
            })
            .ok_or_else(|| words::abandoned(&self.entry))?;
        slot.loading = None;
        slot.failed = None;
        if let Some(ready) = &mut slot.ready
            && ready.epoch.summary.same_content(&offered.summary)
        {
            let id = ready.epoch.id;
            // The same bytes in the same places, perhaps with newer receipts: those are worth
            // having, since engines compare files with them.
            if ready.epoch.summary.layout == offered.summary.layout {
                let old = &ready.epoch;
                let anchor = old.anchor.as_ref().and_then(|fd| fd.try_clone().ok());
                if anchor.is_some() == old.anchor.is_some() {
                    ready.epoch = Arc::new(Epoch {
                        id,
                        manifest: offered.manifest,
                        anchor,
                        slabs: old.slabs.clone(),
                        summary: offered.summary,
                        published: old.published,
                    });
                }
            }
            tracing::info!("{} is unchanged: epoch {id}", self.entry);
            return Ok((id, true));
        }
        slot.retire();
        let epoch = Epoch {
            id: random_id(self.number),
            manifest: offered.manifest,
            anchor: offered.anchor,
            slabs: Arc::new(offered.slabs),
            summary: offered.summary,
            published: Instant::now(),
        };
        let id = epoch.id;
        tracing::info!(
            "published {} as epoch {id}: {} tensors, {} bytes",
            self.entry,
            epoch.summary.tensors,
            epoch.summary.memory_bytes
        );
        // It cannot find the table without this epoch: the table is locked until the epoch stands there.
        let watch = epoch.anchor.as_ref().and_then(|anchor| {
            let registry = Arc::downgrade(&self.registry);
            Watch::start(registry, self.entry.clone(), id, anchor)
        });
        slot.ready = Some(Ready {
            epoch: Arc::new(epoch),
            holders: Holders::new(),
            _watch: watch,
        });
        Ok((id, false))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let reason = "the worker ended before it finished";
        if self.registry.over(self, Some(reason.into())) {
            tracing::warn!("loading {} failed: {reason}", self.entry);
        }
    }
}
