//! Leases and waiting: who holds what, for how long, and what the others are told.

use std::time::Duration;

use candle_ipc_cache::protocol::{EpochId, Progress, Refusal, Reply, Request};
use candle_ipc_cache::socket::SocketError;

use crate::support::{
    Daemon, PATIENCE, Weights, ask, attach, attach_request, entry, eventually, quick, refusal,
    take_attached,
};

#[test]
fn a_lease_ends_with_goodbye_or_with_its_connection() {
    let daemon = Daemon::start(quick());
    daemon.publish("m", 1);
    let (a, b) = (daemon.attach("m"), daemon.attach("m"));
    eventually("two leases", || daemon.leases("m") == 2);
    a.connection.send(&Request::Goodbye, &[], PATIENCE).unwrap();
    eventually("one lease", || daemon.leases("m") == 1);
    // The connection goes on: a worker that compared what is held may load now.
    let announce = Request::Announce {
        entry: entry("m"),
        bytes: 1,
        set: Vec::new(),
    };
    assert_eq!(ask(&a.connection, &announce), Reply::Done);
    drop(b);
    eventually("no lease", || daemon.leases("m") == 0);
}

#[test]
fn a_lease_outlasts_the_deadline_of_a_step() {
    let daemon = Daemon::start(quick());
    daemon.publish("m", 1);
    let attached = daemon.attach("m");
    let deadline = quick().limits.step * 3;
    let end = attached.connection.receive::<Reply>(deadline).unwrap_err();
    assert!(matches!(end, SocketError::Deadline(_)), "{end}");
    assert_eq!(daemon.leases("m"), 1);
}

#[test]
fn an_engine_that_does_not_confirm_has_no_lease() {
    let daemon = Daemon::start(quick());
    daemon.publish("m", 1);
    let connection = daemon.connect();
    let request = attach_request("m", Duration::ZERO);
    connection.send(&request, &[], PATIENCE).unwrap();
    let (reply, _fds) = connection.receive::<Reply>(PATIENCE).unwrap();
    assert!(matches!(reply, Reply::Attached { .. }));
    let end = connection.receive::<Reply>(PATIENCE).unwrap_err();
    assert!(matches!(end, SocketError::Closed), "{end}");
    assert_eq!(daemon.leases("m"), 0);
}

#[test]
fn one_connection_holds_one_lease() {
    let daemon = Daemon::start(quick());
    daemon.publish("m", 1);
    let attached = daemon.attach("m");
    let (code, reason) = refusal(ask(
        &attached.connection,
        &attach_request("m", Duration::ZERO),
    ));
    assert_eq!(code, Refusal::BadRequest, "{reason}");
}

#[test]
fn an_entry_in_use_is_unloaded_by_force_only_and_counts_until_it_is_let_go() {
    let daemon = Daemon::start(quick());
    daemon.publish("m", 1);
    let attached = daemon.attach("m");
    let (code, reason) = refusal(daemon.unload("m", false));
    assert_eq!(code, Refusal::InUse);
    let holder = format!("processes {}", std::process::id());
    assert!(reason.contains(&holder), "{reason}");
    assert_eq!(daemon.unload("m", true), Reply::Done);
    let status = daemon.status();
    assert!(status[0].ready.is_none());
    assert_eq!(status[0].retired_bytes, 1024);
    assert_eq!(attach(&daemon.socket, "m").unwrap_err().0, Refusal::NoEntry);
    drop(attached);
    eventually("nothing is held", || daemon.status().is_empty());
}

#[test]
fn a_new_epoch_is_served_at_once_and_the_old_one_is_gone() {
    let daemon = Daemon::start(quick());
    let first = daemon.publish("m", 1);
    let old = daemon.attach("m");
    let worker = daemon.announced("m");
    assert_eq!(daemon.attach("m").epoch, first);
    Weights::new("m", 2).offer(&worker);
    let new = daemon.attach("m");
    assert_ne!(new.epoch, first);
    assert_eq!(daemon.status()[0].retired_bytes, 1024);
    let by_epoch = |epoch| Request::Attach {
        entry: entry("m"),
        epoch: Some(epoch),
        wait: PATIENCE,
    };
    let (code, reason) = refusal(ask(&daemon.connect(), &by_epoch(first)));
    assert_eq!(code, Refusal::NoEpoch);
    assert!(reason.contains(&new.epoch.to_string()), "{reason}");
    let (code, _) = refusal(ask(&daemon.connect(), &by_epoch(EpochId([9; 16]))));
    assert_eq!(code, Refusal::NoEpoch);
    drop(old);
    eventually("the old epoch is let go", || {
        daemon.status()[0].retired_bytes == 0
    });
}

