//! GPUs that go away. A pipe stands for a device file: closing its other end is the very hang-up that a lost GPU gives.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use candle_ipc_cache::protocol::{EntryId, EntryStatus, Refusal, Reply, Request};
use candle_ipc_cache::slab::DeviceId;
use candle_ipc_cache::socket::Connection;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pipe::pipe;

use crate::support::{
    Attached, Daemon, PATIENCE, Weights, ask, eventually, offer, quick, take_attached,
};

const A: DeviceId = DeviceId::Cuda([0xa; 16]);
const B: DeviceId = DeviceId::Cuda([0xb; 16]);

/// Publishes `name` on `device` with an anchor.
fn publish(daemon: &Daemon, name: &str, device: DeviceId, fill: u8, anchor: OwnedFd) {
    let connection = daemon.connect();
    let announce = Request::Announce {
        entry: EntryId::new(name, device),
        bytes: 1024,
        set: Vec::new(),
    };
    assert_eq!(ask(&connection, &announce), Reply::Done);
    let mut fds = Weights::new(name, fill).descriptors();
    fds.insert(1, anchor);
    let reply = offer(&connection, true, 1, &fds);
    assert!(matches!(reply, Reply::Accepted { .. }), "{reply:?}");
}

fn attach(daemon: &Daemon, name: &str, device: DeviceId) -> Result<Attached, (Refusal, String)> {
    let connection = daemon.connect();
    let request = Request::Attach {
        entry: EntryId::new(name, device),
        epoch: None,
        wait: Duration::ZERO,
    };
    connection.send(&request, &[], PATIENCE).unwrap();
    take_attached(connection)
}

fn status(daemon: &Daemon, name: &str, device: DeviceId) -> Option<EntryStatus> {
    let entry = EntryId::new(name, device);
    daemon.status().into_iter().find(|s| s.entry == entry)
}

fn is_lost(daemon: &Daemon, name: &str, device: DeviceId) -> bool {
    status(daemon, name, device).is_some_and(|s| s.ready.is_none() && s.failed.is_some())
}

fn is_open(connection: &Connection) -> bool {
    !connection.is_closed()
}

/// Whether every reading end of the pipe has been closed.
fn is_let_go(writer: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(writer, PollFlags::OUT)];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    poll(&mut fds, Some(&now)).unwrap();
    fds[0].revents().contains(PollFlags::ERR)
}

#[test]
fn a_gpu_that_is_gone_takes_all_its_entries_and_no_others() {
    let daemon = Daemon::start(quick());
    let (one, gone) = pipe().unwrap();
    let (two, _alive) = pipe().unwrap();
    let (other, _other_alive) = pipe().unwrap();
    publish(&daemon, "m", A, 1, one);
    publish(&daemon, "n", A, 1, two);
    publish(&daemon, "m", B, 1, other);
    daemon.publish("m", 1);
    let held = attach(&daemon, "m", A).unwrap();
    assert_eq!(held.fds.len(), 3);
    eventually("the lease counts", || {
        status(&daemon, "m", A).unwrap().ready.unwrap().leases == 1
    });

    drop((gone, held.fds));
    eventually("both are lost", || {
        is_lost(&daemon, "m", A) && is_lost(&daemon, "n", A)
    });
    let lost = status(&daemon, "m", A).unwrap();
    let wanted = format!("{A} is gone (its device file hung up): load the model again");
    assert_eq!(lost.failed, Some(wanted.clone()));
    assert_eq!(lost.retired_bytes, 0);
    let (code, reason) = attach(&daemon, "m", A).unwrap_err();
    assert_eq!(code, Refusal::LoadFailed);
    assert!(reason.contains(&wanted), "{reason}");
    // The engine finds out by itself, from its own driver.
    assert!(is_open(&held.connection));
    assert!(status(&daemon, "m", B).unwrap().ready.is_some());
    assert!(
        status(&daemon, "m", DeviceId::Host)
            .unwrap()
            .ready
            .is_some()
    );

    // The GPU is back, and the old lease's end means nothing to the new epoch.
    let (again, _back) = pipe().unwrap();
    publish(&daemon, "m", A, 1, again);
    let new = attach(&daemon, "m", A).unwrap();
    drop(held.connection);
    assert_eq!(status(&daemon, "m", A).unwrap().ready.unwrap().leases, 1);
    assert_ne!(new.epoch, held.epoch);
    assert!(is_lost(&daemon, "n", A));
}

#[test]
fn what_engines_hold_of_older_epochs_is_lost_too() {
    let daemon = Daemon::start(quick());
    let (one, _alive) = pipe().unwrap();
    let (two, gone) = pipe().unwrap();
    publish(&daemon, "old", A, 1, one);
    publish(&daemon, "m", A, 1, two);
    let held = attach(&daemon, "old", A).unwrap();
    assert_eq!(daemon.unload("old", true), Reply::Done);
    assert_eq!(status(&daemon, "old", A).unwrap().retired_bytes, 1024);
    drop(gone);
    eventually("nothing is counted for it", || {
        status(&daemon, "old", A).is_none()
    });
    assert!(is_open(&held.connection));
}

#[test]
fn a_device_file_with_news_is_no_loss_and_one_that_is_gone_already_is() {
    let daemon = Daemon::start(quick());
    let (anchor, device) = pipe().unwrap();
    publish(&daemon, "m", A, 1, anchor);
    for _ in 0..3 {
        rustix::io::write(&device, b"news").unwrap();
        std::thread::sleep(Duration::from_millis(20));
        assert!(status(&daemon, "m", A).unwrap().ready.is_some());
    }
    drop(device);
    eventually("it is lost", || is_lost(&daemon, "m", A));
    let (anchor, _) = pipe().unwrap();
    publish(&daemon, "m", A, 1, anchor);
    eventually("it is lost at once", || is_lost(&daemon, "m", A));
}

#[test]
fn a_device_file_is_let_go_with_its_entry_and_kept_until_then() {
    let daemon = Daemon::start(quick());
    let (first, first_device) = pipe().unwrap();
    publish(&daemon, "m", A, 1, first);
    let (second, second_device) = pipe().unwrap();
    // The same weights again: the first load stays, the second's descriptors go.
    publish(&daemon, "m", A, 1, second);
    eventually("the second is let go", || is_let_go(&second_device));
    assert!(!is_let_go(&first_device));
    let (third, third_device) = pipe().unwrap();
    publish(&daemon, "m", A, 2, third);
    eventually("the first is let go", || is_let_go(&first_device));
    assert!(!is_let_go(&third_device));
    assert_eq!(daemon.unload("m", false), Reply::Done);
    eventually("the third is let go", || is_let_go(&third_device));
}

#[test]
fn an_anchor_that_cannot_be_watched_is_held_all_the_same() {
    let daemon = Daemon::start(quick());
    let file = tempfile::tempfile().unwrap();
    publish(&daemon, "m", A, 1, file.into());
    let attached = attach(&daemon, "m", A).unwrap();
    assert_eq!(attached.fds.len(), 3);
    assert!(rustix::fs::fstat(attached.fds[1].as_fd()).is_ok());
}
