//! Where the socket lives: derived, refused or passed over, each with its sentence. And who may connect.
//! Rows that need another user run as root only, and say so elsewhere.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use candle_ipc_cache::daemon::{Config, Listener};
use candle_ipc_cache::protocol::{Refusal, Reply, Request};
use candle_ipc_cache::socket::folder::{NOBODY, Resolved, Surroundings, peer_allowed};
use candle_ipc_cache::socket::{Connection, Peer};

use crate::children;
use crate::support::{Daemon, ask, eventually, quick};

/// A user that exists nowhere.
const OTHER: u32 = 54321;
const SETPRIV: [&str; 2] = ["--reuid=54321", "--clear-groups"];

fn uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn is_root() -> bool {
    if uid() != 0 {
        println!("skipped: needs root");
    }
    uid() == 0
}

fn reachable_by_other(program: &Path) -> bool {
    let reaches = Command::new("setpriv")
        .args(SETPRIV)
        .args(["test", "-x"])
        .arg(program)
        .status()
        .is_ok_and(|status| status.success());
    if !reaches {
        println!("skipped: another user cannot reach {}", program.display());
    }
    reaches
}

fn chmod(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// A folder for temporary files with a runtime folder in it.
struct Place {
    temp: tempfile::TempDir,
    surroundings: Surroundings,
}

impl Place {
    fn new() -> Self {
        let temp = tempfile::tempdir().unwrap();
        let runtime = temp.path().join("run");
        std::fs::create_dir(&runtime).unwrap();
        chmod(&runtime, 0o700);
        let surroundings = Surroundings {
            socket_dir: None,
            runtime_dir: Some(runtime),
            temp_dir: temp.path().to_path_buf(),
            uid: uid(),
        };
        Self { temp, surroundings }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.temp.path().join(name)
    }

    fn in_runtime(&self) -> PathBuf {
        self.path("run/candle-ipc-cache")
    }

    fn in_temp(&self) -> PathBuf {
        self.path(&format!("candle-ipc-cache-{}", uid()))
    }

    fn daemon(&self, explicit: Option<&Path>) -> Result<Resolved, String> {
        self.surroundings
            .for_daemon(explicit)
            .map_err(|e| e.to_string())
    }

    fn engine(&self, explicit: Option<&Path>) -> Result<Vec<PathBuf>, String> {
        self.surroundings
            .for_engine(explicit, &[])
            .map_err(|e| e.to_string())
    }

    /// Both sides refuse, with all of these words.
    fn refused(&self, explicit: Option<&Path>, words: &[&str]) {
        let errors = [
            self.daemon(explicit).unwrap_err(),
            self.engine(explicit).unwrap_err(),
        ];
        for error in errors {
            for word in words {
                assert!(error.contains(word), "`{word}` is missing in: {error}");
            }
        }
    }
}

#[test]
fn a_daemon_lives_in_the_runtime_folder_and_engines_look_there_first() {
    let place = Place::new();
    let resolved = place.daemon(None).unwrap();
    assert_eq!(resolved.folder, place.in_runtime());
    assert!(resolved.derived && resolved.notes.is_empty());
    let mode = std::fs::metadata(&resolved.folder)
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o700);
    let sockets = [place.in_runtime(), place.in_temp()].map(|f| f.join("daemon.sock"));
    assert_eq!(place.engine(None).unwrap(), sockets);
}

#[test]
fn a_runtime_folder_that_cannot_be_used_is_passed_over_with_a_note() {
    let rows = [
        (None, "is not set"),
        (Some(""), "is empty"),
        (Some("run/user"), "not an absolute path"),
        (Some("/no/such/folder"), "does not exist"),
    ];
    for (runtime, note) in rows {
        let mut place = Place::new();
        place.surroundings.runtime_dir = runtime.map(PathBuf::from);
        let resolved = place.daemon(None).unwrap();
        assert_eq!(resolved.folder, place.in_temp());
        assert!(resolved.notes[0].contains(note), "{:?}", resolved.notes);
        let sockets = [place.in_temp().join("daemon.sock")];
        assert_eq!(place.engine(None).unwrap(), sockets);
    }
}

