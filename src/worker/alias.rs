//! Finds tensors that are equal in bytes, type and shape, so that they share one storage.
//! Most tensors are told apart by their first and last bytes; only where those agree is all of it read.

use std::collections::HashMap;
use std::ops::Range;

use crate::checkpoint::{Checkpoint, SourceTensor};
use crate::manifest::{Digest, ElementType};
use crate::shard::Cut;

use super::meter::Meter;
use super::plan::{Digests, Plan};
use super::{Report, WorkerError, pool};

/// Bytes looked at from either end.
const PROBE: u64 = 4 << 10;
/// Tensors up to this many bytes are read whole at once.
const WHOLE: u64 = 2 * PROBE;
/// Bytes read at a time where all of a tensor is read.
const BLOCK: usize = 1 << 20;

/// Which tensors are second names of others. Indices are those of [`Checkpoint::tensors`].
#[derive(Debug, Default)]
pub struct Aliases {
    first: HashMap<usize, usize>,
    digests: HashMap<usize, Digest>,
}

impl Aliases {
    /// No second names: every tensor has a place of its own.
    pub fn none() -> Self {
        Self::default()
    }

    /// The tensor that `index` is a second name of: the first of its equals in order of names.
    pub fn first_of(&self, index: usize) -> Option<usize> {
        self.first.get(&index).copied()
    }

    /// Checks that the tensors which were found equal to others still had those bytes when they were
    /// loaded: the others' bytes were looked at only then.
    pub(super) fn confirm(
        &self,
        checkpoint: &Checkpoint,
        plan: &Plan,
        digests: &[Digests],
    ) -> Result<(), WorkerError> {
        for (placed, (source, _)) in plan.tensors.iter().zip(digests) {
            if self
                .digests
                .get(&placed.source)
                .is_some_and(|d| d != source)
            {
                return Err(WorkerError::Changed {
                    name: checkpoint.tensors[placed.source].name.clone(),
                });
            }
        }
        Ok(())
    }
}

/// Looks for equal tensors, on up to `threads` threads. Reports as phase `plan`.
///
/// # Errors
/// When the checkpoint cannot be read, or `report` says to stop.
pub fn find(
    checkpoint: &Checkpoint,
    threads: usize,
    report: &Report<'_>,
) -> Result<Aliases, WorkerError> {
    let tensors = &checkpoint.tensors;
    // A slice and a whole tensor are different things, though their bytes be equal.
    type Kind<'a> = (ElementType, &'a [u64], Option<Cut>);
    let mut alike: HashMap<Kind<'_>, Vec<usize>> = HashMap::new();
    for (i, t) in tensors.iter().enumerate().filter(|(_, t)| t.bytes > 0) {
        let cut = t.slice.map(|slice| slice.cut);
        let kind = (t.element, t.shape.as_slice(), cut);
        alike.entry(kind).or_default().push(i);
    }
    let alike: Vec<_> = alike.into_values().filter(|g| g.len() > 1).collect();

    let ends = |t: &SourceTensor| match t.bytes {
        0..=WHOLE => [0..t.bytes, 0..0],
        _ => [0..PROBE, t.bytes - PROBE..t.bytes],
    };
    let probed = equals(checkpoint, &alike, threads, report, ends)?;
    let (whole, open): (Vec<_>, Vec<_>) = probed
        .into_iter()
        .partition(|group| tensors[group.members[0]].bytes <= WHOLE);
    let open: Vec<_> = open.into_iter().map(|group| group.members).collect();
    let all = |t: &SourceTensor| [0..t.bytes, 0..0];
    let read = equals(checkpoint, &open, threads, report, all)?;

    let mut aliases = Aliases::none();
    for group in whole.into_iter().chain(read) {
        let first = group.members[0];
        aliases.digests.insert(first, group.digest);
        let others = group.members[1..].iter().map(|i| (*i, first));
        aliases.first.extend(others);
    }
    Ok(aliases)
}

/// Tensors whose bytes, as far as they were looked at, are equal.
struct Equals {
    digest: Digest,
    /// In order, two or more.
    members: Vec<usize>,
}

/// Splits groups of tensors of one length by the digest of the ranges that `ranges` names; what is left alone drops out.
fn equals(
    checkpoint: &Checkpoint,
    groups: &[Vec<usize>],
    threads: usize,
    report: &Report<'_>,
    ranges: impl Fn(&SourceTensor) -> [Range<u64>; 2] + Sync,
) -> Result<Vec<Equals>, WorkerError> {
    let jobs: Vec<(usize, usize)> = groups
        .iter()
        .enumerate()
        .flat_map(|(group, members)| members.iter().map(move |i| (group, *i)))
        .collect();
    let bytes = |i: usize| -> u64 {
        let ranges = ranges(&checkpoint.tensors[i]);
        ranges.iter().map(|r| r.end - r.start).sum()
    };
    let total = jobs.iter().map(|(_, i)| bytes(*i)).sum();

    let meter = Meter::start(report, "plan", total)?;
    let buffer = || Ok(vec![0; BLOCK]);
    let digests = pool::map(threads, jobs.len(), buffer, |buffer, job, halt| {
        let tensor = &checkpoint.tensors[jobs[job].1];
        let mut hasher = blake3::Hasher::new();
        for range in ranges(tensor) {
            let mut at = range.start;
            while at < range.end {
                if halt.told() {
                    return Ok(None);
                }
                let n = (range.end - at).min(BLOCK as u64);
                let block = &mut buffer[..n as usize];
                checkpoint.read_at(tensor, at, block)?;
                hasher.update(block);
                meter.add(n)?;
                at += n;
            }
        }
        Ok(Some(Digest::from(hasher.finalize())))
    })?;
    meter.finish()?;

    let mut split: HashMap<(usize, Digest), Vec<usize>> = HashMap::new();
    for ((group, i), digest) in jobs.into_iter().zip(digests) {
        split.entry((group, digest)).or_default().push(i);
    }
    Ok(split
        .into_iter()
        .filter(|(_, members)| members.len() > 1)
        .map(|((_, digest), members)| Equals { digest, members })
        .collect())
}
