//! Where the socket lives, and whether its folder is to be trusted.

use std::path::{Path, PathBuf};

use rustix::net::SocketAddrUnix;

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
