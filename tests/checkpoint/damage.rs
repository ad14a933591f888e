//! Damaged headers: whatever the bytes, there is an answer, and it takes little memory.
//! What opens all the same must be what the safetensors crate and candle see in the same bytes.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use candle_core::quantized::gguf_file::Content;
use proptest::prelude::*;

use crate::cases::assert_same;
use crate::{again, bytes_of, gguf, open, tensors};

/// Files to start from, and how to tell whether others take what we take.
fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let keys = [
        (
            "general.architecture",
            8,
            [&5u64.to_le_bytes()[..], b"llama"].concat(),
        ),
        ("general.alignment", 4, 32u32.to_le_bytes().to_vec()),
        (
            "list",
            9,
            [&5u32.to_le_bytes()[..], &2u64.to_le_bytes(), &[0; 8]].concat(),
        ),
        (
            "words",
            9,
            [
                &8u32.to_le_bytes()[..],
                &1u64.to_le_bytes(),
                &1u64.to_le_bytes(),
                b"w",
            ]
            .concat(),
        ),
        ("yes", 7, vec![1]),
    ];
    vec![
        ("x.gguf", gguf("blk.0.w", 32, &keys)),
        (
            "x.safetensors",
            tensors(&[("a", &[1; 16]), ("b", &[2; 3]), ("empty", &[])]),
        ),
    ]
}

fn mutate(bytes: &mut Vec<u8>, at: prop::sample::Index, kind: u8, value: u64) {
    let i = at.index(bytes.len());
    match kind {
        0 => bytes[i] ^= 1 << (value % 8),
        1 => bytes[i] = value as u8,
        2 => bytes.truncate(i),
        3 => bytes.insert(i, value as u8),
        4 => drop(bytes.remove(i)),
        5 => {
            let digits = value.to_string();
            bytes.splice(i..i, digits.bytes());
        }
        _ => {
            let end = bytes.len().min(i + 8);
            bytes[i..end].copy_from_slice(&value.to_le_bytes()[..end - i]);
        }
    }
    if bytes.is_empty() {
        bytes.push(value as u8);
    }
}

/// Whatever the bytes, opening ends in a checkpoint or an error, and what opens is what others see too.
fn open_mutated(dir: &Path, name: &str, bytes: &[u8]) -> bool {
    let path = dir.join(name);
    // A new file each time: filesystems flush one that is cut and written again.
    let _ = std::fs::remove_file(&path);
    std::fs::write(&path, bytes).expect("written");
    let c = match open(&path) {
        Ok(c) => c,
        Err(e) => {
            let e = e.to_string();
            assert!(e.contains(name) && e.len() < 4000, "{e}");
            return false;
        }
    };
    for t in &c.tensors {
        assert_eq!(t.element.bytes(&t.shape), Some(t.bytes));
        if t.bytes == 0 {
            continue;
        }
        assert!(t.offset + t.bytes <= bytes.len() as u64);
        assert_eq!(
            bytes_of(&c, &t.name),
            bytes[t.offset as usize..(t.offset + t.bytes) as usize]
        );
    }
    if name.ends_with(".gguf") {
        let content = Content::read(&mut std::io::Cursor::new(bytes));
        assert_same(&c, &content.expect("candle takes what we take"));
    } else {
        safetensors::SafeTensors::read_metadata(bytes).expect("the reference takes what we take");
    }
    true
}

/// Most address space this process has ever taken, in bytes.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("a status");
    let line = status
        .lines()
        .find_map(|l| l.strip_prefix("VmPeak:"))
        .expect("a peak");
    let kib = line
        .trim()
        .trim_end_matches(" kB")
        .parse::<u64>()
        .expect("a number");
    kib << 10
}

#[test]
fn damaged_headers_never_panic_and_never_take_memory_they_do_not_need() {
    const ASK: &str = "CHECKPOINT_TEST_DAMAGE";
    if std::env::var_os(ASK).is_none() {
        // In a process of its own, so that the memory it takes is this test's alone.
        let dir = tempfile::tempdir().expect("a folder");
        let child = Command::new(std::env::current_exe().expect("this program"));
        let test = "damage::damaged_headers_never_panic_and_never_take_memory_they_do_not_need";
        return again(child, test, ASK, dir.path());
    }
    let dir = PathBuf::from(std::env::var_os(ASK).expect("set above"));
    let seeds = seeds();
    for (name, bytes) in &seeds {
        assert!(open_mutated(&dir, name, bytes), "{name} is whole");
    }
    let (taken, refused) = (AtomicU32::new(0), AtomicU32::new(0));
    let before = peak();
    let numbers = prop_oneof![
        any::<u64>(),
        0u64..300,
        Just(u64::MAX),
        (0u32..64).prop_map(|b| 1 << b)
    ];
    let changes = prop::collection::vec((any::<prop::sample::Index>(), 0u8..7, numbers), 1..4);
    let config = ProptestConfig {
        cases: 4000,
        failure_persistence: None,
        ..Default::default()
    };
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let ran = runner.run(&(0..seeds.len(), changes), |(seed, changes)| {
        let (name, mut bytes) = seeds[seed].clone();
        for (at, kind, value) in changes {
            mutate(&mut bytes, at, kind, value);
        }
        let opened = open_mutated(&dir, name, &bytes);
        if opened { &taken } else { &refused }.fetch_add(1, Relaxed);
        Ok(())
    });
    ran.expect("every case holds");
    let grown = peak() - before;
    let (taken, refused) = (taken.into_inner(), refused.into_inner());
    println!(
        "measured: {taken} damaged files opened, {refused} refused, {grown} bytes of address space"
    );
    assert!(
        taken > 200 && refused > 1000,
        "the damage is of one kind only"
    );
    assert!(grown < 64 << 20, "{grown} bytes more");
}
