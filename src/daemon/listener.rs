//! The listening socket: exactly one daemon a folder, and nothing left behind.
//! What cannot be ours is never removed.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::DaemonError;
use crate::socket::folder::{address, describe};
use crate::socket::{Connection, Peer, SocketError};

const LOCK: &str = "daemon.lock";
const BACKLOG: i32 = 4096;
const PROBE: Duration = Duration::from_secs(1);
const RETRY: Duration = Duration::from_millis(20);

/// A socket that listens, and the lock that says so. Dropping it removes both files.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    path: PathBuf,
    /// Device and inode of the socket file that is ours.
    file: (u64, u64),
    folder: Option<PathBuf>,
    lock: Option<Lock>,
}

impl Listener {
    /// Listens at `path`, for this user alone. The folder must exist and be trusted:
    /// see [`crate::socket::folder::for_daemon`]. A socket that nobody listens on is replaced.
    ///
    /// # Errors
    /// When another daemon serves there, or something else is in the way.
    pub fn bind(path: &Path) -> Result<Self, DaemonError> {
        let address = address(path)?;
        let lock = Lock::take(path)?;
        clear(path)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map_err(|e| DaemonError::system("creating a socket", e))?;
        // The file gets the socket's own mode, so it is never open to others, not even for a moment.
        rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR)
            .map_err(|e| DaemonError::system("restricting the socket", e))?;
        rustix::net::bind(&fd, &address)
            .map_err(|e| DaemonError::system(format!("binding {}", path.display()), e))?;
        let stat = rustix::fs::lstat(path)
            .map_err(|e| DaemonError::system(format!("examining {}", path.display()), e))?;
        let listener = Self {
            fd,
            path: path.to_path_buf(),
            file: (stat.st_dev, stat.st_ino),
            folder: None,
            lock: Some(lock),
        };
        rustix::net::listen(&listener.fd, BACKLOG)
            .map_err(|e| DaemonError::system(format!("listening on {}", path.display()), e))?;
        Ok(listener)
    }

    /// Lets other users connect. Who may stay is decided by their credentials.
    ///
    /// # Errors
    /// When the socket's mode cannot be changed.
    pub fn open_to_others(&self) -> Result<(), DaemonError> {
        rustix::fs::chmod(&self.path, Mode::from_raw_mode(0o666))
            .map_err(|e| DaemonError::system(format!("opening {}", self.path.display()), e))
    }

    /// Removes the socket's folder too in the end, if it is empty then.
    pub fn remove_folder(&mut self) {
        self.folder = self.path.parent().map(Path::to_path_buf);
    }

    /// The socket's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn duplicate(&self) -> std::io::Result<OwnedFd> {
        self.fd.try_clone()
    }

    pub(super) fn accept(&self) -> Result<OwnedFd, Errno> {
        rustix::net::accept_with(&self.fd, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let ours =
            rustix::fs::lstat(&self.path).is_ok_and(|stat| (stat.st_dev, stat.st_ino) == self.file);
        if ours && let Err(e) = rustix::fs::unlink(&self.path) {
            tracing::warn!("removing {}: {e}", self.path.display());
        }
        // Before the folder, which must be empty to go.
        self.lock = None;
        if let Some(folder) = &self.folder {
            match rustix::fs::rmdir(folder) {
                Ok(()) | Err(Errno::NOTEMPTY | Errno::NOENT) => {}
                Err(e) => tracing::warn!("removing {}: {e}", folder.display()),
            }
        }
    }
}

