//! The kernel and this process's limits.

use std::os::fd::AsFd;

use indicatif::BinaryBytes;
use nix::sys::socket::{getsockopt, sockopt::PeerPidfd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{PidfdFlags, Resource, getpid, getrlimit, pidfd_open};

use super::{Check, State};
use crate::protocol::MAX_DESCRIPTORS;
use crate::slab::SlabError;
use crate::slab::host::{HostMapping, sealed};
use crate::worker::memory;

/// Below this a daemon serves few engines: a quarter of the limit is its number of connections.
const FEW_DESCRIPTORS: u64 = 4096;
/// One message's, and what every process has open besides.
const LEAST_DESCRIPTORS: u64 = MAX_DESCRIPTORS as u64 + 64;
/// With less than this left not even a small model fits.
const LITTLE_MEMORY: u64 = 256 << 20;

pub(super) fn checks() -> Vec<Check> {
    vec![
        kernel(),
        seals(),
        peers(),
        descriptors(
            getrlimit(Resource::Nofile).current,
            getrlimit(Resource::Nofile).maximum,
        ),
        locked(),
        host_memory(&memory::limits()),
    ]
}

fn kernel() -> Check {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let release = release.trim();
    match release {
        "" => Check::ok("kernel", "/proc does not tell which"),
        release => Check::ok("kernel", format!("Linux {release}")),
    }
    .fact("release", release)
}

/// Makes a sealed slab, tries to change it, and reads it.
fn seals() -> Check {
    match try_seals() {
        Ok(None) => Check::ok("sealed memory", "works").fact("works", true),
        Ok(Some(what)) => Check::wrong(
            "sealed memory",
            what,
            "run on a kernel whose memory files take seals (Linux 3.17, gVisor does)",
        )
        .fact("works", false),
        Err(e) => Check::error("sealed memory", State::Wrong, &e)
            .way_out(
                "allow memfd_create and fcntl seals: a container's seccomp profile may forbid them",
            )
            .fact("works", false),
    }
}

fn try_seals() -> Result<Option<&'static str>, SlabError> {
    const CONTENT: &[u8] = b"candle-ipc-cache doctor";
    let fd = sealed("candle-ipc-cache doctor", CONTENT)?;
    if rustix::io::pwrite(&fd, b"X", 0).is_ok() {
        return Ok(Some("sealed memory could be written to"));
    }
    if rustix::fs::ftruncate(&fd, 0).is_ok() {
        return Ok(Some("sealed memory could be cut"));
    }
    let mapping = HostMapping::map(fd.as_fd(), Some(CONTENT.len() as u64), "the trial")?;
    Ok((mapping.as_slice() != CONTENT).then_some("sealed memory reads back differently"))
}

/// Whether the process behind a connection can be watched.
fn peers() -> Check {
    let pair = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    );
    let peer = match pair {
        Ok((one, _other)) => getsockopt(&one, PeerPidfd).map_err(Errno::from_nix),
        Err(e) => {
            return Check::wrong(
                "peers",
                format!("no packet sockets (SOCK_SEQPACKET) here: {e}"),
                "allow Unix sockets: a sandbox may forbid them",
            );
        }
    };
    match peer {
        Ok(_) => Check::ok("peers", "watched through SO_PEERPIDFD").fact("peer_pidfd", true),
        Err(_) if pidfd_open(getpid(), PidfdFlags::empty()).is_ok() => Check::ok(
            "peers",
            "watched by process number (pidfd_open): this kernel has no SO_PEERPIDFD (Linux 6.5)",
        )
        .fact("peer_pidfd", false),
        Err(e) => Check::warning(
            "peers",
            format!("not watched ({e}): an engine's lease ends with its connection alone"),
            "a child that an engine forked can keep a lease alive: stop it too, or run on Linux 6.5 or newer",
        )
        .fact("peer_pidfd", false),
    }
}

trait FromNix {
    fn from_nix(e: nix::Error) -> Self;
}

impl FromNix for Errno {
    fn from_nix(e: nix::Error) -> Self {
        Self::from_raw_os_error(e as i32)
    }
}

fn descriptors(soft: Option<u64>, hard: Option<u64>) -> Check {
    let found = format!(
        "{} open files, raised to {} at start",
        limit(soft),
        limit(hard)
    );
    const WAY_OUT: &str =
        "raise the hard limit: `ulimit -Hn`, LimitNOFILE=, or `--ulimit nofile=` for a container";
    let hard_or_all = hard.unwrap_or(u64::MAX);
    let check = if hard_or_all < LEAST_DESCRIPTORS {
        let found = format!("{found}: a model of many slabs needs {LEAST_DESCRIPTORS}");
        Check::wrong("descriptors", found, WAY_OUT)
    } else if hard_or_all < FEW_DESCRIPTORS {
        let found = format!("{found}: enough for {} engines", hard_or_all / 4);
        Check::warning("descriptors", found, WAY_OUT)
    } else {
        Check::ok("descriptors", found)
    };
    check.fact("soft", soft).fact("hard", hard)
}

fn locked() -> Check {
    let limits = getrlimit(Resource::Memlock);
    let text =
        |bytes: Option<u64>| bytes.map_or("unlimited".into(), |b| BinaryBytes(b).to_string());
    Check::ok(
        "locked memory",
        format!(
            "{}, hard limit {}: not needed, the driver pins memory itself",
            text(limits.current),
            text(limits.maximum)
        ),
    )
    .fact("soft", limits.current)
    .fact("hard", limits.maximum)
}

fn host_memory(limits: &[(u64, String)]) -> Check {
    let texts: Vec<String> = limits
        .iter()
        .map(|(free, name)| format!("{} free ({name})", BinaryBytes(*free)))
        .collect();
    let free = limits.iter().map(|(free, _)| *free).min();
    let check = match free {
        None => Check::ok(
            "host memory",
            "neither /proc nor the control group tells how much is free",
        ),
        Some(free) if free < LITTLE_MEMORY => Check::warning(
            "host memory",
            texts.join(", "),
            "end something, or raise the control group's limit: a load that does not fit is refused",
        ),
        Some(_) => Check::ok("host memory", texts.join(", ")),
    };
    check.fact("free_bytes", free)
}

fn limit(value: Option<u64>) -> String {
    value.map_or_else(|| "any number of".into(), |n| n.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_descriptors_are_a_warning_and_too_few_are_wrong() {
        let state = |hard| descriptors(Some(1024), hard).state;
        assert_eq!(state(None), State::Ok);
        assert_eq!(state(Some(4096)), State::Ok);
        assert_eq!(state(Some(1024)), State::Warning);
        assert_eq!(state(Some(256)), State::Wrong);
    }

    #[test]
    fn the_tightest_limit_on_memory_decides() {
        let limit = |free: u64| (free, "limit".to_string());
        assert_eq!(host_memory(&[]).state, State::Ok);
        assert_eq!(host_memory(&[limit(1 << 40)]).state, State::Ok);
        let tight = host_memory(&[limit(1 << 40), limit(1 << 20)]);
        assert_eq!(tight.state, State::Warning);
        assert_eq!(tight.facts["free_bytes"], 1 << 20);
    }
}
