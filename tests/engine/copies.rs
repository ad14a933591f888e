//! Copies and leases beyond the shared bodies: what this process keeps mapped, and what is said on a lease.

use std::sync::mpsc::channel;

use candle_core::{DType, Device};
use candle_ipc_cache::manifest::ElementType;
use candle_ipc_cache::protocol::{Reply, Request, STEP};
use candle_ipc_cache::{HandOff, IpcCache};

use crate::attach;
use crate::bodies::copies::attach_copy;
use crate::bodies::{noise, one_tensor};
use crate::place::{Place, stored_bytes};
use crate::stand_in::{HANG, Model, StandIn};

#[test]
fn nothing_of_a_copied_entry_stays_mapped_but_its_manifest() {
    let model = Model::new("m").tensor("a", ElementType::U8, &[1 << 20], noise(1 << 20, 3));
    let entry = model.build();
    let slab = rustix::fs::fstat(&entry.slabs[0]).unwrap().st_ino;
    let mapped = |inode: u64| {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let inode = inode.to_string();
        maps.lines()
            .any(|line| line.split_whitespace().nth(4) == Some(&inode))
    };
    let daemon = StandIn::serving(entry);
    let shared = attach(&daemon);
    assert!(mapped(slab));
    drop(shared);
    let copy = attach_copy(&Place::host(), &daemon);
    assert!(!mapped(slab));
    let tensor = copy.var_builder(DType::U8).get(1 << 20, "a").unwrap();
    assert!(stored_bytes(&tensor) == noise(1 << 20, 3));
}

#[test]
fn a_hand_off_without_an_answer_leaves_the_copy_in_use() {
    let daemon = StandIn::answering(Box::new(|c, _| {
        let entry = one_tensor().build();
        entry.send(c, &entry.reply());
        // Whatever comes next is not answered.
        let _ = c.receive::<Request>(HANG);
        let _ = c.receive::<Request>(HANG);
        rustix::net::shutdown(c, rustix::net::Shutdown::Both).unwrap();
    }));
    let cache = IpcCache::attach(&daemon.config("m").hand_off(true), &Device::Cpu).unwrap();
    let report = cache.report();
    assert!(matches!(report.hand_off, Some(HandOff::Unknown { .. })));
    assert!(report.copy && report.to_string().contains("hand-off  not known"));
    assert!(cache.var_builder(DType::F32).get(1, "a").is_ok());
}

#[test]
fn an_engine_takes_everything_that_is_said_on_its_lease() {
    // Far more than a socket holds: somebody must read them.
    const WORDS: usize = 5_000;
    let (said, all) = channel();
    let said = std::sync::Mutex::new(said);
    let daemon = StandIn::answering(Box::new(move |c, _| {
        let entry = one_tensor().build();
        entry.send(c, &entry.reply());
        let taken = (0..WORDS).all(|_| c.send(&Reply::Sweep, &[], HANG).is_ok());
        let strange = Reply::Done;
        let taken = taken && c.send(&strange, &[], HANG).is_ok();
        said.lock().unwrap().send(taken).unwrap();
    }));
    let cache = attach(&daemon);
    assert_eq!(all.recv_timeout(HANG + STEP), Ok(true));
    assert!(!cache.daemon_lost());
    assert!(cache.var_builder(DType::F32).get(1, "a").is_ok());
    daemon.next();
    assert_eq!(daemon.next(), Some(Request::Received));
    drop(cache);
    assert_eq!(daemon.next(), Some(Request::Goodbye));
}
