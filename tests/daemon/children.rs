//! Bodies of child processes: this very test program, started again for one of these.
//! Without a socket in the environment they have nothing to do.

use std::io::{BufRead, BufReader, Read};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use candle_ipc_cache::protocol::{Reply, Request};
use candle_ipc_cache::socket::{Connection, SocketError, raise_descriptor_limit};

use crate::support::{PATIENCE, ask, attach, attach_request, entry};

const SOCKET: &str = "CANDLE_TEST_SOCKET";

/// The command that runs `body` in a process of its own.
pub fn command(body: &str, socket: &Path) -> Command {
    wrapped(&["env"], body, socket)
}

/// The same, started by another program such as `prlimit`.
pub fn wrapped(wrapper: &[&str], body: &str, socket: &Path) -> Command {
    let mut command = Command::new(wrapper[0]);
    command
        .args(&wrapper[1..])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", &format!("children::{body}")])
        .args(["--ignored", "--nocapture", "--test-threads=1"])
        .env(SOCKET, socket)
        .stdin(Stdio::piped());
    command
}

/// Starts a child, and waits until it has said `word`.
pub fn started(mut command: Command, word: &str) -> Child {
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    assert!(
        lines.any(|line| line.unwrap().contains(word)),
        "the child did not say `{word}`"
    );
    child
}

fn socket() -> Option<PathBuf> {
    std::env::var_os(SOCKET).map(PathBuf::from)
}

fn wait_for_parent() {
    let _ = std::io::stdin().read(&mut [0]);
}

#[test]
#[ignore = "a child process of other tests"]
fn attaches() {
    let Some(socket) = socket() else { return };
    let _attached = attach(&socket, "m").unwrap();
    println!("attached");
    wait_for_parent();
}

#[test]
#[ignore = "a child process of other tests"]
// The whole point is that it outlives its parent.
#[expect(clippy::zombie_processes)]
fn attaches_and_leaves_the_socket_to_its_own_child() {
    let Some(socket) = socket() else { return };
    let attached = attach(&socket, "m").unwrap();
    let inherited = rustix::io::FdFlags::empty();
    rustix::io::fcntl_setfd(&attached.connection, inherited).unwrap();
    let child = Command::new("sleep").arg("600").spawn().unwrap();
    println!("attached, left to {} .", child.id());
    wait_for_parent();
}

#[test]
#[ignore = "a child process of other tests"]
fn attaches_with_few_descriptors() {
    let Some(socket) = socket() else { return };
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = open();
    for _ in 0..3 {
        let connection = Connection::connect(&socket, PATIENCE).unwrap();
        let request = attach_request("m", Duration::ZERO);
        connection.send(&request, &[], PATIENCE).unwrap();
        let lost = connection.receive::<Reply>(PATIENCE).unwrap_err();
        assert!(
            matches!(lost, SocketError::DescriptorsLost { limit: 24, .. }),
            "{lost}"
        );
        assert!(lost.to_string().contains("ulimit -n"), "{lost}");
    }
    assert_eq!(open(), before);
    raise_descriptor_limit();
    assert_eq!(attach(&socket, "m").unwrap().fds.len(), 41);
}

#[test]
#[ignore = "a child process of other tests"]
fn announces_and_waits() {
    let Some(socket) = socket() else { return };
    let connection = Connection::connect(&socket, PATIENCE).unwrap();
    let announce = Request::Announce {
        entry: entry("m"),
        bytes: 12345,
        set: Vec::new(),
    };
    assert_eq!(ask(&connection, &announce), Reply::Done);
    println!("announced");
    wait_for_parent();
    // A worker of the daemon has no parent to wait for.
    let _ = connection.receive::<Reply>(PATIENCE * 20);
}

#[test]
#[ignore = "a child process of other tests"]
fn asks_for_the_status() {
    let Some(socket) = socket() else { return };
    let connection = Connection::connect(&socket, PATIENCE).unwrap();
    println!("{:?}", ask(&connection, &Request::Status { after: None }));
}

#[test]
#[ignore = "a child process of other tests"]
fn attaches_where_it_does_not_see_the_daemon() {
    let Some(socket) = socket() else { return };
    let attached = attach(&socket, "m").unwrap();
    let peer = candle_ipc_cache::socket::Peer::of(attached.connection.as_fd()).unwrap();
    println!("attached, the daemon is process {} .", peer.pid);
}

#[test]
fn a_lease_ends_with_its_process_though_a_forked_child_keeps_the_socket() {
    use crate::support::{Daemon, eventually, quick};
    let daemon = Daemon::start(quick());
    daemon.publish("m", 1);
    let body = "attaches_and_leaves_the_socket_to_its_own_child";
    let mut engine = command(body, &daemon.socket)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let heir: i32 = BufReader::new(engine.stdout.take().unwrap())
        .lines()
        .find_map(|line| {
            let line = line.unwrap();
            let (_, pid) = line.split_once("left to ")?;
            pid.trim_end_matches(" .").parse().ok()
        })
        .unwrap();
    eventually("the lease counts", || daemon.leases("m") == 1);
    drop(engine.stdin.take());
    engine.wait().unwrap();
    eventually("the lease has ended", || daemon.leases("m") == 0);
    let heir = rustix::process::Pid::from_raw(heir).unwrap();
    // It was alive all the time: only a living process takes the signal.
    rustix::process::kill_process(heir, rustix::process::Signal::KILL).unwrap();
}

#[test]
fn a_killed_engine_has_no_lease() {
    use crate::support::{Daemon, eventually, quick};
    let daemon = Daemon::start(quick());
    daemon.publish("m", 1);
    let mut engine = started(command("attaches", &daemon.socket), "attached");
    eventually("the lease counts", || daemon.leases("m") == 1);
    engine.kill().unwrap();
    engine.wait().unwrap();
    eventually("the lease has ended", || daemon.leases("m") == 0);
}

#[test]
fn a_killed_worker_marks_its_entry_as_failed() {
    use crate::support::{Daemon, eventually, quick};
    let daemon = Daemon::start(quick());
    let mut worker = started(command("announces_and_waits", &daemon.socket), "announced");
    worker.kill().unwrap();
    worker.wait().unwrap();
    eventually("the entry says so", || {
        daemon.failed("m").is_some_and(|reason| {
            reason.contains(&format!("process {}", worker.id())) && reason.contains("ended before")
        })
    });
    daemon.publish("m", 1);
}
