//! Workers that the daemon starts: what becomes of the request, and of the entry, when they end.

use std::path::Path;
use std::time::Duration;

use candle_ipc_cache::daemon::{Config, WorkerCommand};
use candle_ipc_cache::protocol::{LoadRequest, Refusal, Reply, Request};

use crate::support::{
    Daemon, PATIENCE, ask, attach_request, eventually, quick, refusal, take_attached,
};

/// A shell script in the worker's place; `$0` is the model.
fn with_script(script: &str) -> Config {
    Config {
        worker: Some(WorkerCommand {
            program: "sh".into(),
            args: vec!["-c".into(), script.into()],
        }),
        ..quick()
    }
}

/// Starts a daemon whose worker announces `m`, and then does as `end` says.
fn announcing(end: &str) -> Daemon {
    let exe = std::env::current_exe().unwrap();
    let exe = exe.display();
    // The script is told the folder by its last argument, as a real worker is.
    with_daemon(&format!(
        "for folder; do :; done; export CANDLE_TEST_SOCKET=\"$folder/daemon.sock\"; \
         '{exe}' --exact children::announces_and_waits --ignored --nocapture </dev/null | \
         {{ grep -m1 -q announced; {end}; }}"
    ))
}

fn with_daemon(script: &str) -> Daemon {
    Daemon::start(with_script(script))
}

fn load() -> Request {
    Request::Load(LoadRequest {
        model: "/models/m".into(),
        name: Some("m".into()),
        device: "host".into(),
        dtype: "stored".into(),
        quantize: None,
        imatrix: None,
        allow_nonfinite: false,
        requantize: false,
        only: None,
        shard: Default::default(),
    })
}

#[test]
fn a_worker_gets_the_model_and_its_flags() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("arguments");
    let daemon = with_daemon(&format!("echo \"$0\" \"$@\" > {}; exit 1", file.display()));
    refusal(ask(&daemon.connect(), &load()));
    let wanted = format!(
        "/models/m --name=m --device=host --dtype=stored --socket-dir {}\n",
        daemon.folder.path().display()
    );
    assert_eq!(std::fs::read_to_string(file).unwrap(), wanted);
}

#[test]
fn a_worker_that_fails_is_answered_with_its_last_words() {
    let daemon = with_daemon("echo early >&2; echo no such model: $0 >&2; exit 5");
    let (code, reason) = refusal(ask(&daemon.connect(), &load()));
    assert_eq!(code, Refusal::LoadFailed);
    assert!(reason.contains("exit code 5"), "{reason}");
    assert!(reason.contains("no such model: /models/m"), "{reason}");
}

#[test]
fn a_worker_that_is_killed_was_probably_out_of_memory() {
    let daemon = with_daemon("kill -9 $$");
    let (code, reason) = refusal(ask(&daemon.connect(), &load()));
    assert_eq!(code, Refusal::LoadFailed);
    assert!(reason.contains("killed by signal 9"), "{reason}");
    assert!(reason.contains("out of memory"), "{reason}");
}

#[test]
fn a_load_is_under_way_once_its_worker_has_announced_it() {
    let daemon = announcing("cat >/dev/null");
    assert_eq!(ask(&daemon.connect(), &load()), Reply::Done);
    assert!(daemon.status()[0].loading.is_some());
    // A second request joins the same worker.
    assert_eq!(ask(&daemon.connect(), &load()), Reply::Done);
}

#[test]
fn a_worker_killed_while_it_loads_is_the_entrys_reason() {
    let daemon = announcing("echo loading shard 2 >&2; kill -9 0");
    assert_eq!(ask(&daemon.connect(), &load()), Reply::Done);
    let engine = daemon.connect();
    engine
        .send(&attach_request("m", PATIENCE), &[], PATIENCE)
        .unwrap();
    let (code, reason) = take_attached(engine).unwrap_err();
    assert_eq!(code, Refusal::LoadFailed);
    assert!(reason.contains("killed by signal 9"), "{reason}");
    assert!(reason.contains("need 12345 bytes"), "{reason}");
    assert!(reason.contains("loading shard 2"), "{reason}");
    daemon.publish("m", 1);
    daemon.attach("m");
}

