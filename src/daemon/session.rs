//! One connection's life: requests in, replies out, and at most one lease or one announced load.
//! A peer that is silent, slow, or talks nonsense costs its own connection only.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};

use super::closer::Sent;
use super::process::Process;
use super::registry::{Epoch, Found, Lease, Load, Refused, Unload};
use super::wire::Wire;
use super::words::{check_entry, check_word, printable};
use super::workers::State;
use super::{Context, lock, offer};
use crate::protocol::{
    self, EntryId, EpochId, LoadRequest, MAX_WAIT, Member, Progress, ProtocolError, Refusal, Reply,
    Request,
};
use crate::socket::{Peer, SocketError, send_now};

mod load;

/// Between two [`Reply::Loading`]: at least, while there is news, and at most, while there is none.
const NEWS: Duration = Duration::from_millis(100);
const HEARTBEAT: Duration = Duration::from_secs(1);
/// Longest name of a phase, in bytes.
const MAX_PHASE: usize = 64;

/// The connection is to be closed; who needs to know has been told.
struct Close;

type Flow = Result<(), Close>;

struct Session {
    wire: Wire,
    peer: Peer,
    context: Arc<Context>,
    lease: Option<Held>,
    load: Option<Announced>,
}

/// A lease, and the process that it ends with.
struct Held {
    lease: Lease,
    process: Process,
}

/// An announced load, and the child of ours that announced it.
struct Announced {
    load: Load,
    worker: Option<watch::Receiver<State>>,
}

/// What a session waits for between two requests.
enum Event {
    Packet(Vec<u8>, Sent),
    /// The memory that this peer holds is wanted back.
    Wanted,
    End,
}

/// Serves one peer until either side has had enough.
pub(super) async fn serve(
    wire: Wire,
    peer: Peer,
    allowed: Result<(), SocketError>,
    context: Arc<Context>,
) {
    let mut session = Session {
        wire,
        peer,
        context,
        lease: None,
        load: None,
    };
    if let Err(e) = allowed {
        // It is told so once it has asked: sooner, it might not look. What it sent is not taken.
        let _ = timeout(session.step(), session.wire.wait()).await;
        let refused = Refused::new(Refusal::NotAllowed, e.to_string());
        let _ = session.refuse_and_close(refused).await;
        return;
    }
    loop {
        let Some((packet, fds)) = session.next_packet().await else {
            break;
        };
        if session.handle(&packet, fds).await.is_err() {
            break;
        }
    }
    session.end_load().await;
}

impl Session {
    fn step(&self) -> Duration {
        self.context.limits.step
    }

    /// The next packet; `None` when the connection is to end. Meanwhile a lease's holder is told when
    /// its memory is wanted back.
    async fn next_packet(&mut self) -> Option<(Vec<u8>, Sent)> {
        loop {
            match self.next_event().await {
                Event::Packet(packet, fds) => return Some((packet, fds)),
                Event::Wanted => self.say_sweep(),
                Event::End => return None,
            }
        }
    }

    /// Does not wait: a peer whose queue is full has not read the last ones either.
    fn say_sweep(&self) {
        let sent = protocol::encode(&Reply::Sweep)
            .map_err(|e| e.to_string())
            .and_then(|p| send_now(self.wire.as_fd(), &p, &[]).map_err(|e| e.to_string()));
        if let Err(e) = sent {
            tracing::debug!("asking process {} for memory: {e}", self.peer.pid);
        }
    }

    async fn next_event(&mut self) -> Event {
        let patience = match (&self.lease, &self.load) {
            (Some(_), _) => None,
            (None, Some(_)) => Some(self.context.limits.worker_silence),
            (None, None) => Some(self.step()),
        };
        let silence = async {
            match patience {
                Some(patience) => tokio::time::sleep(patience).await,
                None => std::future::pending().await,
            }
        };
        let ended = async {
            match &self.lease {
                Some(held) => held.process.ended().await,
                None => std::future::pending().await,
            }
        };
        let wanted = async {
            match &self.lease {
                Some(held) => held.lease.wanted().await,
                None => std::future::pending().await,
            }
        };
        let abandoned = async {
            match &mut self.load {
                Some(announced) => announced.load.abandoned().await,
                None => std::future::pending().await,
            }
        };
        let received = tokio::select! {
            biased;
            () = stopped(&self.context) => return Event::End,
            received = self.wire.receive() => received,
            () = ended => {
                tracing::info!("process {} has ended, and its lease with it", self.peer.pid);
                return Event::End;
            }
            () = wanted => return Event::Wanted,
            refused = abandoned => {
                let _ = self.refuse_and_close(refused).await;
                return Event::End;
            }
            () = silence => {
                tracing::debug!("process {} said nothing in time", self.peer.pid);
                if let Some(Announced { load, .. }) = self.load.take() {
                    let silence = self.context.limits.worker_silence;
                    load.fail(format!("the worker said nothing for {silence:?}"));
                }
                return Event::End;
            }
        };
        match received {
            Ok((packet, fds)) => Event::Packet(packet, fds),
            Err(SocketError::Closed) => Event::End,
            Err(e) => {
                let code = match e {
                    SocketError::DescriptorsLost { .. } => Refusal::Busy,
                    _ => Refusal::BadRequest,
                };
                let _ = self
                    .refuse_and_close(Refused::new(code, e.to_string()))
                    .await;
                Event::End
            }
        }
    }

