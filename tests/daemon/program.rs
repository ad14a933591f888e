//! The program itself: one daemon a folder, what lies in its way, signals, commands and exit codes.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::{FileTypeExt, chown, symlink};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use candle_ipc_cache::daemon::Listener;
use candle_ipc_cache::protocol::{Refusal, Reply, Request};
use candle_ipc_cache::socket::Connection;
use rustix::process::{Pid, Signal, kill_process};

use crate::support::{PATIENCE, Weights, ask, attach, attach_request, entry, eventually};

fn program(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_candle-cache"));
    with_folder(&mut command, folder);
    command
}

fn with_folder(command: &mut Command, folder: &Path) {
    command
        .env("CANDLE_CACHE_SOCKET_DIR", folder)
        .env_remove("CANDLE_CACHE_LOG")
        .stdin(Stdio::null());
}

fn run(folder: &Path, args: &[&str]) -> Output {
    program(folder).args(args).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

/// A daemon in a process of its own; killed when dropped.
struct Server(Child);

impl Server {
    fn start(command: Command) -> Self {
        Self::try_start(command).expect("it should listen")
    }

    /// `None` when it ended without listening.
    fn try_start(mut command: Command) -> Option<Self> {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let mut out = BufReader::new(child.stdout.as_mut().unwrap());
        out.read_line(&mut line).unwrap();
        if line.contains("daemon.sock") {
            return Some(Self(child));
        }
        child.wait().unwrap();
        None
    }

    fn serve(folder: &Path) -> Self {
        let mut command = program(folder);
        command.arg("serve").stderr(Stdio::null());
        Self::start(command)
    }

    fn signal(&mut self, signal: Signal) -> Option<i32> {
        let pid = Pid::from_child(&self.0);
        kill_process(pid, signal).unwrap();
        self.0.wait().unwrap().code()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn publish(socket: &Path, weights: &Weights) {
    let connection = Connection::connect(socket, PATIENCE).unwrap();
    let announce = Request::Announce {
        entry: entry(&weights.manifest.key.model),
        bytes: 1024,
        set: Vec::new(),
    };
    assert_eq!(ask(&connection, &announce), Reply::Done);
    let reply = weights.offer(&connection);
    assert!(matches!(reply, Reply::Accepted { .. }), "{reply:?}");
}

#[test]
fn serve_status_unload_and_stop_do_as_they_say() {
    let temp = tempfile::tempdir().unwrap();
    let folder = temp.path();
    for command in [&["status"][..], &["unload", "m"], &["stop"]] {
        let output = run(folder, command);
        assert_eq!(output.status.code(), Some(3), "{}", said(&output));
        assert!(said(&output).contains("candle-cache serve"));
    }
    let mut server = Server::serve(folder);
    let socket = folder.join("daemon.sock");
    assert!(said(&run(folder, &["status"])).contains("no entries"));
    publish(&socket, &Weights::new("m", 1));
    let attached = attach(&socket, "m").unwrap();

    let table = said(&run(folder, &["status"]));
    assert!(
        table.contains("NAME") && table.contains("1.0 KiB"),
        "{table}"
    );
    let json = run(folder, &["status", "--json"]).stdout;
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    let ready = &json["entries"][0]["ready"];
    assert_eq!(json["entries"][0]["name"], "m");
    assert_eq!(ready["memory_bytes"], 1024);
    assert_eq!(ready["leases"], 1);
    assert_eq!(ready["holders"][0], std::process::id());
    assert_eq!(ready["epoch"], attached.epoch.to_string());

    let refused = run(folder, &["unload", "m", "--json"]);
    assert_eq!(refused.status.code(), Some(4));
    let json: serde_json::Value = serde_json::from_slice(&refused.stdout).unwrap();
    assert_eq!(json["refusal"], "InUse");
    assert_eq!(run(folder, &["unload", "n"]).status.code(), Some(4));
    let unloaded = run(folder, &["unload", "m", "--force", "--device", "host"]);
    assert_eq!(unloaded.status.code(), Some(0), "{}", said(&unloaded));

    let stopped = run(folder, &["stop"]);
    assert_eq!(stopped.status.code(), Some(0), "{}", said(&stopped));
    assert_eq!(std::fs::read_dir(folder).unwrap().count(), 0);
    assert_eq!(server.0.wait().unwrap().code(), Some(0));
}

#[test]
fn a_wrong_command_line_is_a_usage_error() {
    let temp = tempfile::tempdir().unwrap();
    for args in [
        &["unload"][..],
        &["fly"],
        &["unload", "m", "--device", "tpu"],
        &["serve", "--allow-uid", "65534"],
    ] {
        assert_eq!(run(temp.path(), args).status.code(), Some(2), "{args:?}");
    }
}

#[test]
fn signals_drain_and_leave_nothing_behind() {
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let temp = tempfile::tempdir().unwrap();
        let mut server = Server::serve(temp.path());
        let socket = temp.path().join("daemon.sock");
        publish(&socket, &Weights::new("m", 1));
        let _attached = attach(&socket, "m").unwrap();
        assert_eq!(server.signal(signal), Some(0));
        assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 0);
    }
}

#[test]
fn a_derived_folder_goes_with_its_daemon() {
    let temp = tempfile::tempdir().unwrap();
    let mut command = program(temp.path());
    command
        .arg("serve")
        .env_remove("CANDLE_CACHE_SOCKET_DIR")
        .env_remove("XDG_RUNTIME_DIR")
        .env("TMPDIR", temp.path())
        .stderr(Stdio::null());
    let mut server = Server::start(command);
    assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 1);
    assert_eq!(server.signal(Signal::TERM), Some(0));
    assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 0);
}

