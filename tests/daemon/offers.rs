//! What workers offer: the truth is published, everything else is refused with its reason.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use candle_ipc_cache::manifest::{FORMAT_VERSION, MAX_SLABS, Manifest};
use candle_ipc_cache::protocol::{Refusal, Reply, Request};
use candle_ipc_cache::shard::Part;
use candle_ipc_cache::slab::host::{self, HostMapping};

use crate::support::{
    Daemon, Weights, ask, attach_request, entry, offer, quick, refusal, take_attached,
};

#[test]
fn an_offer_reaches_engines_byte_for_byte() {
    let daemon = Daemon::start(quick());
    let epoch = daemon.publish("m", 7);
    let attached = daemon.attach("m");
    assert_eq!(attached.epoch, epoch);
    assert_eq!(attached.memory_bytes, 1024);
    assert_eq!(attached.fds.len(), 2);
    let manifest = HostMapping::map(attached.fds[0].as_fd(), None, "manifest").unwrap();
    let manifest = Manifest::decode(manifest.as_slice()).unwrap();
    assert_eq!(manifest.tensors.len(), 2);
    let slab = HostMapping::map(attached.fds[1].as_fd(), Some(1024), "slab").unwrap();
    assert_eq!(slab.as_slice(), [7; 1024]);
    let status = daemon.status();
    let ready = status[0].ready.as_ref().unwrap();
    assert_eq!(ready.root, manifest.root.to_string());
    assert_eq!((ready.tensors, ready.leases), (2, 1));
    assert_eq!(ready.holders, [std::process::id() as i32]);
}

#[test]
fn the_same_weights_offered_again_keep_their_epoch() {
    let daemon = Daemon::start(quick());
    let first = daemon.publish("m", 7);
    let reply = Weights::new("m", 7).offer(&daemon.announced("m"));
    let unchanged = true;
    assert_eq!(
        reply,
        Reply::Accepted {
            epoch: first,
            unchanged
        }
    );
    assert_ne!(daemon.publish("m", 8), first);
}

#[test]
fn changed_small_files_make_a_new_epoch() {
    let daemon = Daemon::start(quick());
    let first = daemon.publish("m", 7);
    let mut weights = Weights::new("m", 7);
    let files = vec![("config.json".into(), b"[]".to_vec())];
    weights.bytes = weights.manifest.encode(files).unwrap();
    match weights.offer(&daemon.announced("m")) {
        Reply::Accepted { epoch, unchanged } => assert!(!unchanged && epoch != first),
        other => panic!("{other:?}"),
    }
}

#[test]
fn as_many_slabs_as_may_be_arrive_in_order() {
    let daemon = Daemon::start(quick());
    let mut weights = Weights::with_slabs("m", 0, MAX_SLABS as u32);
    for (i, slab) in weights.slabs.iter_mut().enumerate() {
        *slab = host::sealed("slab", &[i as u8; 1024]).unwrap();
    }
    let reply = weights.offer(&daemon.announced("m"));
    assert!(matches!(reply, Reply::Accepted { .. }), "{reply:?}");
    let attached = daemon.attach("m");
    assert_eq!(attached.fds.len(), 1 + MAX_SLABS);
    for (i, fd) in attached.fds[1..].iter().enumerate() {
        let slab = HostMapping::map(fd.as_fd(), Some(1024), "slab").unwrap();
        assert_eq!(slab.as_slice()[0], i as u8);
    }
}

/// What a spoiled offer is made of.
struct Spoiled {
    anchor: bool,
    slabs: u32,
    fds: Vec<OwnedFd>,
}

type Spoil = fn(Weights) -> Spoiled;

fn plain(weights: &Weights) -> Spoiled {
    Spoiled {
        anchor: false,
        slabs: weights.slabs.len() as u32,
        fds: weights.descriptors(),
    }
}

/// Offers a manifest that was changed after it was checked.
fn lie(mut weights: Weights, change: impl FnOnce(&mut Manifest)) -> Spoiled {
    change(&mut weights.manifest);
    weights.manifest.root = weights.manifest.digest();
    weights.bytes = Weights::unchecked(&weights.manifest, FORMAT_VERSION);
    plain(&weights)
}

fn of_version(mut weights: Weights, version: u32) -> Spoiled {
    weights.bytes = Weights::unchecked(&weights.manifest, version);
    plain(&weights)
}

