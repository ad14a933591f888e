//! A session that loads: a worker announces, reports and offers; a client asks for a worker of the daemon's own.

use std::sync::atomic::Ordering;

use super::*;
use crate::daemon::registry::Taken;

/// Most offers that may wait to be checked.
const MAX_WAITING: usize = 16;

/// One offer that waits, counted while it does.
struct Waiting<'a>(&'a std::sync::atomic::AtomicUsize);

impl<'a> Waiting<'a> {
    fn new(count: &'a std::sync::atomic::AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Session {
    pub(super) async fn announce(&mut self, entry: EntryId, bytes: u64, set: Vec<Member>) -> Flow {
        if self.lease.is_some() {
            return self
                .refuse_and_close(bad("this connection holds a lease: announce on another"))
                .await;
        }
        let mut total = bytes;
        let mut entries = vec![entry];
        for member in set {
            total = total.saturating_add(member.bytes);
            entries.push(EntryId {
                shard: member.shard,
                device: member.device,
                ..entries[0].clone()
            });
        }
        let load = entries
            .iter()
            .try_for_each(check_entry)
            .and_then(|()| self.context.registry.announce(&entries, total));
        match load {
            Ok(load) => {
                let workers = &self.context.workers;
                let worker = workers.announced(self.peer.pid, &entries[0], total);
                self.load = Some(Announced { load, worker });
                self.reply(&Reply::Done).await
            }
            Err(refused) => self.refuse(refused).await,
        }
    }

    pub(super) async fn progress(&mut self, progress: Progress) -> Flow {
        let Some(Announced { load, .. }) = &self.load else {
            return self.refuse_and_close(not_announced()).await;
        };
        if progress.phase.len() > MAX_PHASE || progress.phase.chars().any(char::is_control) {
            return self.refuse_and_close(bad("an odd phase")).await;
        }
        load.progress(progress);
        Ok(())
    }

    pub(super) async fn offer(&mut self, anchor: bool, slabs: u32, fds: Sent) -> Flow {
        let Some(Announced { load, worker }) = self.load.take() else {
            return self.refuse_and_close(not_announced()).await;
        };
        let context = self.context.clone();
        let held = context.registry.descriptors();
        if held + fds.len() > context.descriptors / 2 {
            let reason = format!(
                "{} descriptors more would be too many: entries hold {held}, and half of this daemon's limit of {} is for \
                 them; raise it (LimitNOFILE=, ulimit -n), unload something, or load with larger slabs",
                fds.len(),
                context.descriptors
            );
            load.fail(reason.clone());
            return self.refuse(Refused::new(Refusal::Busy, reason)).await;
        }
        let waiting = Waiting::new(&context.waiting);
        if waiting.0.load(Ordering::Relaxed) > MAX_WAITING {
            let reason = "many other offers wait to be checked: load it again later";
            load.fail(reason);
            return self.refuse(Refused::new(Refusal::Busy, reason)).await;
        }
        let Ok(_permit) = context.checks.acquire().await else {
            return Err(Close);
        };
        let entry = load.next().clone();
        let checked =
            tokio::task::spawn_blocking(move || offer::check(&entry, anchor, slabs, fds)).await;
        let taken = match checked {
            Ok(Ok(offered)) => load.take(offered),
            Ok(Err(reason)) => {
                load.fail(format!("its offer was refused: {reason}"));
                Err(Refused::new(Refusal::BadOffer, reason))
            }
            Err(e) => {
                load.fail("its offer could not be checked");
                Err(Refused::new(
                    Refusal::BadOffer,
                    format!("the offer could not be checked: {e}"),
                ))
            }
        };
        match taken {
            Ok(Taken::Published(epoch, unchanged)) => {
                self.reply(&Reply::Accepted { epoch, unchanged }).await
            }
            Ok(Taken::Aside(load)) => {
                self.load = Some(Announced { load, worker });
                self.reply(&Reply::Done).await
            }
            Err(refused) => self.refuse(refused).await,
        }
    }

    pub(super) async fn start_load(&mut self, request: LoadRequest) -> Flow {
        let mut state = match self.context.workers.start(request.clone()) {
            Ok(state) => state,
            Err(refused) => return self.refuse(refused).await,
        };
        let silence = self.context.limits.worker_silence;
        let far = async {
            let far = state.wait_for(|s| s.announced.is_some() || s.ended.is_some());
            far.await.map(|state| state.clone()).unwrap_or_default()
        };
        let far = tokio::select! {
            () = stopped(&self.context) => {
                let refused = Refused::new(Refusal::Stopping, "the daemon is stopping");
                return self.refuse_and_close(refused).await;
            }
            // The worker goes on without the client that asked for it.
            _ = self.wire.receive() => return Err(Close),
            far = timeout(silence, far) => far,
        };
        let failed = |reason: String| Refused::new(Refusal::LoadFailed, printable(&reason));
        let result = match far {
            Ok(State {
                announced: Some(_), ..
            }) => Ok(()),
            Ok(State {
                ended: Some(Err(reason)),
                ..
            }) => Err(failed(reason)),
            Ok(_) => Err(failed("the worker ended and announced nothing".into())),
            Err(_) => {
                self.context.workers.kill(&request);
                Err(failed(format!(
                    "the worker announced nothing within {silence:?}"
                )))
            }
        };
        self.answer(result).await
    }

    /// An announced load that will not be offered any more failed. What a child of ours died of,
    /// its reaper knows in a moment.
    pub(super) async fn end_load(mut self) {
        if let Some(Announced { load, worker }) = self.load.take() {
            let mut reason = None;
            if let Some(mut worker) = worker {
                let ended = worker.wait_for(|s| s.ended.is_some());
                if let Ok(Ok(state)) = timeout(self.step(), ended).await {
                    reason = state.ended.clone().and_then(Result::err);
                }
            }
            match reason {
                Some(reason) => load.fail(printable(&reason)),
                None if self.peer.pid > 0 => load.fail(format!(
                    "the worker, process {}, ended before it finished: see its own output; perhaps it was killed, out \
                     of memory",
                    self.peer.pid
                )),
                None => drop(load),
            }
        }
        // Its end tells the one who asked for the stop that nothing is left: not yet.
        if *self.context.stop.borrow() {
            lock(&self.context.parting).push(self.wire);
        }
    }
}