#[test]
fn an_engine_waits_for_a_load_and_hears_how_far_it_is() {
    let daemon = Daemon::start(quick());
    let worker = daemon.announced("m");
    let engine = daemon.connect();
    engine
        .send(&attach_request("m", PATIENCE), &[], PATIENCE)
        .unwrap();
    let news = |wanted: u64| {
        loop {
            match engine.receive(PATIENCE).unwrap().0 {
                Reply::Loading(progress) if progress.done == wanted => return progress,
                Reply::Loading(_) => {}
                other => panic!("{other:?}"),
            }
        }
    };
    news(0);
    let progress = Progress {
        phase: "load".into(),
        done: 512,
        total: 1024,
    };
    worker
        .send(&Request::Progress(progress.clone()), &[], PATIENCE)
        .unwrap();
    assert_eq!(news(512), progress);
    // A heartbeat, without anything new.
    assert_eq!(news(512), progress);
    Weights::new("m", 3).offer(&worker);
    take_attached(engine).unwrap();
}

#[test]
fn an_engine_that_does_not_want_to_wait_is_told_that_the_entry_is_loading() {
    let daemon = Daemon::start(quick());
    let _worker = daemon.announced("m");
    for wait in [Duration::ZERO, Duration::from_millis(50)] {
        let connection = daemon.connect();
        connection
            .send(&attach_request("m", wait), &[], PATIENCE)
            .unwrap();
        let (code, reason) = take_attached(connection).unwrap_err();
        assert_eq!(code, Refusal::StillLoading, "{reason}");
    }
}

#[test]
fn engines_that_wait_hear_why_a_load_failed() {
    let daemon = Daemon::start(quick());
    let worker = daemon.announced("m");
    let engine = daemon.connect();
    engine
        .send(&attach_request("m", PATIENCE), &[], PATIENCE)
        .unwrap();
    let failed = Request::Failed {
        reason: "shard 2 \u{1b}[31mis cut".into(),
    };
    assert_eq!(ask(&worker, &failed), Reply::Done);
    let (code, reason) = take_attached(engine).unwrap_err();
    assert_eq!(code, Refusal::LoadFailed);
    assert!(reason.contains("shard 2  [31mis cut"), "{reason}");
}

#[test]
fn a_worker_that_goes_without_an_offer_has_failed() {
    let daemon = Daemon::start(quick());
    drop(daemon.announced("m"));
    eventually("the load failed", || {
        daemon
            .failed("m")
            .is_some_and(|reason| reason.contains("ended before it finished"))
    });
    daemon.publish("m", 1);
    assert_eq!(daemon.failed("m"), None);
}

#[test]
fn a_worker_that_says_nothing_has_failed() {
    let mut config = quick();
    config.limits.worker_silence = Duration::from_millis(200);
    let daemon = Daemon::start(config);
    let _worker = daemon.announced("m");
    eventually("the load failed", || {
        daemon
            .failed("m")
            .is_some_and(|reason| reason.contains("said nothing for 200ms"))
    });
}

#[test]
fn a_worker_whose_load_was_abandoned_is_told_at_once() {
    let daemon = Daemon::start(quick());
    let worker = daemon.announced("m");
    assert_eq!(
        refusal(daemon.unload("m", false)).0,
        Refusal::AlreadyLoading
    );
    assert_eq!(daemon.unload("m", true), Reply::Done);
    // The worker hears of it at once, not when it has finished.
    let (code, reason) = refusal(worker.receive(PATIENCE).unwrap().0);
    assert_eq!(code, Refusal::NoEntry);
    assert!(reason.contains("unloaded while"), "{reason}");
    assert!(matches!(
        worker.receive::<Reply>(PATIENCE),
        Err(SocketError::Closed)
    ));
    assert!(daemon.status().is_empty());
}

#[test]
fn an_unknown_name_is_answered_with_its_nearest_neighbours() {
    let daemon = Daemon::start(quick());
    let (code, reason) = attach(&daemon.socket, "m").unwrap_err();
    assert_eq!(code, Refusal::NoEntry);
    assert!(reason.contains("candle-cache load"), "{reason}");
    daemon.publish("llama-3.1-8b", 1);
    daemon.publish("qwen-0.5b", 1);
    let (_, reason) = attach(&daemon.socket, "llama-3-8b").unwrap_err();
    assert!(reason.contains("nearest: `llama-3.1-8b`"), "{reason}");
    let unload = daemon.unload("llama-3-8b", false);
    assert!(refusal(unload).1.contains("`llama-3.1-8b`"));
}

#[test]
fn a_daemon_that_stops_ends_leases_and_leaves_nothing() {
    let daemon = Daemon::start(quick());
    daemon.publish("m", 1);
    let attached = daemon.attach("m");
    let waiting = daemon.connect();
    daemon.announced("other");
    let folder = daemon.stop();
    let end = attached.connection.receive::<Reply>(PATIENCE).unwrap_err();
    assert!(matches!(end, SocketError::Closed), "{end}");
    assert!(matches!(
        waiting.receive::<Reply>(PATIENCE),
        Err(SocketError::Closed)
    ));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn stop_is_over_when_the_connection_ends() {
    let daemon = Daemon::start(quick());
    let connection = daemon.connect();
    assert_eq!(ask(&connection, &Request::Stop), Reply::Done);
    let end = connection.receive::<Reply>(PATIENCE).unwrap_err();
    assert!(matches!(end, SocketError::Closed), "{end}");
    assert_eq!(std::fs::read_dir(daemon.folder.path()).unwrap().count(), 0);
}
