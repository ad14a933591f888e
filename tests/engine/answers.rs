//! Dishonest daemons: what they send is checked before it is used.

use std::os::fd::OwnedFd;

use candle_core::Device;
use candle_ipc_cache::manifest::{Digest, Manifest};
use candle_ipc_cache::protocol::{EpochId, Reply};
use candle_ipc_cache::slab::{SlabError, host};
use candle_ipc_cache::{AttachError, IpcCache};

use crate::bodies::one_tensor;
use crate::refused;
use crate::stand_in::StandIn;

/// A memory file that is not sealed.
fn unsealed(bytes: &[u8]) -> OwnedFd {
    let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("unsealed", flags).unwrap();
    rustix::io::write(&fd, bytes).unwrap();
    fd
}

#[test]
fn memory_that_its_owner_could_still_change_is_refused() {
    let mut entry = one_tensor().build();
    entry.slabs[0] = unsealed(&[0; 4]);
    let daemon = StandIn::serving(entry);
    let error = refused(&daemon.config("m"));
    let AttachError::Slab { source, .. } = &error else {
        panic!("{error}")
    };
    assert!(
        matches!(&**source, SlabError::NotSealed { what, .. } if what == "slab 0"),
        "{error}"
    );
    let mut entry = one_tensor().build();
    let bytes = entry.manifest.encode(vec![]).unwrap();
    entry.manifest_fd = unsealed(&bytes);
    let daemon = StandIn::serving(entry);
    let error = refused(&daemon.config("m"));
    assert!(
        error.to_string().contains("the manifest is not sealed"),
        "{error}"
    );
}

#[test]
fn a_slab_of_another_size_is_refused_with_both_sizes() {
    for bytes in [0usize, 3, 5] {
        let mut entry = one_tensor().build();
        entry.slabs[0] = host::sealed("short", &vec![0; bytes]).unwrap();
        let daemon = StandIn::serving(entry);
        let error = refused(&daemon.config("m"));
        let AttachError::Slab { source, .. } = error else {
            panic!("{error}")
        };
        let SlabError::WrongSize { found, wanted, .. } = *source else {
            panic!("{source}")
        };
        assert_eq!((found, wanted), (bytes as u64, 4));
    }
}

#[test]
fn a_manifest_that_lies_or_is_none_is_refused() {
    let lies: [fn(&mut Manifest); 4] = [
        |m| m.tensors[0].offset = 256,
        |m| m.tensors[0].slab = 1,
        |m| m.tensors[0].bytes = 1 << 40,
        |m| m.tensors[0].shape = vec![1 << 40],
    ];
    for lie in lies {
        let mut entry = one_tensor().build();
        let mut bytes = entry.manifest.encode(vec![]).unwrap();
        lie(&mut entry.manifest);
        // As a worker of another making would write it: the table is well formed, its claims are not.
        let config = bincode::config::standard().with_fixed_int_encoding();
        let table = bincode::serde::encode_to_vec(&entry.manifest, config).unwrap();
        bytes.truncate(64);
        bytes[16..24].copy_from_slice(&(table.len() as u64).to_le_bytes());
        bytes[24..56].copy_from_slice(&Digest::of(&table).0);
        bytes.extend_from_slice(&table);
        entry.manifest_fd = host::sealed("lie", &bytes).unwrap();
        let daemon = StandIn::serving(entry);
        let error = refused(&daemon.config("m"));
        assert!(matches!(error, AttachError::Manifest { .. }), "{error}");
    }
    for bytes in [&b""[..], &[0; 63], &[0xff; 4096]] {
        let mut entry = one_tensor().build();
        entry.manifest_fd = host::sealed("noise", bytes).unwrap();
        let daemon = StandIn::serving(entry);
        let error = refused(&daemon.config("m"));
        assert!(matches!(error, AttachError::Manifest { .. }), "{error}");
    }
}

#[test]
fn an_answer_that_does_not_match_its_descriptors_is_refused() {
    let honest = one_tensor().build().reply();
    let Reply::Attached {
        epoch,
        memory_bytes,
        ..
    } = honest
    else {
        panic!("{honest:?}")
    };
    let answers = [
        Reply::Attached {
            epoch,
            anchor: true,
            slabs: 1,
            memory_bytes,
        },
        Reply::Attached {
            epoch,
            anchor: false,
            slabs: 0,
            memory_bytes,
        },
        Reply::Attached {
            epoch,
            anchor: true,
            slabs: 0,
            memory_bytes,
        },
        Reply::Attached {
            epoch,
            anchor: false,
            slabs: u32::MAX,
            memory_bytes,
        },
        Reply::Attached {
            epoch,
            anchor: false,
            slabs: 1,
            memory_bytes: 5,
        },
        Reply::Done,
    ];
    for answer in answers {
        let entry = one_tensor().build();
        let reply = answer.clone();
        let daemon = StandIn::answering(Box::new(move |c, _| entry.send(c, &reply)));
        let error = refused(&daemon.config("m"));
        assert!(
            matches!(error, AttachError::BadAnswer { .. }),
            "{answer:?}: {error}"
        );
    }
}

#[test]
fn another_epoch_than_the_one_asked_for_is_refused() {
    let daemon = StandIn::serving(one_tensor().build());
    let given = EpochId([7; 16]);
    let cache = IpcCache::attach(&daemon.config("m").epoch(given), &Device::Cpu).unwrap();
    assert_eq!(cache.epoch(), given);
    let wanted = EpochId([8; 16]);
    let error = refused(&daemon.config("m").epoch(wanted));
    assert!(
        matches!(error, AttachError::OtherEpoch { wanted: w, found } if w == wanted && found == given),
        "{error}"
    );
}

#[test]
fn something_else_on_the_socket_is_called_so() {
    let daemon = StandIn::answering(Box::new(|c, _| {
        rustix::net::send(
            c,
            b"HTTP/1.1 400 Bad Request",
            rustix::net::SendFlags::NOSIGNAL,
        )
        .unwrap();
    }));
    let text = refused(&daemon.config("m")).to_string();
    assert!(text.contains("no message of candle-ipc-cache"), "{text}");
}