#[test]
fn a_runtime_folder_without_write_permission_is_passed_over_with_a_note() {
    let place = Place::new();
    chmod(&place.path("run"), 0o500);
    let program = env!("CARGO_BIN_EXE_candle-cache");
    let mut command = Command::new("env");
    // Root may write everywhere.
    if uid() == 0 {
        chown(place.path("run"), Some(OTHER), None).unwrap();
        chown(place.temp.path(), Some(OTHER), None).unwrap();
        if !reachable_by_other(Path::new(program)) {
            return;
        }
        command = Command::new("setpriv");
        command.args(SETPRIV);
    }
    command
        .args([program, "serve"])
        .env("XDG_RUNTIME_DIR", place.path("run"))
        .env("TMPDIR", place.temp.path())
        .env_remove("CANDLE_CACHE_SOCKET_DIR")
        .env_remove("CANDLE_CACHE_LOG")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut daemon = command.spawn().unwrap();
    let mut listening = String::new();
    let mut out = BufReader::new(daemon.stdout.take().unwrap());
    out.read_line(&mut listening).unwrap();
    daemon.kill().unwrap();
    let output = daemon.wait_with_output().unwrap();
    let user = if uid() == 0 { OTHER } else { uid() };
    let wanted = format!("/candle-ipc-cache-{user}/daemon.sock");
    assert!(listening.contains(&wanted), "{listening}");
    let notes = String::from_utf8(output.stderr).unwrap();
    assert!(notes.contains("creating the folder"), "{notes}");
}

#[test]
fn an_explicit_folder_wins_is_created_and_stays() {
    let mut place = Place::new();
    let (flag, variable) = (place.path("flag"), place.path("variable"));
    place.surroundings.socket_dir = Some(variable.clone());
    assert_eq!(place.daemon(None).unwrap().folder, variable);
    let resolved = place.daemon(Some(&flag)).unwrap();
    assert!(flag.is_dir() && !resolved.derived);
    let sockets = [flag.join("daemon.sock")];
    assert_eq!(place.engine(Some(&flag)).unwrap(), sockets);
    place.surroundings.socket_dir = Some("".into());
    assert_eq!(place.daemon(None).unwrap().folder, place.in_runtime());
    let lost = place.daemon(Some(&place.path("no/such"))).unwrap_err();
    assert!(lost.contains("no/such") && lost.contains("--socket-dir"));
}

#[test]
fn folders_with_open_permissions_are_refused() {
    let place = Place::new();
    let folder = place.path("folder");
    std::fs::create_dir(&folder).unwrap();
    for mode in [0o777, 0o770, 0o702, 0o1777] {
        chmod(&folder, mode);
        let found = format!("mode {mode:04o}");
        let owner = format!("owner uid {}", uid());
        place.refused(
            Some(&folder),
            &[&found, &owner, "0755 or stricter", "chmod"],
        );
    }
    chmod(&folder, 0o755);
    place.daemon(Some(&folder)).unwrap();
    place.engine(Some(&folder)).unwrap();

    place.daemon(None).unwrap();
    chmod(&place.in_runtime(), 0o750);
    place.refused(None, &["mode 0750", "0700", "chmod 700"]);
    chmod(&place.in_runtime(), 0o700);
    chmod(&place.path("run"), 0o755);
    place.refused(None, &["mode 0755", "0700", "chmod 700"]);
}

#[test]
fn a_link_or_a_file_in_place_of_a_folder_is_refused() {
    let mut place = Place::new();
    let (real, link) = (place.path("real"), place.path("link"));
    std::fs::create_dir(&real).unwrap();
    symlink(&real, &link).unwrap();
    let slash = PathBuf::from(format!("{}/", link.display()));
    for path in [&link, &slash, &link.join(".")] {
        place.refused(Some(path), &["link is a link"]);
    }
    let file = place.path("file");
    std::fs::write(&file, "mine").unwrap();
    place.refused(Some(&file), &["file is a file"]);
    symlink(&real, place.in_runtime()).unwrap();
    place.refused(None, &["candle-ipc-cache is a link"]);
    place.surroundings.runtime_dir = Some(link);
    place.refused(None, &["link is a link"]);
    assert_eq!(std::fs::read_dir(real).unwrap().count(), 0);
}

