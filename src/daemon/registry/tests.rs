//! The table on its own, without sockets.

#![allow(clippy::unwrap_used)]

use super::*;

fn registry() -> Arc<Registry> {
    Arc::new(Registry::new(4))
}

fn offered(content: u8, layout: u8) -> Offered {
    Offered {
        manifest: Arc::new(crate::slab::host::sealed("test", b"manifest").unwrap()),
        anchor: None,
        slabs: vec![crate::slab::host::sealed("test", b"slab").unwrap()],
        summary: Summary::for_test(content, layout),
    }
}

/// The id that an offer is published under, and whether it was held already.
trait Publish {
    fn publish(self, offered: Offered) -> Result<(EpochId, bool), Refused>;
}

impl Publish for Load {
    fn publish(self, offered: Offered) -> Result<(EpochId, bool), Refused> {
        match self.take(offered)? {
            Taken::Published(epoch, unchanged) => Ok((epoch, unchanged)),
            Taken::Aside(load) => panic!("{load:?} waits for more"),
        }
    }
}

fn unload(force: bool) -> Unload {
    Unload {
        name: "m".into(),
        force,
        ..Unload::default()
    }
}

fn host(name: &str) -> EntryId {
    EntryId::new(name, DeviceId::Host)
}

fn code<T: std::fmt::Debug>(result: Result<T, Refused>) -> Refusal {
    result.unwrap_err().code
}

#[test]
fn a_second_worker_may_not_announce_the_same_entry() {
    let registry = registry();
    let first = registry.announce(&[host("m")], 10).unwrap();
    assert_eq!(
        code(registry.announce(&[host("m")], 10)),
        Refusal::AlreadyLoading
    );
    drop(first);
    registry.announce(&[host("m")], 10).unwrap();
}

#[test]
fn the_old_epoch_serves_while_a_new_one_loads() {
    let registry = registry();
    let load = registry.announce(&[host("m")], 10).unwrap();
    assert!(matches!(
        registry.find(&host("m"), None, 1),
        Ok(Found::Loading(_))
    ));
    let (first, _) = load.publish(offered(1, 1)).unwrap();
    let load = registry.announce(&[host("m")], 10).unwrap();
    let Ok(Found::Ready(epoch, lease)) = registry.find(&host("m"), None, 7) else {
        panic!("the old epoch should be ready");
    };
    assert_eq!(epoch.id, first);
    let (second, unchanged) = load.publish(offered(2, 1)).unwrap();
    assert!(!unchanged && second != first);
    assert_eq!(
        code(registry.find(&host("m"), Some(first), 1)),
        Refusal::NoEpoch
    );
    assert_eq!(registry.page(None).0[0].retired_bytes, 4);
    drop(lease);
    assert_eq!(registry.page(None).0[0].retired_bytes, 0);
}

#[test]
fn the_same_content_keeps_its_epoch_and_takes_the_newer_receipts() {
    let registry = registry();
    let (first, _) = registry
        .announce(&[host("m")], 1)
        .unwrap()
        .publish(offered(1, 1))
        .unwrap();
    let again = offered(1, 1);
    let newer = again.manifest.clone();
    let (second, unchanged) = registry
        .announce(&[host("m")], 1)
        .unwrap()
        .publish(again)
        .unwrap();
    assert!(unchanged);
    assert_eq!(first, second);
    let Ok(Found::Ready(epoch, _)) = registry.find(&host("m"), None, 1) else {
        panic!("it is ready");
    };
    assert!(Arc::ptr_eq(&epoch.manifest, &newer));
}

#[test]
fn a_failed_load_is_told_and_does_not_hide_what_is_ready() {
    let registry = registry();
    registry.announce(&[host("m")], 1).unwrap().fail("no room");
    let refused = registry.find(&host("m"), None, 1).unwrap_err();
    assert_eq!(refused.code, Refusal::LoadFailed);
    assert!(refused.reason.contains("no room"));
    registry
        .announce(&[host("m")], 1)
        .unwrap()
        .publish(offered(1, 1))
        .unwrap();
    registry.announce(&[host("m")], 1).unwrap().fail("no room");
    assert!(matches!(
        registry.find(&host("m"), None, 1),
        Ok(Found::Ready(..))
    ));
}

#[test]
fn unload_takes_all_that_match_or_none() {
    let registry = registry();
    let mut draft = host("m");
    draft.role = "draft".into();
    for id in [&host("m"), &draft] {
        registry
            .announce(std::slice::from_ref(id), 1)
            .unwrap()
            .publish(offered(1, 1))
            .unwrap();
    }
    let Ok(Found::Ready(_, lease)) = registry.find(&draft, None, 7) else {
        panic!("it is ready");
    };
    let refused = registry.unload(&unload(false)).unwrap_err();
    assert_eq!(refused.code, Refusal::InUse);
    assert!(refused.reason.contains("1 engines (processes 7)"));
    assert_eq!(registry.page(None).0.len(), 2);
    let target = Unload {
        role: Some("target".into()),
        ..unload(false)
    };
    registry.unload(&target).unwrap();
    registry.unload(&unload(true)).unwrap();
    assert_eq!(registry.page(None).0[0].retired_bytes, 4);
    assert_eq!(code(registry.unload(&unload(true))), Refusal::NoEntry);
    drop(lease);
    assert!(registry.page(None).0.is_empty());
}

