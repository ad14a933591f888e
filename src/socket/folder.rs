//! Where the socket lives, and whether its folder is to be trusted.
//! Daemon and engine go through the same candidates, so that both come to the same path.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, FileType, Mode};
use rustix::io::Errno;
use rustix::net::SocketAddrUnix;

use super::{Peer, SocketError};

/// Name of the socket in its folder.
pub const SOCKET: &str = "daemon.sock";
/// Environment variable that names the folder.
pub const VARIABLE: &str = "CANDLE_CACHE_SOCKET_DIR";
/// The user id that stands for everybody who has no number in this user namespace.
pub const NOBODY: u32 = 65534;

const FOLDER: &str = "candle-ipc-cache";
const OTHER_FOLDER: &str = "choose another folder with --socket-dir or CANDLE_CACHE_SOCKET_DIR";

/// Why a folder or a socket cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FolderError {
    /// The path does not fit into a socket address.
    #[error("the socket's path {} has {length} bytes, the limit is {limit}: choose a shorter folder with --socket-dir or CANDLE_CACHE_SOCKET_DIR", path.display())]
    TooLong {
        /// The path.
        path: PathBuf,
        /// Its length in bytes.
        length: usize,
        /// The longest that fits.
        limit: usize,
    },
    /// The folder belongs to somebody else, or others may write or enter it.
    #[error(
        "{} has owner uid {owner} and mode {mode:04o}, wanted are owner uid {wanted_owner} and mode {wanted_mode}: {way_out}",
        path.display()
    )]
    Untrusted {
        /// The folder.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// Its permission bits.
        mode: u32,
        /// The owner that it must have.
        wanted_owner: u32,
        /// The permission bits that it must have.
        wanted_mode: &'static str,
        /// What to do.
        way_out: String,
    },
    /// Something else lies where the folder should be.
    #[error("{} is {what}, wanted is a folder: remove it, or {OTHER_FOLDER}", path.display())]
    NotAFolder {
        /// The path.
        path: PathBuf,
        /// What lies there.
        what: &'static str,
    },
    /// An owner without a number in this user namespace.
    #[error(
        "{what} reads as uid {NOBODY}, which stands for every user without a number in this user namespace, so it \
         could be anybody's: map the user into the namespace (`unshare --map-root-user`, `podman --userns=keep-id`) \
         or run as a user of its own"
    )]
    Unmapped {
        /// Whose uid it is.
        what: String,
    },
    /// No candidate can be used.
    #[error("no folder for the socket ({tried}): {OTHER_FOLDER}")]
    Nowhere {
        /// Every candidate, and why it was passed over.
        tried: String,
    },
    /// The system refused a call.
    #[error("{what}: {source}; or {OTHER_FOLDER}")]
    System {
        /// What was tried.
        what: String,
        /// The system's answer.
        source: std::io::Error,
    },
}

/// The folder that a daemon settled on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolved {
    /// The folder; it exists and has been checked.
    pub folder: PathBuf,
    /// The socket in it.
    pub socket: PathBuf,
    /// Whether the folder is ours alone, and goes when the daemon goes: nobody named it.
    pub derived: bool,
    /// Candidates that were passed over, and why.
    pub notes: Vec<String>,
}

/// What of a process's surroundings decides where the socket lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Surroundings {
    /// `CANDLE_CACHE_SOCKET_DIR`.
    pub socket_dir: Option<PathBuf>,
    /// `XDG_RUNTIME_DIR`.
    pub runtime_dir: Option<PathBuf>,
    /// The folder for temporary files.
    pub temp_dir: PathBuf,
    /// The effective user.
    pub uid: u32,
}

impl Surroundings {
    /// Those of this process.
    pub fn of_process() -> Self {
        let path = |name| std::env::var_os(name).map(PathBuf::from);
        let temp_dir = std::env::temp_dir();
        Self {
            socket_dir: path(VARIABLE),
            runtime_dir: path("XDG_RUNTIME_DIR"),
            temp_dir: if temp_dir.is_absolute() {
                temp_dir
            } else {
                "/tmp".into()
            },
            uid: rustix::process::geteuid().as_raw(),
        }
    }

    /// Finds the daemon's folder, and creates it where it is missing.
    ///
    /// # Errors
    /// When a candidate cannot be trusted, or none can be used.
    pub fn for_daemon(&self, explicit: Option<&Path>) -> Result<Resolved, FolderError> {
        let mut notes = Vec::new();
        for candidate in self.candidates(explicit, &[], &mut notes)? {
            match self.prepare(&candidate) {
                Ok(()) => {
                    return Ok(Resolved {
                        socket: candidate.socket(),
                        folder: candidate.folder,
                        derived: candidate.origin != Origin::Explicit,
                        notes,
                    });
                }
                Err(FolderError::System { what, source })
                    if candidate.origin != Origin::Explicit =>
                {
                    notes.push(format!("{what}: {source}"));
                }
                Err(e) => return Err(e),
            }
        }
        Err(FolderError::Nowhere {
            tried: notes.join("; "),
        })
    }

