//! Slices of tensors, read and named as if they were tensors: their runs are gathered while they are read.
//! Long runs are read each by itself; short ones a few at a time, with what lies between them.

use super::{CheckpointError, Slice, SourceTensor};
use crate::shard::{Cut, CutError, slice};

/// A run of at least this many bytes is read by itself.
const LONG: u64 = 32 << 10;
/// Most bytes that are read at a time to pick short runs from.
pub(crate) const SPAN: u64 = 1 << 20;

impl SourceTensor {
    /// One rank's slice of this tensor, which must be whole.
    ///
    /// # Errors
    /// When the tensor cannot be cut so.
    pub fn sliced(&self, cut: Cut) -> Result<Self, CutError> {
        let (shape, runs) = slice(self.element, &self.shape, cut)?;
        Ok(Self {
            shape,
            bytes: runs.bytes(),
            slice: Some(Slice { cut, runs }),
            ..self.clone()
        })
    }

    /// Where the tensor ends, all of it, in bytes from the file's start.
    pub(super) fn end(&self) -> u64 {
        let whole = match &self.slice {
            Some(slice) => slice.runs.count.saturating_mul(slice.runs.stride),
            None => self.bytes,
        };
        self.offset.saturating_add(whole)
    }
}

/// Fills `buffer` with the slice's bytes from `at` on. `read` fills a buffer with the tensor's bytes from a place on.
pub(super) fn read(
    slice: &Slice,
    at: u64,
    buffer: &mut [u8],
    read: impl Fn(u64, &mut [u8]) -> Result<(), CheckpointError>,
) -> Result<(), CheckpointError> {
    let runs = &slice.runs;
    let mut span = Vec::new();
    let mut done = 0;
    while done < buffer.len() {
        let (from, left) = runs.locate(at + done as u64);
        let rest = &mut buffer[done..];
        let wanted = left.min(rest.len() as u64);
        // Whole strides that fit behind the first run.
        let more = (SPAN.saturating_sub(wanted) / runs.stride)
            .min((rest.len() as u64 - wanted).div_ceil(runs.run));
        if runs.run >= LONG || more == 0 {
            read(from, &mut rest[..wanted as usize])?;
            done += wanted as usize;
            continue;
        }
        let last = (rest.len() as u64 - wanted - (more - 1) * runs.run).min(runs.run);
        // From here to the end of the last of these runs, or of what is wanted of it.
        let run_start = from + left - runs.run;
        span.resize((run_start + more * runs.stride + last - from) as usize, 0);
        read(from, &mut span)?;
        let mut taken = 0;
        let mut place = 0;
        for run in 0..=more {
            let len = match run {
                0 => wanted,
                _ if run == more => last,
                _ => runs.run,
            } as usize;
            rest[taken..taken + len].copy_from_slice(&span[place..place + len]);
            taken += len;
            place = (run_start + (run + 1) * runs.stride - from) as usize;
        }
        done += taken;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::ElementType;
    use crate::shard::Part;

    fn read_of(tensor: &[u8], slice: &Slice, at: u64, len: usize) -> Vec<u8> {
        let mut buffer = vec![0; len];
        read(slice, at, &mut buffer, |at, buffer| {
            buffer.copy_from_slice(&tensor[at as usize..][..buffer.len()]);
            Ok(())
        })
        .expect("a slice");
        buffer
    }

    #[test]
    fn any_part_of_a_slice_reads_as_if_its_bytes_followed_one_another() {
        // Short runs, runs so far apart that no two fit into a span, and long runs.
        for (shape, dim, size) in [
            (vec![7u64, 12, 5], 1, 4),
            (vec![3, 1 << 20], 1, 1 << 10),
            (vec![3, 2 * LONG], 1, 2),
            (vec![8, 3], 0, 4),
        ] {
            let len: u64 = shape.iter().product();
            let tensor: Vec<u8> = (0..len).map(|i| (i * 31 % 251) as u8).collect();
            for rank in [0, size - 1] {
                let cut = Cut {
                    dim,
                    part: Part::new(rank, size),
                };
                let (_, runs) = slice(ElementType::U8, &shape, cut).expect("a cut");
                let slice = Slice { cut, runs };
                let whole = runs.gather(&tensor);
                for (at, end) in [
                    (0, whole.len()),
                    (1, whole.len()),
                    (0, whole.len() - 1),
                    (whole.len() / 3, whole.len() / 2),
                    (whole.len() - 1, whole.len()),
                ] {
                    assert_eq!(
                        read_of(&tensor, &slice, at as u64, end - at),
                        whole[at..end],
                        "{shape:?} {rank} {at}..{end}"
                    );
                }
            }
        }
    }
}