    async fn handle(&mut self, packet: &[u8], fds: Sent) -> Flow {
        let request = match protocol::decode::<Request>(packet) {
            Ok(request) => request,
            Err(e) => return self.answer_nonsense(&e).await,
        };
        if !fds.is_empty() && !matches!(request, Request::Offer { .. }) {
            return self
                .refuse_and_close(bad(format!(
                    "{} descriptors came with a message that takes none",
                    fds.len()
                )))
                .await;
        }
        if self.load.is_some()
            && !matches!(
                request,
                Request::Progress(_) | Request::Offer { .. } | Request::Failed { .. }
            )
        {
            return self
                .refuse_and_close(bad(
                    "after an announcement come progress, and an offer or a failure",
                ))
                .await;
        }
        match request {
            Request::Attach { entry, epoch, wait } => self.attach(entry, epoch, wait).await,
            Request::Received => self.refuse_and_close(bad("nothing was sent")).await,
            Request::Goodbye => {
                self.lease = None;
                Ok(())
            }
            Request::Status { after } => {
                let (entries, more) = self.context.registry.page(after.as_ref());
                self.reply(&Reply::Status { entries, more }).await
            }
            Request::Unload {
                name,
                role,
                device,
                shard,
                epoch,
                force,
            } => {
                let unload = Unload {
                    name,
                    role,
                    device,
                    shard,
                    epoch,
                    force,
                };
                self.unload(&unload).await
            }
            Request::Stop => self.stop().await,
            Request::Load(request) => self.start_load(request).await,
            Request::Announce { entry, bytes, set } => self.announce(entry, bytes, set).await,
            Request::Progress(progress) => self.progress(progress).await,
            Request::Offer { anchor, slabs } => self.offer(anchor, slabs, fds).await,
            Request::Failed { reason } => match self.load.take() {
                Some(Announced { load, .. }) => {
                    load.fail(printable(&reason));
                    self.reply(&Reply::Done).await
                }
                None => self.refuse_and_close(not_announced()).await,
            },
        }
    }

    async fn attach(&mut self, entry: EntryId, epoch: Option<EpochId>, wait: Duration) -> Flow {
        if self.lease.is_some() {
            return self
                .refuse_and_close(bad("this connection holds a lease already: connect again"))
                .await;
        }
        if let Err(refused) = check_entry(&entry) {
            return self.refuse(refused).await;
        }
        let deadline = Instant::now() + wait.min(MAX_WAIT);
        loop {
            match self.context.registry.find(&entry, epoch, self.peer.pid) {
                Ok(Found::Ready(epoch, lease)) => return self.hand_over(&epoch, lease).await,
                Ok(Found::Loading(progress)) if !wait.is_zero() => {
                    if !self.wait_for_load(&entry, progress, deadline).await? {
                        return Ok(());
                    }
                }
                Ok(Found::Loading(progress)) => {
                    let now = progress.borrow().clone();
                    return self.refuse(still_loading(&entry, &now)).await;
                }
                Err(refused) => return self.refuse(refused).await,
            }
        }
    }

    /// Tells the peer how a load comes along. True once it is over; false when the peer was refused.
    async fn wait_for_load(
        &mut self,
        entry: &EntryId,
        mut progress: watch::Receiver<Progress>,
        deadline: Instant,
    ) -> Result<bool, Close> {
        let mut due = Instant::now();
        let mut sent = due;
        loop {
            tokio::select! {
                () = stopped(&self.context) => {
                    let refused = Refused::new(Refusal::Stopping, "the daemon is stopping");
                    self.refuse_and_close(refused).await?;
                }
                received = self.wire.receive() => {
                    if matches!(received, Err(SocketError::Closed)) {
                        return Err(Close);
                    }
                    let refused = bad("a message came while this peer was waiting for an answer");
                    self.refuse_and_close(refused).await?;
                }
                () = sleep_until(deadline) => {
                    let now = progress.borrow().clone();
                    self.refuse(still_loading(entry, &now)).await?;
                    return Ok(false);
                }
                changed = progress.changed() => match changed {
                    Ok(()) => due = due.min(sent + NEWS),
                    Err(_) => return Ok(true),
                },
                () = sleep_until(due) => {
                    let now = progress.borrow_and_update().clone();
                    self.reply(&Reply::Loading(now)).await?;
                    sent = Instant::now();
                    due = sent + HEARTBEAT;
                }
            }
        }
    }