#[test]
fn a_daemon_without_a_worker_starts_none() {
    let daemon = Daemon::start(quick());
    let (code, reason) = refusal(ask(&daemon.connect(), &load()));
    assert_eq!(code, Refusal::NotAllowed);
    assert!(reason.contains("candle-cache load"), "{reason}");
}

#[test]
fn a_program_that_is_not_there_is_named() {
    let mut config = with_script("");
    config.worker.as_mut().unwrap().program = "/no/such/program".into();
    let daemon = Daemon::start(config);
    let (code, reason) = refusal(ask(&daemon.connect(), &load()));
    assert_eq!(code, Refusal::LoadFailed);
    assert!(reason.contains("/no/such/program"), "{reason}");
}

#[test]
fn a_request_that_could_be_taken_for_a_flag_is_refused() {
    let daemon = with_daemon("exit 0");
    for model in ["", "--help", "relative/m", "/m\n"] {
        let request = Request::Load(LoadRequest {
            model: model.into(),
            name: None,
            device: "host".into(),
            dtype: "stored".into(),
            quantize: None,
            imatrix: None,
            allow_nonfinite: false,
            requantize: false,
            only: None,
            shard: Default::default(),
        });
        let (code, _) = refusal(ask(&daemon.connect(), &request));
        assert_eq!(code, Refusal::BadRequest, "{model:?}");
    }
}

#[test]
fn a_worker_that_announces_nothing_is_killed_in_the_end() {
    let mut config = with_script("exec sleep 600");
    config.limits.worker_silence = Duration::from_millis(300);
    let daemon = Daemon::start(config);
    let (code, reason) = refusal(ask(&daemon.connect(), &load()));
    assert_eq!(code, Refusal::LoadFailed);
    assert!(reason.contains("announced nothing within"), "{reason}");
}

#[test]
fn there_are_only_so_many_workers_and_they_end_with_the_daemon() {
    let folder = tempfile::tempdir().unwrap();
    let pids = folder.path().join("pids");
    let mut config = with_script(&format!("echo $$ >> {}; exec sleep 600", pids.display()));
    config.limits.workers = 1;
    let daemon = Daemon::start(config);
    let first = daemon.connect();
    first.send(&load(), &[], PATIENCE).unwrap();
    eventually("the worker runs", || {
        std::fs::read_to_string(&pids).is_ok_and(|text| text.ends_with('\n'))
    });
    let other = Request::Load(LoadRequest {
        model: "/models/other".into(),
        name: None,
        device: "host".into(),
        dtype: "stored".into(),
        quantize: None,
        imatrix: None,
        allow_nonfinite: false,
        requantize: false,
        only: None,
        shard: Default::default(),
    });
    let (code, _) = refusal(ask(&daemon.connect(), &other));
    assert_eq!(code, Refusal::Busy);
    daemon.stop();
    let pid = std::fs::read_to_string(&pids).unwrap();
    assert!(!Path::new("/proc").join(pid.trim()).exists());
}

#[test]
fn models_to_begin_with_are_loaded_one_after_the_other() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let mut config = with_script(&format!(
        "echo begin $0 >> {0}; sleep 0.2; echo end $0 >> {0}; exit 1",
        log.display()
    ));
    config.preload = ["/a", "/b"]
        .map(|model| LoadRequest {
            model: model.into(),
            name: None,
            device: "host".into(),
            dtype: "stored".into(),
            quantize: None,
            imatrix: None,
            allow_nonfinite: false,
            requantize: false,
            only: None,
            shard: Default::default(),
        })
        .into();
    let _daemon = Daemon::start(config);
    let wanted = "begin /a\nend /a\nbegin /b\nend /b\n";
    eventually("both were tried", || {
        std::fs::read_to_string(&log).is_ok_and(|text| text == wanted)
    });
}
