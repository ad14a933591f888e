//! Waits and refusals: what an engine does while a daemon is absent, silent, loading, or says no.

use std::time::{Duration, Instant};

use candle_core::{DType, Device};
use candle_ipc_cache::protocol::{Progress, Refusal, Reply, Request};
use candle_ipc_cache::socket::SocketError;
use candle_ipc_cache::{AttachError, IpcCache, IpcConfig};

use crate::bodies::one_tensor;
use crate::refused;
use crate::stand_in::{HANG, StandIn};

#[test]
fn without_a_daemon_the_error_says_where_it_looked() {
    let folder = tempfile::tempdir().unwrap();
    let error = refused(&IpcConfig::new("m").socket_dir(folder.path()));
    let text = error.to_string();
    assert!(matches!(error, AttachError::NoDaemon { .. }), "{text}");
    let socket = folder.path().join("daemon.sock");
    assert!(text.contains(&socket.display().to_string()), "{text}");
    assert!(text.contains("candle-cache serve"), "{text}");
}

#[test]
fn a_daemon_that_never_answers_costs_the_connect_timeout() {
    let daemon = StandIn::answering(Box::new(|_, _| {}));
    let start = Instant::now();
    let patience = Duration::from_millis(200);
    let error = refused(&daemon.config("m").connect_timeout(patience));
    let AttachError::Socket { source, .. } = &error else {
        panic!("{error}")
    };
    assert!(
        matches!(**source, SocketError::Deadline(d) if d == patience),
        "{error}"
    );
    assert!(start.elapsed() < HANG);
}

#[test]
fn a_refusal_carries_its_code_and_the_daemons_reason() {
    let daemon = StandIn::answering(Box::new(|c, _| {
        let reply = Reply::Refused {
            code: Refusal::NoEntry,
            reason: "no entry `m`; there are `n`".into(),
        };
        c.send(&reply, &[], HANG).unwrap();
    }));
    let error = refused(&daemon.config("m"));
    assert!(error.to_string().contains("there are `n`"), "{error}");
    assert!(
        matches!(
            error,
            AttachError::Refused {
                code: Refusal::NoEntry,
                ..
            }
        ),
        "{error}"
    );
}

fn loading(done: u64) -> Reply {
    Reply::Loading(Progress {
        phase: "load".into(),
        done,
        total: 10,
    })
}

#[test]
fn an_entry_that_is_loading_is_waited_for_longer_than_the_connect_timeout() {
    let entry = one_tensor().build();
    let daemon = StandIn::answering(Box::new(move |c, _| {
        for done in 0..10 {
            c.send(&loading(done), &[], HANG).unwrap();
            std::thread::sleep(Duration::from_millis(60));
        }
        entry.send(c, &entry.reply());
    }));
    let config = daemon
        .config("m")
        .connect_timeout(Duration::from_millis(300));
    let cache = IpcCache::attach(&config, &Device::Cpu).unwrap();
    assert!(cache.var_builder(DType::F32).get(1, "a").is_ok());
}

#[test]
fn the_wait_that_an_engine_is_ready_for_is_told_to_the_daemon() {
    let daemon = StandIn::serving(one_tensor().build());
    let config = daemon.config("m").state_timeout(Duration::from_secs(77));
    for (config, seconds) in [(config.clone(), 77), (config.wait(false), 0)] {
        let cache = IpcCache::attach(&config, &Device::Cpu).unwrap();
        match daemon.next() {
            Some(Request::Attach { wait, entry, .. }) => {
                assert_eq!(
                    (wait, entry.name.as_str()),
                    (Duration::from_secs(seconds), "m")
                );
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(daemon.next(), Some(Request::Received));
        drop(cache);
        assert_eq!(daemon.next(), Some(Request::Goodbye));
    }
}

#[test]
fn a_load_that_never_ends_is_given_up_with_how_far_it_came() {
    // The stand-in does not refuse when the wait is over, as the daemon would: the engine must.
    let daemon = StandIn::answering(Box::new(
        |c, _| while c.send(&loading(3), &[], HANG).is_ok() {},
    ));
    let config = daemon.config("m").state_timeout(Duration::ZERO);
    let start = Instant::now();
    let error = refused(&config);
    let AttachError::StillLoading { progress, .. } = error else {
        panic!("{error}")
    };
    assert_eq!((progress.done, progress.total), (3, 10));
    assert!(start.elapsed() < HANG);
}

#[test]
fn a_daemon_that_dies_while_an_engine_waits_is_noticed_at_once() {
    let daemon = StandIn::answering(Box::new(|c, _| {
        c.send(&loading(3), &[], HANG).unwrap();
        rustix::net::shutdown(c, rustix::net::Shutdown::Both).unwrap();
    }));
    let start = Instant::now();
    let error = refused(&daemon.config("m"));
    let AttachError::Socket { source, .. } = &error else {
        panic!("{error}")
    };
    assert!(matches!(**source, SocketError::Closed), "{error}");
    assert!(start.elapsed() < HANG);
}
