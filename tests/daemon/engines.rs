//! Engines as they are, on a daemon as it is: sizes, copies that are handed off, memory that is wanted back.

use std::time::Duration;

use candle_core::{DType, Device};
use candle_ipc_cache::protocol::{EpochId, Refusal, Reply, Request};
use candle_ipc_cache::{AttachError, HandOff, IpcCache, IpcConfig};

use crate::support::{Daemon, PATIENCE, Weights, ask, eventually, quick, refusal};

fn config(daemon: &Daemon) -> IpcConfig {
    IpcConfig::new("m").socket_dir(daemon.folder.path())
}

fn attach(config: &IpcConfig) -> IpcCache {
    IpcCache::attach(config, &Device::Cpu).unwrap()
}

/// What the published weights hold in every byte.
fn assert_serves(cache: &IpcCache, fill: u8) {
    let vb = cache.var_builder(DType::F32);
    let tensor = vb.get((8, 8), "layer.0000.000").unwrap();
    let wanted = f32::from_le_bytes([fill; 4]);
    assert_eq!(tensor.to_vec2::<f32>().unwrap(), [[wanted; 8]; 8]);
}

#[test]
fn a_copy_that_is_handed_off_is_unloaded_and_serves_on() {
    let daemon = Daemon::start(quick());
    daemon.publish("m", 1);
    let cache = attach(&config(&daemon).hand_off(true));
    let report = cache.report();
    assert_eq!(report.hand_off, Some(HandOff::Unloaded));
    assert_eq!((report.copy, report.copied_bytes), (true, 512));
    assert!(daemon.status().is_empty());
    drop(daemon);
    assert_serves(&cache, 1);
}

#[test]
fn a_copy_of_what_another_engine_holds_is_not_unloaded() {
    let daemon = Daemon::start(quick());
    daemon.publish("m", 1);
    let other = attach(&config(&daemon));
    let cache = attach(&config(&daemon).hand_off(true));
    match cache.report().hand_off {
        Some(HandOff::Kept { code, reason }) => {
            assert_eq!(code, Refusal::InUse);
            assert!(reason.contains(&std::process::id().to_string()), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(daemon.leases("m"), 1);
    assert_serves(&cache, 1);
    assert_serves(&other, 1);
}

#[test]
fn a_copy_alone_leaves_the_entry_and_no_lease() {
    let daemon = Daemon::start(quick());
    daemon.publish("m", 1);
    let cache = attach(&config(&daemon).copy(true));
    assert_eq!(cache.report().hand_off, None);
    eventually("no lease", || daemon.leases("m") == 0);
    assert_serves(&cache, 1);
}

#[test]
fn the_size_of_an_entry_can_be_asked_without_a_lease() {
    let daemon = Daemon::start(quick());
    let epoch = match Weights::with_slabs("m", 1, 3).offer(&daemon.announced("m")) {
        Reply::Accepted { epoch, .. } => epoch,
        other => panic!("{other:?}"),
    };
    let size = |config: &IpcConfig| IpcCache::memory_bytes_of(config, &Device::Cpu);
    let config = config(&daemon);
    assert_eq!(size(&config).unwrap(), 3 * 1024);
    assert_eq!(daemon.leases("m"), 0);
    // More than a page of others, on both sides.
    for name in ["a", "z"] {
        for i in 0..150 {
            daemon.announced(&format!("{name}{i:0>500}"));
        }
    }
    assert_eq!(size(&config).unwrap(), 3 * 1024);
    assert_eq!(size(&config.clone().epoch(epoch)).unwrap(), 3 * 1024);
    assert_eq!(attach(&config).memory_bytes(), 3 * 1024);
    let other = EpochId([9; 16]);
    match size(&config.clone().epoch(other)).unwrap_err() {
        AttachError::OtherEpoch { wanted, found } => assert_eq!((wanted, found), (other, epoch)),
        error => panic!("{error}"),
    }
}

#[test]
fn the_size_of_what_is_not_ready_is_an_error_that_says_why() {
    let daemon = Daemon::start(quick());
    let size = || IpcCache::memory_bytes_of(&config(&daemon), &Device::Cpu).unwrap_err();
    let code = |error: AttachError| match error {
        AttachError::Refused { code, .. } => code,
        other => panic!("{other}"),
    };
    assert_eq!(code(size()), Refusal::NoEntry);
    let worker = daemon.announced("m");
    match size() {
        AttachError::StillLoading { progress, .. } => assert_eq!(progress.total, 1024),
        error => panic!("{error}"),
    }
    drop(worker);
    eventually("the load failed", || daemon.failed("m").is_some());
    assert_eq!(code(size()), Refusal::LoadFailed);
}

#[test]
fn an_unload_waits_for_engines_that_let_go_when_they_are_asked() {
    let daemon = Daemon::start(quick());
    daemon.publish("m", 1);
    let by_hand = daemon.attach("m");
    let engine = attach(&config(&daemon));
    eventually("two leases", || daemon.leases("m") == 2);
    std::thread::scope(|scope| {
        let unload = scope.spawn(|| daemon.unload("m", false));
        // The daemon has asked, so the unload is waiting.
        let said = by_hand.connection.receive::<Reply>(PATIENCE).unwrap().0;
        assert_eq!(said, Reply::Sweep);
        drop(engine);
        let goodbye = Request::Goodbye;
        by_hand.connection.send(&goodbye, &[], PATIENCE).unwrap();
        assert_eq!(unload.join().unwrap(), Reply::Done);
    });
    assert!(daemon.status().is_empty());
}

#[test]
fn an_engine_that_holds_its_weights_is_asked_and_keeps_them() {
    let daemon = Daemon::start(quick());
    daemon.publish("m", 1);
    let engine = attach(&config(&daemon));
    for _ in 0..2 {
        assert_eq!(refusal(daemon.unload("m", false)).0, Refusal::InUse);
        assert_eq!(daemon.leases("m"), 1);
        assert_serves(&engine, 1);
    }
    drop(engine);
    // Whether the end of the lease came before or after: it is not held.
    assert_eq!(daemon.unload("m", false), Reply::Done);
}

#[test]
fn engines_of_an_entry_that_is_replaced_or_unloaded_by_force_are_asked_for_their_memory() {
    let daemon = Daemon::start(quick());
    daemon.publish("m", 1);
    let first = daemon.attach("m");
    daemon.publish("m", 2);
    let second = daemon.attach("m");
    assert_eq!(
        first.connection.receive::<Reply>(PATIENCE).unwrap().0,
        Reply::Sweep
    );
    assert_eq!(daemon.unload("m", true), Reply::Done);
    assert_eq!(
        second.connection.receive::<Reply>(PATIENCE).unwrap().0,
        Reply::Sweep
    );
    // Once each.
    let more = first
        .connection
        .receive::<Reply>(Duration::from_millis(100));
    assert!(more.is_err());
}

#[test]
fn an_unload_that_waits_does_not_keep_the_daemon_from_stopping() {
    let mut config = quick();
    config.limits.step = PATIENCE;
    let daemon = Daemon::start(config);
    daemon.publish("m", 1);
    let holder = daemon.attach("m");
    std::thread::scope(|scope| {
        let unload = scope.spawn(|| refusal(daemon.unload("m", false)).0);
        holder.connection.receive::<Reply>(PATIENCE).unwrap();
        assert_eq!(ask(&daemon.connect(), &Request::Stop), Reply::Done);
        assert_eq!(unload.join().unwrap(), Refusal::Stopping);
    });
}
