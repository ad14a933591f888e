//! How much host memory can still be taken: the machine's, and the control group's.
//! Asked before it is taken, because the answer to taking too much is a kill without a word.

use std::path::Path;

use super::WorkerError;

/// How many of the `wanted` threads, which need `each` bytes of buffers, may run beside `slabs` bytes of slabs.
///
/// # Errors
/// [`WorkerError::NoRoom`] when there is no room even for one: it names both figures and the limit. A system that
/// tells nothing is believed to have room.
pub(super) fn threads(slabs: u64, each: u64, wanted: usize) -> Result<usize, WorkerError> {
    let room = room(Path::new("/proc"), Path::new("/sys/fs/cgroup"));
    room.map_or(Ok(wanted), |room| fit(room, slabs, each, wanted))
}

fn fit(room: (u64, String), slabs: u64, each: u64, wanted: usize) -> Result<usize, WorkerError> {
    let (free, limit) = room;
    let needs = slabs.saturating_add(each);
    if free < needs {
        return Err(WorkerError::NoRoom { needs, free, limit });
    }
    let most = (free - slabs) / each.max(1);
    Ok(usize::try_from(most).unwrap_or(usize::MAX).clamp(1, wanted))
}

/// Every limit on this process's host memory: bytes that are free under it, and what it is called.
pub(crate) fn limits() -> Vec<(u64, String)> {
    all(Path::new("/proc"), Path::new("/sys/fs/cgroup"))
}

/// The tightest of the limits.
fn room(proc: &Path, groups: &Path) -> Option<(u64, String)> {
    all(proc, groups).into_iter().min_by_key(|(free, _)| *free)
}

fn all(proc: &Path, groups: &Path) -> Vec<(u64, String)> {
    let machine = std::fs::read_to_string(proc.join("meminfo"))
        .ok()
        .and_then(|text| field(&text, "MemAvailable:"))
        .map(|kib| {
            (
                kib.saturating_mul(1024),
                "MemAvailable in /proc/meminfo".to_string(),
            )
        });
    let mine = std::fs::read_to_string(proc.join("self/cgroup")).unwrap_or_default();
    let mine = mine
        .lines()
        .find_map(|line| line.strip_prefix("0::/"))
        .unwrap_or_default();
    // Every ancestor's limit counts. Inside a container the path may be one of the host's: then only
    // the folder's own top is there to be read.
    let folder = groups.join(mine);
    let groups = folder
        .ancestors()
        .take_while(|folder| folder.starts_with(groups))
        .filter_map(group);
    machine.into_iter().chain(groups).collect()
}

/// Bytes that are free under one control group's limit.
fn group(folder: &Path) -> Option<(u64, String)> {
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).ok();
    // `max` is no number: no limit.
    let limit: u64 = read("memory.max")?.trim().parse().ok()?;
    let used: u64 = read("memory.current")?.trim().parse().ok()?;
    let stat = read("memory.stat").unwrap_or_default();
    // Cached file pages count as used, and are given back when memory is short.
    let cache: u64 = ["inactive_file", "active_file"]
        .iter()
        .filter_map(|name| field(&stat, name))
        .sum();
    let free = limit.saturating_sub(used.saturating_sub(cache));
    Some((
        free,
        format!("{} = {limit}", folder.join("memory.max").display()),
    ))
}

/// The number behind `name` in a table of one name and one number a line.
fn field(table: &str, name: &str) -> Option<u64> {
    table.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        (words.next()? == name).then(|| words.next()?.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, name: &str, text: &str) {
        let path = root.join(name);
        std::fs::create_dir_all(path.parent().expect("a file has a folder")).expect("folder");
        std::fs::write(path, text).expect("file");
    }

    #[test]
    fn the_tightest_limit_of_machine_and_groups_counts() {
        let root = tempfile::tempdir().expect("folder");
        let (proc, groups) = (root.path().join("proc"), root.path().join("groups"));
        let free = || room(&proc, &groups).map(|(free, _)| free);
        assert_eq!(free(), None);

        write(
            &proc,
            "meminfo",
            "MemTotal: 9 kB\nMemAvailable:   1000 kB\n",
        );
        assert_eq!(free(), Some(1_024_000));

        write(&proc, "self/cgroup", "1:name=x:/y\n0::/a/b\n");
        write(&groups, "a/b/memory.max", "max\n");
        write(&groups, "a/b/memory.current", "5\n");
        assert_eq!(free(), Some(1_024_000));

        write(&groups, "a/memory.max", "900000\n");
        write(&groups, "a/memory.current", "500000\n");
        assert_eq!(free(), Some(400_000));

        write(
            &groups,
            "a/memory.stat",
            "anon 7\ninactive_file 90000\nactive_file 10000\n",
        );
        assert_eq!(
            room(&proc, &groups).map(|(free, limit)| (free, limit.contains("a/memory.max"))),
            Some((500_000, true))
        );
    }

    #[test]
    fn a_container_that_shows_only_its_own_group_is_asked_there() {
        let root = tempfile::tempdir().expect("folder");
        let (proc, groups) = (root.path().join("proc"), root.path().join("groups"));
        write(&proc, "self/cgroup", "0::/somewhere/on/the/host\n");
        write(&groups, "memory.max", "1000\n");
        write(&groups, "memory.current", "400\n");
        assert_eq!(room(&proc, &groups).map(|(free, _)| free), Some(600));
    }

    #[test]
    fn little_room_means_fewer_threads_and_none_is_an_error() {
        let fit = |free, slabs, each| fit((free, "limit".into()), slabs, each, 8);
        assert_eq!(fit(1_000, 100, 10).ok(), Some(8));
        assert_eq!(fit(130, 100, 10).ok(), Some(3));
        assert_eq!(fit(110, 100, 10).ok(), Some(1));
        assert_eq!(fit(0, 0, 0).ok(), Some(1));
        let error = fit(109, 100, 10).expect_err("no room").to_string();
        assert!(
            error.contains("needs 110 bytes") && error.contains("109 are free"),
            "{error}"
        );
    }
}