#[test]
fn a_stale_socket_is_replaced_after_a_kill() {
    let temp = tempfile::tempdir().unwrap();
    for _ in 0..3 {
        let mut server = Server::serve(temp.path());
        publish(&temp.path().join("daemon.sock"), &Weights::new("m", 1));
        server.signal(Signal::KILL);
        assert!(temp.path().join("daemon.sock").exists());
    }
    // Also one that another program left, and no lock beside it.
    let socket = temp.path().join("daemon.sock");
    std::fs::remove_file(&socket).unwrap();
    std::fs::remove_file(temp.path().join("daemon.lock")).unwrap();
    drop(UnixDatagram::bind(&socket).unwrap());
    Server::serve(temp.path());
}

#[test]
fn of_two_starters_exactly_one_serves_and_the_other_says_who() {
    for _ in 0..50 {
        let temp = tempfile::tempdir().unwrap();
        let start = || {
            let mut command = program(temp.path());
            command
                .arg("serve")
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            Server(command.spawn().unwrap())
        };
        let mut starters = [start(), start()];
        let listens: Vec<bool> = starters
            .iter_mut()
            .map(|child| {
                let mut line = String::new();
                let mut out = BufReader::new(child.0.stdout.as_mut().unwrap());
                out.read_line(&mut line).unwrap();
                line.starts_with("listening")
            })
            .collect();
        assert_eq!(listens.iter().filter(|l| **l).count(), 1);
        starters.rotate_left(usize::from(listens[1]));
        let [winner, loser] = &mut starters;
        let mut lost = String::new();
        let mut stderr = loser.0.stderr.take().unwrap();
        stderr.read_to_string(&mut lost).unwrap();
        assert_eq!(loser.0.wait().unwrap().code(), Some(4), "{lost}");
        let who = format!("process {} of uid", winner.0.id());
        assert!(lost.contains(&who), "{lost}");
        assert_eq!(run(temp.path(), &["status"]).status.code(), Some(0));
    }
}

#[test]
fn what_is_not_ours_is_never_removed() {
    type Make = fn(&Path);
    let rows: [(Make, &str); 3] = [
        (|path| std::fs::write(path, "mine").unwrap(), "is a file"),
        (
            |path| std::fs::create_dir(path).unwrap(),
            "is a folder, and is not removed: Docker",
        ),
        (
            |path| symlink(path.with_extension("elsewhere"), path).unwrap(),
            "is a link",
        ),
    ];
    for (make, wanted) in rows {
        let temp = tempfile::tempdir().unwrap();
        let socket = temp.path().join("daemon.sock");
        make(&socket);
        let output = run(temp.path(), &["serve"]);
        assert_eq!(output.status.code(), Some(5));
        assert!(said(&output).contains(wanted), "{}", said(&output));
        socket.symlink_metadata().unwrap();
        // The lock is gone again, so nothing but the thing itself is left.
        assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 1);
    }
}

