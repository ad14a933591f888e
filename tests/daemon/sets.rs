//! Sets of ranks: published all at once or not at all, attached to by one id, never mixed.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use candle_ipc_cache::protocol::{
    EntryId, EntryStatus, EpochId, Member, Refusal, Reply, Request, ShardId,
};
use candle_ipc_cache::shard::Part;
use candle_ipc_cache::slab::DeviceId;
use candle_ipc_cache::slab::host::HostMapping;
use candle_ipc_cache::socket::Connection;

use crate::support::{
    Attached, Daemon, PATIENCE, Weights, ask, eventually, quick, refusal, take_attached,
};

const RANKS: u16 = 2;

fn shard(rank: u16) -> ShardId {
    ShardId::tensor_parallel(rank, RANKS)
}

fn entry(rank: u16) -> EntryId {
    EntryId {
        shard: shard(rank),
        ..EntryId::new("m", DeviceId::Host)
    }
}

fn member(rank: u16) -> Member {
    Member {
        shard: shard(rank),
        device: DeviceId::Host,
        bytes: 1024,
    }
}

fn announcement() -> Request {
    Request::Announce {
        entry: entry(0),
        bytes: 1024,
        set: vec![member(1)],
    }
}

fn announced(daemon: &Daemon) -> Connection {
    let connection = daemon.connect();
    assert_eq!(ask(&connection, &announcement()), Reply::Done);
    connection
}

fn offer(connection: &Connection, rank: u16, fill: u8) -> Reply {
    Weights::of_rank("m", fill, shard(rank)).offer(connection)
}

/// Publishes a set whose every byte is `fill`.
fn publish(daemon: &Daemon, fill: u8) -> (EpochId, bool) {
    let connection = announced(daemon);
    assert_eq!(offer(&connection, 0, fill), Reply::Done);
    match offer(&connection, 1, fill) {
        Reply::Accepted { epoch, unchanged } => (epoch, unchanged),
        other => panic!("{other:?}"),
    }
}

fn request(rank: u16, epoch: Option<EpochId>, wait: Duration) -> Request {
    Request::Attach {
        entry: entry(rank),
        epoch,
        wait,
    }
}

fn attach_at(
    socket: &Path,
    rank: u16,
    epoch: Option<EpochId>,
) -> Result<Attached, (Refusal, String)> {
    let connection = Connection::connect(socket, PATIENCE).unwrap();
    let request = request(rank, epoch, Duration::ZERO);
    connection.send(&request, &[], PATIENCE).unwrap();
    take_attached(connection)
}

fn attach(
    daemon: &Daemon,
    rank: u16,
    epoch: Option<EpochId>,
) -> Result<Attached, (Refusal, String)> {
    attach_at(&daemon.socket, rank, epoch)
}

fn code(result: Result<Attached, (Refusal, String)>) -> Refusal {
    result.map(|a| a.epoch).unwrap_err().0
}

/// What the slab of an attached rank is filled with.
fn filled(attached: &Attached) -> u8 {
    let slab = HostMapping::map(attached.fds[1].as_fd(), Some(1024), "slab").unwrap();
    slab.as_slice()[0]
}

fn status(daemon: &Daemon, rank: u16) -> EntryStatus {
    let entries = daemon.status();
    let found = entries.into_iter().find(|s| s.entry == entry(rank));
    found.unwrap()
}

#[test]
fn nothing_of_a_set_is_seen_before_its_last_rank_is_offered() {
    let daemon = Daemon::start(quick());
    let worker = announced(&daemon);
    // An engine may wait for a rank that is offered last as for the one that is offered first.
    let waiting = daemon.connect();
    let wait = request(1, None, PATIENCE);
    waiting.send(&wait, &[], PATIENCE).unwrap();
    assert_eq!(code(attach(&daemon, 0, None)), Refusal::StillLoading);
    assert_eq!(offer(&worker, 0, 7), Reply::Done);
    for rank in 0..RANKS {
        assert_eq!(code(attach(&daemon, rank, None)), Refusal::StillLoading);
        assert!(status(&daemon, rank).ready.is_none());
    }
    let Reply::Accepted { epoch, unchanged } = offer(&worker, 1, 8) else {
        panic!("the set is whole");
    };
    assert!(!unchanged);
    let waited = take_attached(waiting).unwrap();
    assert_eq!((waited.epoch, filled(&waited)), (epoch, 8));
    let first = attach(&daemon, 0, Some(epoch)).unwrap();
    assert_eq!((first.epoch, filled(&first)), (epoch, 7));
    let status = status(&daemon, 0);
    assert_eq!(status.entry.to_string(), "`m` (tp 0/2) on host");
    assert_eq!(status.ready.unwrap().ranks, u32::from(RANKS));
}