#[test]
fn a_path_over_the_limit_is_told_with_its_length() {
    let mut place = Place::new();
    let folder_of = |length: usize| {
        let base = place.temp.path().as_os_str().len() + 1 + "/daemon.sock".len();
        place.path(&"a".repeat(length - base))
    };
    let (fits, long) = (folder_of(107), folder_of(108));
    let resolved = place.daemon(Some(&fits)).unwrap();
    drop(Listener::bind(&resolved.socket).unwrap());
    place.refused(Some(&long), &["108 bytes", "107", "shorter", "aaaa"]);
    place.surroundings.runtime_dir = Some(place.path(&"b".repeat(100)));
    place.refused(None, &["bytes, the limit is 107", "bbbb"]);
}

#[test]
fn folders_of_another_user_are_refused() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let folder = place.path("theirs");
    std::fs::create_dir(&folder).unwrap();
    chown(&folder, Some(OTHER), None).unwrap();
    let words = ["owner uid 54321", "owner uid 0", "mode 0755"];
    place.refused(Some(&folder), &words);
    // An engine that was told to trust that user goes there.
    let engine = place.surroundings.for_engine(Some(&folder), &[OTHER]);
    assert_eq!(engine.unwrap(), [folder.join("daemon.sock")]);
    // As after su, or sudo -E.
    chown(place.path("run"), Some(OTHER), None).unwrap();
    place.refused(None, &["owner uid 54321", "sudo -E", "unset it"]);
}

#[test]
fn a_folder_that_somebody_else_made_first_does_not_keep_engines_from_their_own() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    std::fs::create_dir(place.in_temp()).unwrap();
    chown(place.in_temp(), Some(OTHER), None).unwrap();
    // Nothing comes before it: then it is said.
    assert!(place.engine(None).unwrap_err().contains("uid 54321"));
    let resolved = place.daemon(None).unwrap();
    assert_eq!(place.engine(None).unwrap(), [resolved.socket]);
}

#[test]
fn the_overflow_user_is_nobody() {
    let mut place = Place::new();
    place.surroundings.uid = NOBODY;
    place.refused(None, &["65534", "user namespace", "--map-root-user"]);
    let peer = |uid| Peer {
        pid: 1,
        uid,
        gid: 0,
    };
    let socket = Path::new("/run/daemon.sock");
    let refused = peer_allowed(&peer(NOBODY), &[NOBODY], socket).unwrap_err();
    assert!(refused.to_string().contains("65534"));
    peer_allowed(&peer(uid()), &[], socket).unwrap();
    peer_allowed(&peer(OTHER), &[OTHER], socket).unwrap();
    let refused = peer_allowed(&peer(OTHER), &[], socket).unwrap_err();
    let refused = refused.to_string();
    let ours = format!("uid {}", uid());
    for word in ["uid 54321", &ours, "--allow-uid 54321"] {
        assert!(refused.contains(word), "{refused}");
    }
}

#[test]
fn a_folder_owned_by_nobody_is_refused() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let folder = place.path("theirs");
    std::fs::create_dir(&folder).unwrap();
    chown(&folder, Some(NOBODY), None).unwrap();
    place.refused(Some(&folder), &["65534", "anybody"]);
}

/// Runs a child as another user, which needs to reach this program and the socket.
fn status_as_other(daemon: &Daemon) -> Option<String> {
    chmod(daemon.folder.path(), 0o711);
    if !reachable_by_other(&std::env::current_exe().unwrap()) {
        return None;
    }
    let setpriv = ["setpriv", SETPRIV[0], SETPRIV[1]];
    let child = children::wrapped(&setpriv, "asks_for_the_status", &daemon.socket).output();
    let child = child.unwrap();
    assert!(child.status.success());
    Some(String::from_utf8(child.stdout).unwrap())
}