#[test]
fn another_programs_socket_is_left_alone() {
    let temp = tempfile::tempdir().unwrap();
    let socket = temp.path().join("daemon.sock");
    let theirs = UnixListener::bind(&socket).unwrap();
    let output = run(temp.path(), &["serve"]);
    assert_eq!(output.status.code(), Some(5));
    assert!(
        said(&output).contains("another program's socket"),
        "{}",
        said(&output)
    );
    let kind = socket.symlink_metadata().unwrap().file_type();
    assert!(kind.is_socket());
    let asked = run(temp.path(), &["status"]);
    assert_eq!(asked.status.code(), Some(5), "{}", said(&asked));
    drop(theirs);
}

#[test]
fn a_socket_that_was_replaced_is_not_removed_at_the_end() {
    let temp = tempfile::tempdir().unwrap();
    let socket = temp.path().join("daemon.sock");
    let listener = Listener::bind(&socket).unwrap();
    std::fs::remove_file(&socket).unwrap();
    let theirs = UnixListener::bind(&socket).unwrap();
    drop(listener);
    assert!(socket.exists());
    drop(theirs);
}

#[test]
fn a_folder_that_is_gone_does_not_trouble_a_daemon_that_ends() {
    let temp = tempfile::tempdir().unwrap();
    let mut server = Server::serve(temp.path());
    temp.close().unwrap();
    assert_eq!(server.signal(Signal::TERM), Some(0));
}

/// The kernel counts descriptors under way for the user that sent them, against the sender's limit;
/// root has none.
#[test]
fn descriptors_that_nobody_takes_are_a_typed_refusal_and_pass() {
    if rustix::process::geteuid().as_raw() != 0 {
        println!("skipped: needs root, to start a daemon as another user");
        return;
    }
    let temp = tempfile::tempdir().unwrap();
    let folder = temp.path().join("theirs");
    std::fs::create_dir(&folder).unwrap();
    chown(&folder, Some(54322), None).unwrap();
    chown(temp.path(), Some(54322), None).unwrap();
    let mut command = Command::new("prlimit");
    command
        .arg("--nofile=400:400")
        .args(["setpriv", "--reuid=54322", "--clear-groups"])
        .arg(env!("CARGO_BIN_EXE_candle-cache"))
        .args(["serve", "--allow-uid=0"]);
    with_folder(&mut command, &folder);
    let Some(_server) = Server::try_start(command) else {
        println!("skipped: another user cannot start this program");
        return;
    };
    let socket = folder.join("daemon.sock");
    publish(&socket, &Weights::with_slabs("m", 1, 40));
    let peers: Vec<_> = (0..20)
        .map(|_| {
            let peer = Connection::connect(&socket, PATIENCE).unwrap();
            let request = attach_request("m", Duration::ZERO);
            peer.send(&request, &[], PATIENCE).unwrap();
            peer
        })
        .collect();
    // By then as many are under way as may be.
    std::thread::sleep(Duration::from_millis(500));
    let (code, reason) = attach(&socket, "m").unwrap_err();
    assert_eq!(code, Refusal::Busy);
    assert!(reason.contains("on their way"), "{reason}");
    let small = Connection::connect(&socket, PATIENCE).unwrap();
    let status = ask(&small, &Request::Status { after: None });
    assert!(matches!(status, Reply::Status { .. }));
    // They read at last, those that were served in whichever order: what they got is whole.
    let served = |peer: Connection| match peer.receive(PATIENCE).unwrap() {
        (Reply::Attached { .. }, fds) => Some(fds.len()),
        (
            Reply::Refused {
                code: Refusal::Busy,
                ..
            },
            _,
        ) => None,
        (other, _) => panic!("{other:?}"),
    };
    let served: Vec<usize> = peers.into_iter().filter_map(served).collect();
    assert!(
        !served.is_empty() && served.iter().all(|fds| *fds == 41),
        "{served:?}"
    );
    eventually("there is room again", || attach(&socket, "m").is_ok());
}