    /// The sockets to try, in order. `allow`: users besides one's own whose folders may be used.
    ///
    /// # Errors
    /// When a folder cannot be trusted, and none that comes before it exists.
    pub fn for_engine(
        &self,
        explicit: Option<&Path>,
        allow: &[u32],
    ) -> Result<Vec<PathBuf>, FolderError> {
        let mut notes = Vec::new();
        let mut sockets = Vec::new();
        let mut found = false;
        for candidate in self.candidates(explicit, allow, &mut notes)? {
            match self.check(&candidate.folder, candidate.origin, allow) {
                Ok(exists) => {
                    found |= exists;
                    sockets.push(candidate.socket());
                }
                Err(e) if found => tracing::warn!("{e}"),
                Err(e) => return Err(e),
            }
        }
        for note in notes {
            tracing::debug!("{note}");
        }
        Ok(sockets)
    }

    fn candidates(
        &self,
        explicit: Option<&Path>,
        allow: &[u32],
        notes: &mut Vec<String>,
    ) -> Result<Vec<Candidate>, FolderError> {
        if self.uid == NOBODY {
            return Err(FolderError::Unmapped {
                what: "this process".into(),
            });
        }
        let explicit = explicit.or(self.socket_dir.as_deref());
        let mut out = Vec::new();
        match explicit.filter(|path| !path.as_os_str().is_empty()) {
            Some(path) => out.push(Candidate::new(plain(path)?, Origin::Explicit)),
            None => {
                if let Some(folder) = self.runtime_folder(allow, notes)? {
                    out.push(Candidate::new(folder, Origin::Runtime));
                }
                let folder = self.temp_dir.join(format!("{FOLDER}-{}", self.uid));
                out.push(Candidate::new(plain(&folder)?, Origin::Temp));
            }
        }
        for candidate in &out {
            address(&candidate.socket())?;
        }
        Ok(out)
    }

    /// Our folder in `XDG_RUNTIME_DIR`, where that can be one at all.
    fn runtime_folder(
        &self,
        allow: &[u32],
        notes: &mut Vec<String>,
    ) -> Result<Option<PathBuf>, FolderError> {
        let mut pass_over = |why: String| {
            notes.push(why);
            Ok(None)
        };
        let Some(runtime) = &self.runtime_dir else {
            return pass_over("XDG_RUNTIME_DIR is not set".into());
        };
        if runtime.as_os_str().is_empty() {
            return pass_over("XDG_RUNTIME_DIR is empty".into());
        }
        if !runtime.is_absolute() {
            return pass_over(format!(
                "XDG_RUNTIME_DIR is `{}`, not an absolute path",
                runtime.display()
            ));
        }
        let runtime = plain(runtime)?;
        let folder = runtime.join(FOLDER);
        address(&folder.join(SOCKET))?;
        if self.check(&runtime, Origin::Runtime, allow)? {
            Ok(Some(folder))
        } else {
            pass_over(format!(
                "XDG_RUNTIME_DIR is {}, which does not exist",
                runtime.display()
            ))
        }
    }

    fn prepare(&self, candidate: &Candidate) -> Result<(), FolderError> {
        let folder = &candidate.folder;
        match rustix::fs::mkdir(folder, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => {
                return Err(FolderError::System {
                    what: format!("creating the folder {}", folder.display()),
                    source: e.into(),
                });
            }
        }
        if !self.check(folder, candidate.origin, &[])? {
            return Err(FolderError::System {
                what: format!("examining the folder {}", folder.display()),
                source: Errno::NOENT.into(),
            });
        }
        let access = Access::WRITE_OK | Access::EXEC_OK;
        rustix::fs::accessat(CWD, folder, access, AtFlags::EACCESS).map_err(|e| {
            FolderError::System {
                what: format!("writing to the folder {}", folder.display()),
                source: e.into(),
            }
        })
    }

