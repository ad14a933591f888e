//! Packets with descriptors over Unix sockets, with deadlines. Which folder they live in: [`folder`].
//! `SOCK_SEQPACKET`: one `recvmsg` is one message with its descriptors.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    recvmsg, sendmsg, socket_with,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::protocol::{self, MAX_DESCRIPTORS, MAX_PACKET, ProtocolError};

pub mod folder;

/// What can go wrong on a socket.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SocketError {
    /// The system refused a call.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: String,
        /// The system's answer.
        source: std::io::Error,
    },
    /// Nobody listens there.
    #[error("nobody listens on {}: start the daemon with `candle-cache serve`", .0.display())]
    NobodyListens(PathBuf),
    /// The peer closed the connection.
    #[error("the peer closed the connection")]
    Closed,
    /// The peer took too long.
    #[error("no answer within {0:?}")]
    Deadline(Duration),
    /// Descriptors were sent and did not arrive.
    #[error(
        "descriptors were lost on arrival: {arrived} came, more were sent; this process may open {limit} files: \
         raise it (`ulimit -n`, LimitNOFILE=) above what it uses plus {MAX_DESCRIPTORS}, or see whether a security \
         module forbids passing them"
    )]
    DescriptorsLost {
        /// Descriptors that did arrive; they have been closed again.
        arrived: usize,
        /// This process's limit on open files.
        limit: u64,
    },
    /// Too many descriptors on their way to peers that do not read.
    #[error("too many descriptors are on their way to peers that have not read them yet: {0}")]
    TooManyInFlight(std::io::Error),
    /// Too many descriptors for one packet.
    #[error("{0} descriptors in one packet, the limit is {MAX_DESCRIPTORS}")]
    TooManyDescriptors(usize),
    /// The packet was cut on arrival.
    #[error("a packet larger than {MAX_PACKET} bytes")]
    PacketTooLarge,
    /// The packet is no message.
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
    /// The folder or the socket is not to be trusted, or cannot be used.
    #[error(transparent)]
    Folder(#[from] folder::FolderError),
    /// The peer runs as somebody else.
    #[error(
        "the peer on {} runs as uid {theirs}, this process as uid {ours}: run both as the same user, or allow the \
         other (`--allow-uid {theirs}` at the daemon, `IpcConfig::allow_uid({theirs})` in the engine)",
        path.display()
    )]
    OtherUser {
        /// The socket.
        path: PathBuf,
        /// The peer's user.
        theirs: u32,
        /// This process's user.
        ours: u32,
    },
}

impl SocketError {
    pub(crate) fn system(what: impl Into<String>, source: impl Into<std::io::Error>) -> Self {
        Self::System {
            what: what.into(),
            source: source.into(),
        }
    }
}

/// Who is at the other end, as this process's own namespaces number them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Process; 0 where it is not visible from here.
    pub pid: i32,
    /// User; 65534 where it has no number here.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

impl Peer {
    /// The credentials that the peer had when it connected or began to listen.
    ///
    /// # Errors
    /// When `fd` is no connected Unix socket.
    pub fn of(fd: impl AsFd) -> Result<Self, SocketError> {
        // Not rustix here: its process ids cannot be 0, which the kernel gives for one it cannot show.
        let cred = nix::sys::socket::getsockopt(&fd, nix::sys::socket::sockopt::PeerCredentials)
            .map_err(|e| SocketError::system("asking who the peer is", std::io::Error::from(e)))?;
        Ok(Self {
            pid: cred.pid(),
            uid: cred.uid(),
            gid: cred.gid(),
        })
    }
}

/// Raises this process's limit on open files to its hard limit, and returns the limit now in force.
pub fn raise_descriptor_limit() -> u64 {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    if limit.current < limit.maximum {
        let raised = Rlimit {
            current: limit.maximum,
            maximum: limit.maximum,
        };
        if let Err(e) = setrlimit(Resource::Nofile, raised) {
            tracing::warn!("raising the limit on open files: {e}");
        }
    }
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Sends one packet with descriptors. Does not wait: `Errno::AGAIN` when the peer's queue is full.
///
/// # Errors
/// As `sendmsg`.
pub fn send_now(
    socket: BorrowedFd<'_>,
    packet: &[u8],
    fds: &[BorrowedFd<'_>],
) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if fds.len() > MAX_DESCRIPTORS
        || (!fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)))
    {
        return Err(Errno::INVAL);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    loop {
        match sendmsg(socket, &[IoSlice::new(packet)], &mut control, flags) {
            Ok(n) if n == packet.len() => return Ok(()),
            Ok(_) => return Err(Errno::MSGSIZE),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
}

/// What one `recvmsg` brought.
#[derive(Debug)]
pub enum Received {
    /// A packet and its descriptors.
    Packet(Vec<u8>, Vec<OwnedFd>),
    /// The peer is gone.
    Closed,
    /// Nothing is there yet.
    Nothing,
}

/// Receives one packet with its descriptors. Does not wait.
///
/// # Errors
/// When the packet or its descriptors were cut on arrival; whatever did arrive is closed.
pub fn receive_now(socket: BorrowedFd<'_>) -> Result<Received, SocketError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut packet = vec![0; MAX_PACKET];
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let message = loop {
        match recvmsg(
            socket,
            &mut [IoSliceMut::new(&mut packet)],
            &mut control,
            flags,
        ) {
            Ok(message) => break message,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(Received::Nothing),
            Err(Errno::CONNRESET | Errno::PIPE) => return Ok(Received::Closed),
            Err(e) => return Err(SocketError::system("receiving a packet", e)),
        }
    };
    let mut fds = Vec::new();
    for item in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = item {
            fds.extend(rights);
        }
    }
    if message.flags.contains(ReturnFlags::CTRUNC) {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile)
            .current
            .unwrap_or(u64::MAX);
        return Err(SocketError::DescriptorsLost {
            arrived: fds.len(),
            limit,
        });
    }
    if message.flags.contains(ReturnFlags::TRUNC) {
        return Err(SocketError::PacketTooLarge);
    }
    // Our own messages are never empty: an empty read is the end.
    if message.bytes == 0 {
        return Ok(Received::Closed);
    }
    packet.truncate(message.bytes);
    Ok(Received::Packet(packet, fds))
}