#[test]
fn a_replaced_set_can_be_had_by_its_id_while_a_rank_of_it_is_held_and_no_longer() {
    let daemon = Daemon::start(quick());
    let (old, _) = publish(&daemon, 1);
    let first = attach(&daemon, 0, None).unwrap();
    assert_eq!(first.epoch, old);
    let (new, _) = publish(&daemon, 2);
    // The engine of rank 1 comes late, with the id that rank 0 got.
    let second = attach(&daemon, 1, Some(old)).unwrap();
    assert_eq!((second.epoch, filled(&second)), (old, 1));
    let newest = attach(&daemon, 0, None).unwrap();
    assert_eq!((newest.epoch, filled(&newest)), (new, 2));
    assert_eq!(status(&daemon, 1).retired_bytes, 1024);

    // Whichever engine leaves first, the other's set stays whole.
    drop(first);
    eventually("one lease less", || {
        attach(&daemon, 0, Some(old)).is_ok() && status(&daemon, 0).retired_bytes == 1024
    });
    drop(second);
    eventually("the old set is gone", || {
        (0..RANKS).all(|rank| status(&daemon, rank).retired_bytes == 0)
    });
    for rank in 0..RANKS {
        let (code, reason) = attach(&daemon, rank, Some(old)).map(|_| ()).unwrap_err();
        assert_eq!(code, Refusal::NoEpoch);
        for id in [old, new] {
            assert!(reason.contains(&id.to_string()), "{reason}");
        }
        assert!(reason.contains("set of 2 ranks"), "{reason}");
    }
}

#[test]
fn a_replaced_set_that_nobody_holds_is_gone_at_once() {
    let daemon = Daemon::start(quick());
    let (old, _) = publish(&daemon, 1);
    publish(&daemon, 2);
    for rank in 0..RANKS {
        assert_eq!(code(attach(&daemon, rank, Some(old))), Refusal::NoEpoch);
        assert_eq!(status(&daemon, rank).retired_bytes, 0);
    }
}

#[test]
fn ranks_never_mix_however_often_the_set_is_replaced() {
    let daemon = Daemon::start(quick());
    publish(&daemon, 0);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let first = attach_at(&daemon.socket, 0, None).unwrap();
                    let second = attach_at(&daemon.socket, 1, Some(first.epoch)).unwrap();
                    assert_eq!(first.epoch, second.epoch);
                    assert_eq!(filled(&first), filled(&second));
                }
            });
        }
        for fill in 1..60 {
            publish(&daemon, fill);
        }
        done.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_worker_that_ends_between_two_ranks_leaves_the_old_set() {
    let daemon = Daemon::start(quick());
    let (old, _) = publish(&daemon, 1);
    let worker = announced(&daemon);
    assert_eq!(offer(&worker, 0, 2), Reply::Done);
    drop(worker);
    eventually("both ranks know of it", || {
        (0..RANKS).all(|rank| status(&daemon, rank).failed.is_some())
    });
    for rank in 0..RANKS {
        let attached = attach(&daemon, rank, None).unwrap();
        assert_eq!((attached.epoch, filled(&attached)), (old, 1));
        assert!(status(&daemon, rank).loading.is_none());
    }
}

#[test]
fn a_rank_that_is_refused_or_failed_ends_the_load_of_all() {
    let daemon = Daemon::start(quick());
    let worker = announced(&daemon);
    assert_eq!(offer(&worker, 0, 1), Reply::Done);
    let (code_of, reason) = refusal(offer(&worker, 0, 1));
    assert_eq!(code_of, Refusal::BadOffer);
    assert!(
        reason.contains("of part tp 0/2, announced was tp 1/2"),
        "{reason}"
    );
    for rank in 0..RANKS {
        assert_eq!(code(attach(&daemon, rank, None)), Refusal::LoadFailed);
    }
    let worker = announced(&daemon);
    assert_eq!(offer(&worker, 0, 1), Reply::Done);
    let failed = Request::Failed {
        reason: "no room for the second".into(),
    };
    assert_eq!(ask(&worker, &failed), Reply::Done);
    for rank in 0..RANKS {
        let failed = status(&daemon, rank).failed.unwrap();
        assert!(failed.contains("no room for the second"), "{failed}");
    }
}

#[test]
fn the_same_set_offered_again_keeps_its_id_and_one_changed_rank_makes_a_new_one() {
    let daemon = Daemon::start(quick());
    let (first, _) = publish(&daemon, 1);
    assert_eq!(publish(&daemon, 1), (first, true));
    let worker = announced(&daemon);
    assert_eq!(offer(&worker, 0, 1), Reply::Done);
    let Reply::Accepted { epoch, unchanged } = offer(&worker, 1, 2) else {
        panic!("the set is whole");
    };
    assert!(!unchanged && epoch != first);
    for rank in 0..RANKS {
        assert_eq!(attach(&daemon, rank, None).unwrap().epoch, epoch);
    }
}