    /// Whether the folder exists; an error where it exists and is not to be trusted.
    fn check(&self, path: &Path, origin: Origin, allow: &[u32]) -> Result<bool, FolderError> {
        // Never through a link: whoever owns the link could turn it elsewhere.
        let stat = match rustix::fs::lstat(path) {
            Ok(stat) => stat,
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(false),
            Err(e) => {
                return Err(FolderError::System {
                    what: format!("examining {}", path.display()),
                    source: e.into(),
                });
            }
        };
        let kind = FileType::from_raw_mode(stat.st_mode);
        if kind != FileType::Directory {
            return Err(FolderError::NotAFolder {
                path: path.to_path_buf(),
                what: describe(kind),
            });
        }
        if stat.st_uid == NOBODY {
            return Err(FolderError::Unmapped {
                what: format!("the owner of {}", path.display()),
            });
        }
        let mode = stat.st_mode & 0o7777;
        let foreign = stat.st_uid != self.uid && !allow.contains(&stat.st_uid);
        let lax = match origin {
            Origin::Explicit => mode & 0o022 != 0,
            Origin::Runtime | Origin::Temp => mode & 0o077 != 0,
        };
        if !foreign && !lax {
            return Ok(true);
        }
        let way_out = match (foreign, origin) {
            (true, Origin::Runtime) => format!(
                "XDG_RUNTIME_DIR leads into another user's folder, as it does after su or sudo -E: unset it, or \
                 {OTHER_FOLDER}"
            ),
            (true, _) => OTHER_FOLDER.into(),
            (false, Origin::Explicit) => {
                format!("`chmod go-w {}`, or {OTHER_FOLDER}", path.display())
            }
            (false, _) => format!("`chmod 700 {}`, or {OTHER_FOLDER}", path.display()),
        };
        Err(FolderError::Untrusted {
            path: path.to_path_buf(),
            owner: stat.st_uid,
            mode,
            wanted_owner: self.uid,
            wanted_mode: if origin == Origin::Explicit {
                "0755 or stricter"
            } else {
                "0700"
            },
            way_out,
        })
    }
}

/// Finds this process's folder for a daemon, and creates it where it is missing.
///
/// # Errors
/// When a candidate cannot be trusted, or none can be used.
pub fn for_daemon(explicit: Option<&Path>) -> Result<Resolved, FolderError> {
    Surroundings::of_process().for_daemon(explicit)
}

/// The sockets that this process should try, in order.
///
/// # Errors
/// When a folder cannot be trusted, and none that comes before it exists.
pub fn for_engine(explicit: Option<&Path>) -> Result<Vec<PathBuf>, FolderError> {
    for_engine_allowing(explicit, &[])
}

/// As [`for_engine`], and folders of the users in `allow` are trusted too.
///
/// # Errors
/// As [`for_engine`].
pub fn for_engine_allowing(
    explicit: Option<&Path>,
    allow: &[u32],
) -> Result<Vec<PathBuf>, FolderError> {
    Surroundings::of_process().for_engine(explicit, allow)
}

/// Whether this process may deal with `peer` on the socket at `path`: the same user, or one in
/// `allow`. The overflow user never: it could be anybody.
///
/// # Errors
/// [`SocketError::OtherUser`], or [`FolderError::Unmapped`] inside [`SocketError::Folder`].
pub fn peer_allowed(peer: &Peer, allow: &[u32], path: &Path) -> Result<(), SocketError> {
    let ours = rustix::process::geteuid().as_raw();
    if ours == NOBODY || peer.uid == NOBODY {
        let what = if ours == NOBODY {
            "this process".into()
        } else {
            format!("the peer on {}", path.display())
        };
        return Err(FolderError::Unmapped { what }.into());
    }
    if peer.uid == ours || allow.contains(&peer.uid) {
        return Ok(());
    }
    Err(SocketError::OtherUser {
        path: path.to_path_buf(),
        theirs: peer.uid,
        ours,
    })
}

/// The socket address of a path, or what is wrong with its length.
pub(crate) fn address(path: &Path) -> Result<SocketAddrUnix, FolderError> {
    const LIMIT: usize = 107;
    let length = path.as_os_str().len();
    SocketAddrUnix::new(path)
        .ok()
        .filter(|_| length <= LIMIT)
        .ok_or_else(|| FolderError::TooLong {
            path: path.to_path_buf(),
            length,
            limit: LIMIT,
        })
}

/// What a thing in the file system is, in words.
pub(crate) fn describe(kind: FileType) -> &'static str {
    match kind {
        FileType::Symlink => "a link",
        FileType::RegularFile => "a file",
        FileType::Directory => "a folder",
        FileType::Socket => "a socket",
        FileType::Fifo => "a pipe",
        _ => "a device",
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    Explicit,
    Runtime,
    Temp,
}

struct Candidate {
    folder: PathBuf,
    origin: Origin,
}

impl Candidate {
    fn new(folder: PathBuf, origin: Origin) -> Self {
        Self { folder, origin }
    }

    fn socket(&self) -> PathBuf {
        self.folder.join(SOCKET)
    }
}

/// Absolute, and without the trailing slash that would make `lstat` follow a link.
fn plain(path: &Path) -> Result<PathBuf, FolderError> {
    let system = |source| FolderError::System {
        what: format!("making {} absolute", path.display()),
        source,
    };
    if path.as_os_str().as_bytes().contains(&0) {
        return Err(system(Errno::INVAL.into()));
    }
    let absolute = std::path::absolute(path).map_err(system)?;
    Ok(absolute.components().collect())
}
