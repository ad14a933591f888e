//! Opening files without ever waiting for them, and reading from them by position.
//! What is no regular file is refused; a refusal by the system says whose file it is.

use std::fs::{File, FileType, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::process::{Resource, geteuid, getrlimit};

use super::{CheckpointError, SourceFile};
use crate::key::Receipt;

/// Opens a regular file for reading, and takes its receipt under its real path.
pub(super) fn open(path: &Path) -> Result<SourceFile, CheckpointError> {
    let fail = |e| system(path, "opening it", e);
    let real = std::fs::canonicalize(path).map_err(fail)?;
    // Opening a device or a pipe can have effects of its own, so look before, and again after.
    regular(path, &std::fs::metadata(&real).map_err(fail)?)?;
    let file = File::options()
        .read(true)
        .custom_flags((OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32)
        .open(&real)
        .map_err(fail)?;
    let receipt = Receipt::of(&file, &real).map_err(|e| system(path, "examining it", e))?;
    regular(
        path,
        &file
            .metadata()
            .map_err(|e| system(path, "examining it", e))?,
    )?;
    Ok(SourceFile { file, receipt })
}

fn regular(path: &Path, meta: &Metadata) -> Result<(), CheckpointError> {
    match kind(meta.file_type()) {
        None => Ok(()),
        Some(kind) => Err(CheckpointError::NotAFile {
            path: path.to_path_buf(),
            kind,
        }),
    }
}

fn kind(t: FileType) -> Option<&'static str> {
    if t.is_file() {
        None
    } else if t.is_dir() {
        Some("a folder")
    } else if t.is_fifo() {
        Some("a pipe")
    } else if t.is_socket() {
        Some("a socket")
    } else if t.is_char_device() || t.is_block_device() {
        Some("a device")
    } else {
        Some("of an unknown kind")
    }
}

/// Reads until the buffer is full or the file ends; returns how much came.
pub(super) fn read_at(file: &File, buffer: &mut [u8], at: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        let Some(from) = at.checked_add(done as u64) else {
            break;
        };
        match file.read_at(&mut buffer[done..], from) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(done)
}

/// Reads `bytes` bytes from `at` on, which the caller knows to lie inside the file and under a cap.
pub(super) fn read_exactly(
    source: &SourceFile,
    path: &Path,
    at: u64,
    bytes: usize,
) -> Result<Vec<u8>, CheckpointError> {
    let mut buffer = vec![0; bytes];
    let got = read_at(&source.file, &mut buffer, at).map_err(|e| system(path, "reading it", e))?;
    if got < bytes {
        return Err(CheckpointError::Truncated {
            path: path.to_path_buf(),
            what: "its header".into(),
            found: at + got as u64,
            wanted: at + bytes as u64,
        });
    }
    Ok(buffer)
}

/// Refuses what people really have in place of weights: nothing, or a Git LFS pointer.
pub(super) fn check_is_content(source: &SourceFile, path: &Path) -> Result<(), CheckpointError> {
    const LARGEST_POINTER: u64 = 1024;
    let bytes = source.receipt.bytes;
    if bytes == 0 {
        return Err(CheckpointError::Truncated {
            path: path.to_path_buf(),
            what: "the file is empty; its header".into(),
            found: 0,
            wanted: 8,
        });
    }
    if bytes > LARGEST_POINTER {
        return Ok(());
    }
    let content = read_exactly(source, path, 0, bytes as usize)?;
    if !content.starts_with(b"version https://git-lfs.github.com/spec/") {
        return Ok(());
    }
    let size = String::from_utf8_lossy(&content)
        .lines()
        .find_map(|l| l.strip_prefix("size ")?.trim().parse().ok());
    Err(CheckpointError::LfsPointer {
        path: path.to_path_buf(),
        size,
    })
}

/// Compares the open file with its receipt.
pub(super) fn check_unchanged(source: &SourceFile) -> Result<(), CheckpointError> {
    let then = &source.receipt;
    let fail = |e| system(&then.path, "examining it", e);
    let now = Receipt::of(&source.file, &then.path).map_err(fail)?;
    let changed = |what| {
        Err(CheckpointError::Changed {
            path: then.path.clone(),
            what,
        })
    };
    let time = |(s, ns): (i64, i64)| format!("{s}.{ns:09}");
    if now.bytes != then.bytes {
        return changed(format!("{} bytes, now {}", then.bytes, now.bytes));
    }
    if now.mtime != then.mtime {
        return changed(format!(
            "written at {}, now at {} (seconds since 1970)",
            time(then.mtime),
            time(now.mtime)
        ));
    }
    // Removing the last name changes the inode, and nothing else: that is a path being replaced.
    let named = source.file.metadata().map_err(fail)?.nlink() > 0;
    if now.ctime != then.ctime && named {
        return changed(format!(
            "its inode changed at {}, now at {} (seconds since 1970)",
            time(then.ctime),
            time(now.ctime)
        ));
    }
    Ok(())
}

/// Turns a fault of the system into an error that says what to do.
pub(super) fn system(path: &Path, doing: &str, e: io::Error) -> CheckpointError {
    let path = path.to_path_buf();
    match Errno::from_io_error(&e) {
        Some(Errno::NOENT) => match std::fs::read_link(&path) {
            Ok(target) => CheckpointError::Dangling {
                hint: super::folder::interrupted_hint(path.parent().unwrap_or(Path::new("."))),
                path,
                target,
            },
            Err(_) => CheckpointError::NoSuchPath { path },
        },
        Some(Errno::ACCESS | Errno::PERM) => CheckpointError::Denied {
            why: why_denied(&path),
            path,
        },
        Some(Errno::MFILE | Errno::NFILE) => CheckpointError::Descriptors {
            path,
            limit: getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX),
        },
        _ => CheckpointError::System {
            path,
            doing: doing.into(),
            source: e,
        },
    }
}

/// Mode and owner of what stood in the way: the file itself, or the first folder that lets nobody through.
fn why_denied(path: &Path) -> String {
    let me = geteuid().as_raw();
    let describe = |at: &Path, meta: &Metadata| {
        format!(
            "{} has mode {:04o} and belongs to uid {}, this process runs as uid {me}: allow it with chmod, \
             or run as uid {}",
            at.display(),
            meta.mode() & 0o7777,
            meta.uid(),
            meta.uid()
        )
    };
    let absolute = std::path::absolute(path).unwrap_or_else(|_| PathBuf::from(path));
    for at in absolute.ancestors() {
        if let Ok(meta) = std::fs::metadata(at) {
            return describe(at, &meta);
        }
    }
    format!("this process runs as uid {me}")
}