/// Makes the path free, or says what is in the way. The caller holds the lock.
fn clear(path: &Path) -> Result<(), DaemonError> {
    let kind = match rustix::fs::lstat(path) {
        Ok(stat) => FileType::from_raw_mode(stat.st_mode),
        Err(Errno::NOENT) => return Ok(()),
        Err(e) => {
            return Err(DaemonError::system(
                format!("examining {}", path.display()),
                e,
            ));
        }
    };
    let occupied = |what, way_out| DaemonError::Occupied {
        path: path.to_path_buf(),
        what,
        way_out,
    };
    if kind != FileType::Socket {
        let way_out = if kind == FileType::Directory {
            "Docker makes a folder where a mounted socket was missing; mount the socket's folder instead, and remove \
             this one (`rmdir`) while no container uses it"
        } else {
            "move it away, or choose another folder with --socket-dir"
        };
        return Err(occupied(describe(kind), way_out));
    }
    match Connection::connect(path, PROBE) {
        Ok(connection) => Err(served(path, Peer::of(&connection).ok())),
        Err(SocketError::Deadline(_)) => Err(served(path, None)),
        Err(SocketError::NobodyListens(_)) => rustix::fs::unlink(path)
            .or_else(|e| if e == Errno::NOENT { Ok(()) } else { Err(e) })
            .map_err(|e| {
                DaemonError::system(format!("removing the stale socket {}", path.display()), e)
            }),
        Err(SocketError::System { source, .. })
            if source.raw_os_error() == Some(Errno::PROTOTYPE.raw_os_error()) =>
        {
            Err(occupied(
                "another program's socket (not SOCK_SEQPACKET)",
                "stop that program, or choose another folder with --socket-dir",
            ))
        }
        Err(e) => Err(e.into()),
    }
}

fn served(path: &Path, peer: Option<Peer>) -> DaemonError {
    let who = match peer {
        Some(Peer { pid: 0, uid, .. }) => {
            format!("a process of uid {uid} that is not visible from here")
        }
        Some(Peer { pid, uid, .. }) => format!("process {pid} of uid {uid}"),
        None => "a process that does not answer".into(),
    };
    DaemonError::Served {
        path: path.to_path_buf(),
        who,
    }
}

/// A locked file beside the socket. The kernel gives the lock up when its holder dies, however it dies.
#[derive(Debug)]
struct Lock {
    path: PathBuf,
    _file: std::fs::File,
}

impl Lock {
    fn take(socket: &Path) -> Result<Self, DaemonError> {
        let path = socket.with_file_name(LOCK);
        let system = |e: Errno| DaemonError::system(format!("locking {}", path.display()), e);
        let end = Instant::now() + PROBE;
        loop {
            let flags = OFlags::RDWR
                | OFlags::CREATE
                | OFlags::CLOEXEC
                | OFlags::NOFOLLOW
                | OFlags::NONBLOCK;
            let fd = rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR).map_err(system)?;
            match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::INTR) => continue,
                Err(Errno::WOULDBLOCK) => {
                    if let Ok(peer) = Connection::connect(socket, PROBE).and_then(Peer::of) {
                        return Err(served(socket, Some(peer)));
                    }
                    // Locked, and nobody listens: its holder is about to listen, or about to end.
                    if Instant::now() >= end {
                        return Err(Self::holder(socket, &fd));
                    }
                    std::thread::sleep(RETRY);
                    continue;
                }
                Err(e) => return Err(system(e)),
            }
            // A daemon that was just stopping may have removed the file between the two calls: a
            // lock on a file without a name keeps nobody out.
            let ours = rustix::fs::fstat(&fd).map_err(system)?;
            let there = match rustix::fs::lstat(&path) {
                Ok(stat) => stat,
                Err(Errno::NOENT) => continue,
                Err(e) => return Err(system(e)),
            };
            if (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino) {
                let regular = FileType::from_raw_mode(ours.st_mode) == FileType::RegularFile;
                if !regular || ours.st_nlink != 1 || ours.st_size > 16 {
                    return Err(DaemonError::Occupied {
                        path,
                        what: "no lock of ours",
                        way_out: "move it away, or choose another folder with --socket-dir",
                    });
                }
                let mut file = std::fs::File::from(fd);
                // For the other starter's message only.
                let _ = file.set_len(0);
                let _ = write!(file, "{}", std::process::id());
                return Ok(Self { path, _file: file });
            }
        }
    }

    /// Who holds the lock, as its file says.
    fn holder(socket: &Path, fd: &OwnedFd) -> DaemonError {
        let mut text = [0; 16];
        let read = rustix::io::pread(fd, &mut text, 0).unwrap_or(0);
        let pid = std::str::from_utf8(&text[..read])
            .ok()
            .and_then(|text| text.parse().ok());
        let uid = rustix::fs::fstat(fd).map(|stat| stat.st_uid).ok();
        let peer = pid.zip(uid).map(|(pid, uid)| Peer { pid, uid, gid: 0 });
        served(socket, peer)
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // While the lock is still held: the next holder checks that its file has the name.
        if let Err(e) = rustix::fs::unlink(&self.path) {
            tracing::warn!("removing {}: {e}", self.path.display());
        }
    }
}