#[test]
fn another_user_is_refused_with_both_uids_unless_allowed() {
    if !is_root() {
        return;
    }
    let open = |listener: &Listener| listener.open_to_others().unwrap();
    let daemon = Daemon::start_with(quick(), open);
    let Some(said) = status_as_other(&daemon) else {
        return;
    };
    let code = format!("{:?}", Refusal::NotAllowed);
    for word in [&code, "uid 54321", "uid 0", "--allow-uid 54321"] {
        assert!(said.contains(word), "{said}");
    }
    let config = Config {
        allow_uids: vec![OTHER],
        ..quick()
    };
    let daemon = Daemon::start_with(config, open);
    assert!(status_as_other(&daemon).unwrap().contains("Status {"));
}

#[test]
fn a_socket_is_for_its_own_user_alone() {
    let daemon = Daemon::start(quick());
    let mode = std::fs::metadata(&daemon.socket)
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
}

/// Whether this machine lets us make such namespaces.
fn may(unshare: &[&str]) -> bool {
    let works = Command::new(unshare[0])
        .args(&unshare[1..])
        .arg("true")
        .status()
        .is_ok_and(|status| status.success());
    if !works {
        println!("skipped: `{}` is not permitted", unshare.join(" "));
    }
    works
}

#[test]
fn an_engine_in_a_user_namespace_attaches_as_the_user_that_it_is_outside() {
    let unshare = ["unshare", "--user", "--map-root-user"];
    if !may(&unshare) {
        return;
    }
    let daemon = Daemon::start(quick());
    let child = children::wrapped(&unshare, "asks_for_the_status", &daemon.socket).output();
    let said = String::from_utf8(child.unwrap().stdout).unwrap();
    assert!(said.contains("Status {"), "{said}");
}

#[test]
fn a_process_without_a_number_in_its_user_namespace_is_refused() {
    let unshare = ["unshare", "--user"];
    if !may(&unshare) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for command in ["serve", "status"] {
        let output = Command::new(unshare[0])
            .args(&unshare[1..])
            .arg(env!("CARGO_BIN_EXE_candle-cache"))
            .arg(command)
            .arg("--socket-dir")
            .arg(folder.path())
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(5));
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("65534"), "{said}");
    }
}

#[test]
fn an_engine_that_cannot_see_the_daemons_process_attaches() {
    let unshare = ["unshare", "--pid", "--fork", "--mount-proc"];
    if !may(&unshare) {
        return;
    }
    let daemon = Daemon::start(quick());
    daemon.publish("m", 1);
    let body = "attaches_where_it_does_not_see_the_daemon";
    let child = children::wrapped(&unshare, body, &daemon.socket).output();
    let said = String::from_utf8(child.unwrap().stdout).unwrap();
    assert!(said.contains("the daemon is process 0 ."), "{said}");
    eventually("the lease has ended", || daemon.leases("m") == 0);
}

#[test]
fn a_socket_that_was_mounted_is_dead_after_a_restart_and_the_folder_is_not() {
    let daemon = Daemon::start(quick());
    // A hard link keeps the old inode, as a mounted file does.
    let mounted = daemon.folder.path().join("mounted.sock");
    std::fs::hard_link(&daemon.socket, &mounted).unwrap();
    let status = Request::Status { after: None };
    let connect = |path: &Path| Connection::connect(path, Duration::from_secs(5));
    assert!(matches!(
        ask(&connect(&mounted).unwrap(), &status),
        Reply::Status { .. }
    ));
    let path = daemon.socket.clone();
    let folder = daemon.stop();
    let _again = Listener::bind(&path).unwrap();
    let refused = connect(&mounted).unwrap_err().to_string();
    assert!(refused.contains("nobody listens"), "{refused}");
    connect(&path).unwrap();
    drop(folder);
}