/// Turns what `sendmsg` said into our error.
pub(crate) fn send_error(e: Errno, fds: usize) -> SocketError {
    match e {
        Errno::TOOMANYREFS => SocketError::TooManyInFlight(e.into()),
        Errno::INVAL if fds > MAX_DESCRIPTORS => SocketError::TooManyDescriptors(fds),
        Errno::PIPE | Errno::CONNRESET => SocketError::Closed,
        e => SocketError::system("sending a packet", e),
    }
}

/// A client's blocking connection. Every wait takes a deadline.
#[derive(Debug)]
pub struct Connection {
    fd: OwnedFd,
    path: PathBuf,
}

impl Connection {
    /// Connects to the daemon at `path`, within `timeout`. Says nothing about who that is: see [`Peer`].
    ///
    /// # Errors
    /// [`SocketError::NobodyListens`] when there is no socket, or nobody behind it.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self, SocketError> {
        let address = folder::address(path)?;
        let fd = socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(|e| SocketError::system("creating a socket", e))?;
        // A full backlog makes `connect` wait; only the send timeout bounds that.
        set_socket_timeout(
            &fd,
            Timeout::Send,
            Some(timeout.max(Duration::from_millis(1))),
        )
        .map_err(|e| SocketError::system("setting a timeout", e))?;
        connect(&fd, &address, path, timeout)?;
        Ok(Self {
            fd,
            path: path.to_path_buf(),
        })
    }

    /// Takes over a connected socket, for instance one that a parent passed on.
    pub fn from_fd(fd: OwnedFd, path: &Path) -> Self {
        Self {
            fd,
            path: path.to_path_buf(),
        }
    }

    /// The socket's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Sends a message with descriptors.
    ///
    /// # Errors
    /// When the peer is gone or does not read within `timeout`.
    pub fn send<T: Serialize>(
        &self,
        message: &T,
        fds: &[BorrowedFd<'_>],
        timeout: Duration,
    ) -> Result<(), SocketError> {
        let packet = protocol::encode(message)?;
        let end = Instant::now() + timeout;
        loop {
            match send_now(self.fd.as_fd(), &packet, fds) {
                Ok(()) => return Ok(()),
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, end, timeout)?,
                Err(e) => return Err(send_error(e, fds.len())),
            }
        }
    }

    /// Receives a message with its descriptors.
    ///
    /// # Errors
    /// When nothing arrives within `timeout`, the peer is gone, or what arrives is no message.
    pub fn receive<T: DeserializeOwned>(
        &self,
        timeout: Duration,
    ) -> Result<(T, Vec<OwnedFd>), SocketError> {
        let end = Instant::now() + timeout;
        loop {
            match receive_now(self.fd.as_fd())? {
                Received::Packet(packet, fds) => return Ok((protocol::decode(&packet)?, fds)),
                Received::Closed => return Err(SocketError::Closed),
                Received::Nothing => self.wait(PollFlags::IN, end, timeout)?,
            }
        }
    }

    /// Whether the peer has closed the connection. Does not wait.
    pub fn is_closed(&self) -> bool {
        let mut fds = [PollFd::new(&self.fd, PollFlags::RDHUP)];
        let polled = poll(
            &mut fds,
            Some(&Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            }),
        );
        polled.is_err()
            || fds[0]
                .revents()
                .intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR)
    }

    fn wait(&self, events: PollFlags, end: Instant, timeout: Duration) -> Result<(), SocketError> {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(SocketError::Deadline(timeout));
        }
        let spec = Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        match poll(&mut [PollFd::new(&self.fd, events)], Some(&spec)) {
            Ok(0) => Err(SocketError::Deadline(timeout)),
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(e) => Err(SocketError::system("waiting for a peer", e)),
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn connect(
    fd: &OwnedFd,
    address: &SocketAddrUnix,
    path: &Path,
    timeout: Duration,
) -> Result<(), SocketError> {
    loop {
        return match rustix::net::connect(fd, address) {
            Ok(()) => Ok(()),
            Err(Errno::INTR) => continue,
            Err(Errno::NOENT | Errno::CONNREFUSED) => {
                Err(SocketError::NobodyListens(path.to_path_buf()))
            }
            Err(Errno::AGAIN) => Err(SocketError::Deadline(timeout)),
            Err(e) => Err(SocketError::system(
                format!("connecting to {}", path.display()),
                e,
            )),
        };
    }
}