fn unsealed(bytes: &[u8]) -> OwnedFd {
    use rustix::fs::{MemfdFlags, memfd_create};
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = memfd_create("open", flags).unwrap();
    assert_eq!(rustix::io::write(&fd, bytes).unwrap(), bytes.len());
    fd
}

fn huge() -> OwnedFd {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
    let fd = memfd_create("huge", flags).unwrap();
    ftruncate(&fd, 2 << 20).unwrap();
    let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    fcntl_add_seals(&fd, seals).unwrap();
    fd
}

const SPOILED: &[(&str, Spoil, &str)] = &[
    (
        "an unsealed manifest",
        |weights| {
            let mut out = plain(&weights);
            out.fds[0] = unsealed(&weights.bytes);
            out
        },
        "the manifest is not sealed memory",
    ),
    (
        "an unsealed slab",
        |weights| {
            let mut out = plain(&weights);
            out.fds[1] = unsealed(&[7; 1024]);
            out
        },
        "slab 0 is not sealed memory",
    ),
    (
        "sealed memory of huge pages, which may not be there when they are read",
        |weights| {
            let mut out = plain(&weights);
            out.fds[0] = huge();
            out
        },
        "no memory file of plain pages",
    ),
    (
        "a great many attributes",
        |weights| lie(weights, |m| m.attributes = vec![Default::default(); 5000]),
        "more than 4096 elements",
    ),
    (
        "a pipe for a slab",
        |weights| {
            let mut out = plain(&weights);
            out.fds[1] = rustix::pipe::pipe().unwrap().0;
            out
        },
        "slab 0 is not sealed memory",
    ),
    (
        "a slab of another size",
        |weights| {
            let mut out = plain(&weights);
            out.fds[1] = host::sealed("slab", &[7; 1000]).unwrap();
            out
        },
        "slab 0 has 1000 bytes, the manifest says 1024",
    ),
    (
        "a tensor outside its slab",
        |weights| lie(weights, |m| m.tensors[1].offset = 1024),
        "lie outside their slab",
    ),
    (
        "a tensor in a slab that is not there",
        |weights| lie(weights, |m| m.tensors[1].slab = 1),
        "slab 1 of 1",
    ),
    (
        "overlapping tensors",
        |weights| lie(weights, |m| m.tensors[1].offset = 0),
        "overlaps",
    ),
    (
        "a length that the shape does not give",
        |weights| lie(weights, |m| m.tensors[1].bytes = 512),
        "is not 512 bytes",
    ),
    (
        "a wrong root digest",
        |mut weights| {
            weights.manifest.root.0[0] ^= 1;
            weights.bytes = Weights::unchecked(&weights.manifest, FORMAT_VERSION);
            plain(&weights)
        },
        "root digest",
    ),
    (
        "a damaged table",
        |mut weights| {
            weights.bytes[80] ^= 1;
            plain(&weights)
        },
        "damaged",
    ),
    (
        "a manifest cut in its table",
        |mut weights| {
            weights.bytes.truncate(200);
            plain(&weights)
        },
        "shorter than its table",
    ),
    (
        "a manifest cut in its files",
        |mut weights| {
            weights.bytes.pop();
            plain(&weights)
        },
        "outside the manifest",
    ),
    (
        "an empty manifest",
        |mut weights| {
            weights.bytes.clear();
            plain(&weights)
        },
        "shorter than its header",
    ),
    (
        "an older format",
        |weights| of_version(weights, FORMAT_VERSION - 1),
        "format version 1",
    ),
    (
        "a newer format",
        |weights| of_version(weights, FORMAT_VERSION + 1),
        "format version 3",
    ),
    (
        "another rank's manifest",
        |weights| lie(weights, |m| m.key.shard.tp = Part::new(1, 2)),
        "of part tp 1/2, announced was whole",
    ),
    (
        "a rank that cannot be",
        |weights| lie(weights, |m| m.key.shard.ep = Part::new(2, 2)),
        "no rank 2/2",
    ),
    (
        "a slice in an entry of no rank",
        |weights| lie(weights, |m| m.tensors[0].cut = Some(0)),
        "cut along dimension 0",
    ),
    (
        "another model's manifest",
        |weights| lie(weights, |m| m.key.model = "other".into()),
        "of `other`, announced was `bad`",
    ),
    (
        "too few descriptors",
        |weights| {
            let mut out = plain(&weights);
            out.fds.pop();
            out
        },
        "1 descriptors came, 2 were announced",
    ),
    (
        "too many descriptors",
        |weights| {
            let mut out = plain(&weights);
            out.fds.push(weights.manifest_fd());
            out
        },
        "3 descriptors came, 2 were announced",
    ),
    (
        "no descriptors",
        |weights| Spoiled {
            fds: Vec::new(),
            ..plain(&weights)
        },
        "0 descriptors came",
    ),
    (
        "more slabs than the manifest lists",
        |weights| {
            let mut out = plain(&weights);
            out.fds.push(host::sealed("slab", &[7; 1024]).unwrap());
            out.slabs = 2;
            out
        },
        "2 slabs came, the manifest lists 1",
    ),
    (
        "more slabs than there may be",
        |weights| Spoiled {
            slabs: u32::MAX,
            ..plain(&weights)
        },
        "the limit is 250",
    ),
    (
        "an anchor for host memory",
        |weights| {
            let mut out = plain(&weights);
            out.fds.insert(1, weights.manifest_fd());
            out.anchor = true;
            out
        },
        "an anchor with slabs in host memory",
    ),
];