#[test]
fn ranks_that_were_loaded_one_by_one_are_no_set() {
    let daemon = Daemon::start(quick());
    let load = |rank, fill| {
        let connection = daemon.connect();
        let announce = Request::Announce {
            entry: entry(rank),
            bytes: 1024,
            set: Vec::new(),
        };
        assert_eq!(ask(&connection, &announce), Reply::Done);
        match offer(&connection, rank, fill) {
            Reply::Accepted { epoch, .. } => epoch,
            other => panic!("{other:?}"),
        }
    };
    let (first, second) = (load(0, 1), load(1, 1));
    assert_ne!(first, second);
    assert_eq!(code(attach(&daemon, 1, Some(first))), Refusal::NoEpoch);
    // A set in their place is one, though every byte be the same; and a rank of its own breaks it up again.
    let (set, unchanged) = publish(&daemon, 1);
    assert!(!unchanged);
    let held = attach(&daemon, 1, Some(set)).unwrap();
    let alone = load(0, 9);
    assert_eq!(code(attach(&daemon, 1, Some(alone))), Refusal::NoEpoch);
    assert_eq!(filled(&attach(&daemon, 0, Some(set)).unwrap()), 1);
    drop(held);
}

#[test]
fn unloading_takes_every_rank_and_ends_the_load_of_a_set_whole() {
    let daemon = Daemon::start(quick());
    let (old, _) = publish(&daemon, 1);
    let held = attach(&daemon, 1, None).unwrap();
    let (code_of, reason) = refusal(daemon.unload("m", false));
    assert_eq!(code_of, Refusal::InUse);
    assert!(reason.contains("(tp 1/2)"), "{reason}");
    publish(&daemon, 2);
    // What is kept for a set's sake does not outlive an unload.
    assert_eq!(attach(&daemon, 0, Some(old)).unwrap().epoch, old);
    let worker = announced(&daemon);
    assert_eq!(offer(&worker, 0, 3), Reply::Done);
    let one_rank = Request::Unload {
        name: "m".into(),
        role: None,
        device: None,
        shard: Some(shard(1)),
        epoch: None,
        force: true,
    };
    assert_eq!(ask(&daemon.connect(), &one_rank), Reply::Done);
    let (told, reason) = refusal(worker.receive(PATIENCE).unwrap().0);
    assert_eq!(told, Refusal::NoEntry, "{reason}");
    assert!(status(&daemon, 0).loading.is_none() && status(&daemon, 0).ready.is_some());
    assert_eq!(code(attach(&daemon, 1, Some(old))), Refusal::NoEpoch);
    assert_eq!(daemon.unload("m", true), Reply::Done);
    drop(held);
    eventually("nothing is left", || daemon.status().is_empty());
}

#[test]
fn a_set_that_cannot_be_is_refused_when_it_is_announced() {
    let daemon = Daemon::start(quick());
    let refused = |request: Request| refusal(ask(&daemon.connect(), &request));
    let with = |set| Request::Announce {
        entry: entry(0),
        bytes: 1,
        set,
    };
    let (code, reason) = refused(with(vec![member(0)]));
    assert_eq!(code, Refusal::BadRequest);
    assert!(reason.contains("(tp 0/2) on host twice"), "{reason}");
    let mut impossible = member(1);
    impossible.shard.pp = Part::new(3, 3);
    let (code, reason) = refused(with(vec![impossible]));
    assert_eq!(code, Refusal::BadRequest);
    assert!(reason.contains("no rank 3/3 (pp)"), "{reason}");
    let _worker = announced(&daemon);
    let alone = Request::Announce {
        entry: entry(1),
        bytes: 1,
        set: Vec::new(),
    };
    assert_eq!(refused(alone).0, Refusal::AlreadyLoading);
    assert_eq!(daemon.status().len(), 2);
}

#[test]
fn a_part_that_is_not_held_is_told_apart_from_a_name_that_is_not() {
    let daemon = Daemon::start(quick());
    publish(&daemon, 1);
    let absent = |shard| {
        let connection = daemon.connect();
        let request = Request::Attach {
            entry: EntryId { shard, ..entry(0) },
            epoch: None,
            wait: Duration::ZERO,
        };
        refusal(ask(&connection, &request))
    };
    for other in [ShardId::default(), ShardId::tensor_parallel(0, 4)] {
        let (code, reason) = absent(other);
        assert_eq!(code, Refusal::OtherShard);
        for held in ["(tp 0/2)", "(tp 1/2)"] {
            assert!(reason.contains(held), "{reason}");
        }
    }
    daemon.publish("m", 1);
    let (code, reason) = absent(ShardId::tensor_parallel(0, 4));
    assert_eq!(code, Refusal::OtherShard);
    assert!(reason.contains("attach to all of it"), "{reason}");
    assert_eq!(
        absent(ShardId::tensor_parallel(4, 4)).0,
        Refusal::BadRequest
    );
}
