//! The socket's folder, and who serves there. Creates nothing.

use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, accessat};

use super::{Check, State};
use crate::protocol::{Reply, Request, STEP};
use crate::socket::folder::{self, peer_allowed};
use crate::socket::{Connection, Peer, SocketError};

pub(super) fn checks(explicit: Option<&Path>) -> Vec<Check> {
    let sockets = match folder::for_engine(explicit) {
        Ok(sockets) => sockets,
        Err(e) => return vec![Check::error("socket folder", State::Wrong, &e)],
    };
    vec![place(&sockets), daemon(&sockets)]
}

/// Where a daemon would listen: the first folder that is there or can be made.
fn place(sockets: &[PathBuf]) -> Check {
    let folders: Vec<&Path> = sockets.iter().filter_map(|s| s.parent()).collect();
    let usable = folders.iter().find(|folder| {
        let access = Access::WRITE_OK | Access::EXEC_OK;
        let there = if folder.exists() {
            Some(**folder)
        } else {
            folder.parent()
        };
        there.is_some_and(|there| accessat(CWD, there, access, AtFlags::EACCESS).is_ok())
    });
    match usable {
        Some(folder) => {
            let found = if folder.exists() {
                folder.display().to_string()
            } else {
                format!("{}, which a daemon makes", folder.display())
            };
            Check::ok("socket folder", found).fact("folder", folder.display().to_string())
        }
        None => {
            let tried: Vec<String> = folders.iter().map(|f| f.display().to_string()).collect();
            Check::wrong(
                "socket folder",
                format!("{} cannot be made or written to", tried.join(" and ")),
                "choose another folder with --socket-dir or CANDLE_CACHE_SOCKET_DIR",
            )
        }
    }
}

fn daemon(sockets: &[PathBuf]) -> Check {
    for socket in sockets {
        match ask(socket) {
            Ok(peer) => {
                let who = match peer.pid {
                    0 => "a process that is not visible from here".to_string(),
                    pid => format!("process {pid}"),
                };
                let found = format!("{who} of uid {} serves on {}", peer.uid, socket.display());
                return Check::ok("daemon", found)
                    .fact("socket", socket.display().to_string())
                    .fact("pid", peer.pid)
                    .fact("uid", peer.uid);
            }
            Err(SocketError::NobodyListens(_)) => {}
            Err(e) => {
                let found = format!("{}: {e}", socket.display());
                return Check::new("daemon", State::Wrong, found)
                    .fact("socket", socket.display().to_string());
            }
        }
    }
    let tried: Vec<String> = sockets.iter().map(|s| s.display().to_string()).collect();
    Check::warning(
        "daemon",
        format!("nobody listens on {}", tried.join(" or ")),
        "start one: `candle-cache serve`",
    )
    .fact("socket", None::<String>)
}

/// Who serves there, if they speak as we do.
fn ask(socket: &Path) -> Result<Peer, SocketError> {
    let connection = Connection::connect(socket, STEP)?;
    let peer = Peer::of(&connection)?;
    peer_allowed(&peer, &[], socket)?;
    connection.send(&Request::Status { after: None }, &[], STEP)?;
    connection.receive::<Reply>(STEP)?;
    Ok(peer)
}