    async fn hand_over(&mut self, epoch: &Epoch, lease: Lease) -> Flow {
        let Ok(process) = Process::of(&self.wire, &self.peer) else {
            tracing::info!("process {} had ended before it was answered", self.peer.pid);
            return Err(Close);
        };
        let reply = Reply::Attached {
            epoch: epoch.id,
            anchor: epoch.anchor.is_some(),
            slabs: epoch.slabs.len() as u32,
            memory_bytes: epoch.summary.memory_bytes,
        };
        match self
            .wire
            .send(&reply, &epoch.descriptors(), self.step())
            .await
        {
            Ok(()) => {}
            Err(e @ SocketError::TooManyInFlight(_)) => {
                let refused = Refused::new(Refusal::Busy, format!("{e}: try again later"));
                return self.refuse_and_close(refused).await;
            }
            Err(e) => return self.give_up("sending descriptors", &e),
        }
        let received = match timeout(self.step(), self.wire.receive()).await {
            Ok(received) => received,
            Err(_) => Err(SocketError::Deadline(self.step())),
        };
        match received {
            Ok((packet, fds)) => match protocol::decode(&packet) {
                Ok(Request::Received) if fds.is_empty() => {
                    self.lease = Some(Held { lease, process });
                    Ok(())
                }
                Ok(_) => {
                    self.refuse_and_close(bad("descriptors must be answered with `Received`"))
                        .await
                }
                Err(e) => self.answer_nonsense(&e).await,
            },
            Err(e) => self.give_up("waiting for descriptors to be received", &e),
        }
    }

    async fn unload(&mut self, unload: &Unload) -> Flow {
        let words = check_word("name", &unload.name)
            .and_then(|()| (unload.role.iter()).try_for_each(|role| check_word("role", role)));
        if let Err(refused) = words {
            return self.refuse(refused).await;
        }
        let registry = self.context.registry.clone();
        let mut ended = registry.ended();
        let mut unloaded = registry.unload(unload);
        let in_use =
            |result: &Result<(), Refused>| matches!(result, Err(r) if r.code == Refusal::InUse);
        if !in_use(&unloaded) {
            return self.answer(unloaded).await;
        }
        // Some may have dropped their weights without a sweep since: they can let go now.
        registry.want_back(unload);
        let deadline = Instant::now() + self.step() / 2;
        while in_use(&unloaded) {
            tokio::select! {
                // A stop ends leases too: that one is no reason to unload.
                biased;
                () = stopped(&self.context) => {
                    let refused = Refused::new(Refusal::Stopping, "the daemon is stopping");
                    return self.refuse_and_close(refused).await;
                }
                received = self.wire.receive() => {
                    if matches!(received, Err(SocketError::Closed)) {
                        return Err(Close);
                    }
                    let refused = bad("a message came while this peer was waiting for an answer");
                    return self.refuse_and_close(refused).await;
                }
                () = sleep_until(deadline) => break,
                // The sender lives in the registry itself, so waiting cannot fail.
                _ = ended.changed() => unloaded = registry.unload(unload),
            }
        }
        self.answer(unloaded).await
    }

    async fn stop(&mut self) -> Flow {
        tracing::info!("process {} asks the daemon to stop", self.peer.pid);
        self.reply(&Reply::Done).await?;
        self.context.stop.send_replace(true);
        Err(Close)
    }

    async fn answer(&self, result: Result<(), Refused>) -> Flow {
        match result {
            Ok(()) => self.reply(&Reply::Done).await,
            Err(refused) => self.refuse(refused).await,
        }
    }

    async fn refuse(&self, refused: Refused) -> Flow {
        tracing::debug!("process {}: {}", self.peer.pid, refused.reason);
        self.reply(&refused.into()).await
    }

    async fn refuse_and_close(&self, refused: Refused) -> Flow {
        self.refuse(refused).await?;
        Err(Close)
    }

    async fn reply(&self, reply: &Reply) -> Flow {
        match self.wire.send(reply, &[], self.step()).await {
            Ok(()) => Ok(()),
            Err(e) => self.give_up("answering", &e),
        }
    }

    async fn answer_nonsense(&self, e: &ProtocolError) -> Flow {
        tracing::debug!("process {}: {e}", self.peer.pid);
        match e {
            // It gets no message that it could take for something else.
            ProtocolError::Foreign(_) => {}
            ProtocolError::Version { .. } => {
                let packet = protocol::empty();
                let _ = self.wire.send_packet(&packet, &[], self.step()).await;
            }
            e => self.refuse(bad(e.to_string())).await?,
        }
        Err(Close)
    }

    fn give_up(&self, what: &str, e: &SocketError) -> Flow {
        tracing::debug!("{what}, process {}: {e}", self.peer.pid);
        Err(Close)
    }
}

/// Ends when the daemon is to stop.
async fn stopped(context: &Context) {
    // The sender lives in the context itself, so waiting cannot fail.
    let _ = context.stop.subscribe().wait_for(|stop| *stop).await;
}

fn bad(reason: impl Into<String>) -> Refused {
    Refused::new(Refusal::BadRequest, reason)
}

fn not_announced() -> Refused {
    bad("this connection has announced no load")
}

fn still_loading(entry: &EntryId, progress: &Progress) -> Refused {
    Refused::new(
        Refusal::StillLoading,
        format!(
            "{entry} is still loading ({}: {} of {} bytes): wait for it, or wait longer",
            progress.phase, progress.done, progress.total
        ),
    )
}