#[test]
fn an_epoch_that_was_replaced_is_not_there_to_be_unloaded() {
    let registry = registry();
    let publish = |content| {
        let load = registry.announce(&[host("m")], 1).unwrap();
        load.publish(offered(content, 1)).unwrap().0
    };
    let (first, second) = (publish(1), publish(2));
    let of_epoch = |epoch| Unload {
        epoch: Some(epoch),
        ..unload(true)
    };
    let refused = registry.unload(&of_epoch(first)).unwrap_err();
    assert_eq!(refused.code, Refusal::NoEntry);
    assert!(refused.reason.contains(&first.to_string()));
    registry.unload(&of_epoch(second)).unwrap();
    assert!(registry.page(None).0.is_empty());
}

#[test]
fn an_offer_for_an_entry_that_was_unloaded_meanwhile_is_refused() {
    let registry = registry();
    let load = registry.announce(&[host("m")], 1).unwrap();
    assert_eq!(
        code(registry.unload(&unload(false))),
        Refusal::AlreadyLoading
    );
    registry.unload(&unload(true)).unwrap();
    assert_eq!(code(load.publish(offered(1, 1))), Refusal::NoEntry);
    assert!(registry.page(None).0.is_empty());
}

#[test]
fn absence_names_the_nearest_the_other_device_and_the_other_role() {
    let registry = registry();
    let mut draft = host("tiny");
    draft.role = "draft".into();
    for id in [&host("llama-8b"), &draft] {
        registry
            .announce(std::slice::from_ref(id), 1)
            .unwrap()
            .publish(offered(1, 1))
            .unwrap();
    }
    let refused = registry.find(&host("llama-7b"), None, 1).unwrap_err();
    assert_eq!(refused.code, Refusal::NoEntry);
    assert!(refused.reason.contains("nearest: `llama-8b`"));
    let gpu = EntryId::new("llama-8b", DeviceId::Cuda([7; 16]));
    let refused = registry.find(&gpu, None, 1).unwrap_err();
    assert_eq!(refused.code, Refusal::OtherDevice);
    assert!(refused.reason.contains("on GPU-07070707"));
    assert!(refused.reason.contains("on host"));
    let refused = registry.find(&host("tiny"), None, 1).unwrap_err();
    assert!(refused.reason.contains("role `draft`"));
}

#[test]
fn a_full_table_forgets_failures_and_nothing_else() {
    let registry = Arc::new(Registry::new(2));
    let loading = registry.announce(&[host("loading")], 1).unwrap();
    registry
        .announce(&[host("failed")], 1)
        .unwrap()
        .fail("no room");
    let second = registry.announce(&[host("second")], 1).unwrap();
    assert!(registry.page(None).0.iter().all(|e| e.failed.is_none()));
    assert_eq!(
        code(registry.announce(&[host("one more")], 1)),
        Refusal::Busy
    );
    drop((loading, second));
}

#[test]
fn pages_hold_every_entry_once_and_fit_into_packets() {
    let registry = Arc::new(Registry::new(200));
    for i in 0..200 {
        let id = host(&format!("{i:0>500}"));
        registry.announce(&[id], 1).unwrap().fail("x".repeat(2000));
    }
    let (mut seen, mut after, mut pages) = (0, None, 0);
    loop {
        let (entries, more) = registry.page(after.as_ref());
        seen += entries.len();
        pages += 1;
        after = entries.last().map(|e| e.entry.clone());
        let reply = Reply::Status { entries, more };
        let packet = protocol::encode(&reply).unwrap();
        assert_eq!(protocol::decode::<Reply>(&packet).unwrap(), reply);
        if !more {
            break;
        }
    }
    assert_eq!(seen, 200);
    assert!(pages > 1);
}

#[test]
fn a_page_of_the_shortest_entries_is_read_again() {
    let registry = Arc::new(Registry::new(4096));
    for i in 0..4096 {
        let mut id = host(&format!("{i:x}"));
        id.role = "r".into();
        registry.announce(&[id], 1).unwrap().fail("");
    }
    let (entries, more) = registry.page(None);
    assert!(more);
    let reply = Reply::Status { entries, more };
    let packet = protocol::encode(&reply).unwrap();
    assert_eq!(protocol::decode::<Reply>(&packet).unwrap(), reply);
}