#[test]
fn files_that_would_lie_elsewhere_are_in_no_manifest() {
    for name in ["../config.json", "/etc/hosts", "a/../../b", "", "a\nb"] {
        let mut manifest = Weights::new("m", 7).manifest;
        let refused = manifest.encode(vec![(name.into(), b"{}".to_vec())]);
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("no relative path"), "{refused}");
    }
}

#[test]
fn a_lying_offer_is_refused_and_publishes_nothing() {
    let daemon = Daemon::start(quick());
    daemon.publish("good", 1);
    for (what, spoil, expected) in SPOILED {
        let spoiled = spoil(Weights::new("bad", 7));
        let connection = daemon.announced("bad");
        let reply = offer(&connection, spoiled.anchor, spoiled.slabs, &spoiled.fds);
        let (code, reason) = refusal(reply);
        assert_eq!(code, Refusal::BadOffer, "{what}: {reason}");
        assert!(reason.contains(expected), "{what}: {reason}");
        let told = daemon.failed("bad").unwrap();
        assert!(told.contains(expected), "{what}: {told}");
        let status = daemon.status();
        assert!(
            status
                .iter()
                .all(|s| s.entry.name != "bad" || s.ready.is_none())
        );
        daemon.attach("good");
    }
}

#[test]
fn an_offer_that_was_not_announced_is_refused() {
    let daemon = Daemon::start(quick());
    let (code, reason) = refusal(Weights::new("m", 7).offer(&daemon.connect()));
    assert_eq!(code, Refusal::BadRequest);
    assert!(reason.contains("announced no load"), "{reason}");
    assert!(daemon.status().is_empty());
}

#[test]
fn odd_names_are_refused_before_they_are_kept() {
    let daemon = Daemon::start(quick());
    for name in ["", "a\nb", "\u{1b}[31m", &"x".repeat(513)] {
        let announce = Request::Announce {
            entry: entry(name),
            bytes: 1,
            set: Vec::new(),
        };
        let (code, _) = refusal(ask(&daemon.connect(), &announce));
        assert_eq!(code, Refusal::BadRequest, "{name:?}");
        let connection = daemon.connect();
        let request = attach_request(name, Duration::ZERO);
        connection
            .send(&request, &[], Duration::from_secs(5))
            .unwrap();
        assert_eq!(
            take_attached(connection).unwrap_err().0,
            Refusal::BadRequest
        );
    }
    assert!(daemon.status().is_empty());
}

#[test]
fn an_entry_that_is_loading_takes_no_second_worker() {
    let daemon = Daemon::start(quick());
    let first = daemon.announced("m");
    let announce = Request::Announce {
        entry: entry("m"),
        bytes: 1,
        set: Vec::new(),
    };
    let (code, reason) = refusal(ask(&daemon.connect(), &announce));
    assert_eq!(code, Refusal::AlreadyLoading, "{reason}");
    let reply = Weights::new("m", 1).offer(&first);
    assert!(matches!(reply, Reply::Accepted { .. }), "{reply:?}");
}
