//! Talking to the daemon: find its socket, see who it is, ask, and turn what goes wrong into exit codes.

use std::path::PathBuf;
use std::time::Duration;

use candle_ipc_cache::protocol::{Refusal, Reply, Request, STEP};
use candle_ipc_cache::slab::cuda::CudaError;
use candle_ipc_cache::socket::folder::{self, FolderError, peer_allowed};
use candle_ipc_cache::socket::{Connection, Peer, SocketError};

use crate::{Global, exit};

/// An error and its causes, but for those that the words before have told already.
pub fn told(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// Why a command has no result.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No daemon at any of the places where one could be.
    #[error("no daemon: nobody listens on {}; start one with `candle-cache serve`, or name the folder that \
        one serves in (--socket-dir, CANDLE_CACHE_SOCKET_DIR)", list(.0))]
    NoDaemon(Vec<PathBuf>),
    /// The folder of the socket is not to be trusted.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// The conversation failed.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The GPU that was named cannot be found from here.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The daemon refused.
    #[error("{reason}")]
    Refused {
        /// The kind of refusal.
        code: Refusal,
        /// The daemon's words.
        reason: String,
    },
    /// The daemon said something else than was asked.
    #[error("the daemon gave an answer that does not belong to the question: {0}")]
    Unexpected(String),
}

impl ClientError {
    /// The exit code that it stands for.
    pub fn code(&self) -> u8 {
        match self {
            Self::NoDaemon(_) => exit::NO_DAEMON,
            Self::Refused { .. } => exit::REFUSED,
            Self::Folder(_) | Self::Socket(_) | Self::Cuda(_) | Self::Unexpected(_) => exit::FAILED,
        }
    }

    /// Prints it, and gives its exit code.
    pub fn report(&self, global: &Global) -> u8 {
        eprintln!("candle-cache: {self}");
        if global.json {
            let refusal = match self {
                Self::Refused { code, .. } => Some(format!("{code:?}")),
                _ => None,
            };
            println!(
                "{}",
                serde_json::json!({ "error": self.to_string(), "refusal": refusal, "exit": self.code() })
            );
        }
        self.code()
    }
}

/// Connects to the first daemon that listens at one of the candidates.
pub fn connect(global: &Global) -> Result<Connection, ClientError> {
    let sockets = folder::for_engine_allowing(global.socket_dir.as_deref(), &global.allow_uid)?;
    for socket in &sockets {
        match Connection::connect(socket, STEP) {
            Ok(connection) => {
                peer_allowed(&Peer::of(&connection)?, &global.allow_uid, socket)?;
                return Ok(connection);
            }
            Err(SocketError::NobodyListens(_)) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Err(ClientError::NoDaemon(sockets))
}

/// One question, one answer. A refusal is an error.
pub fn ask(
    connection: &Connection,
    request: &Request,
    patience: Duration,
) -> Result<Reply, ClientError> {
    // A daemon that refuses may have said so and closed before it was asked.
    let sent = connection.send(request, &[], STEP);
    let reply = match (sent, connection.receive::<Reply>(patience)) {
        (_, Ok((reply, _))) => reply,
        (Err(e), Err(_)) | (Ok(()), Err(e)) => return Err(e.into()),
    };
    match reply {
        Reply::Refused { code, reason } => Err(ClientError::Refused { code, reason }),
        reply => Ok(reply),
    }
}

/// As [`ask`], where `Done` is the only right answer.
pub fn ask_done(connection: &Connection, request: &Request) -> Result<(), ClientError> {
    match ask(connection, request, STEP * 2)? {
        Reply::Done => Ok(()),
        other => Err(ClientError::Unexpected(format!("{other:?}"))),
    }
}

fn list(sockets: &[PathBuf]) -> String {
    let texts: Vec<String> = sockets.iter().map(|s| s.display().to_string()).collect();
    texts.join(" or ")
}
