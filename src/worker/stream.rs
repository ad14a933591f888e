//! Moves tensors from the files into the slabs: read, hash, convert or quantize where asked, hash again, write.
//! Each thread has one lane and one tensor at a time, so memory does not grow with the model; a thread that finds no
//! further tensor helps the others with the pieces that they convert.

use std::cmp::Reverse;

use crate::checkpoint::{Checkpoint, SourceTensor};
use crate::manifest::Digest;
use crate::slab::{CHUNK, Lane, SlabWriter};

use super::convert::{Conversion, Loss};
use super::meter::Meter;
use super::plan::{Digests, Placed, Plan};
use super::pool::{self, Halt};
use super::{Report, WorkerError};

/// Fills the slabs behind `writer` as `plan` says, and returns the digests of [`Plan::tensors`], in their order.
/// Reports as phase `load`, in bytes of the checkpoint.
///
/// # Errors
/// When the checkpoint cannot be read, a tensor not be converted, the slabs not be written, or `report` says to stop.
pub fn fill_slabs(
    checkpoint: &Checkpoint,
    plan: &Plan,
    writer: &dyn SlabWriter,
    threads: usize,
    report: &Report<'_>,
) -> Result<Vec<Digests>, WorkerError> {
    // The largest first, so that no thread is left alone with one at the end; equally large ones as
    // they lie in the files.
    let mut order: Vec<usize> = (0..plan.tensors.len()).collect();
    order.sort_by_key(|i| {
        let t = &checkpoint.tensors[plan.tensors[*i].source];
        (Reverse(t.bytes), t.file, t.offset)
    });
    let meter = Meter::start(report, "load", plan.source_bytes(checkpoint))?;
    let state = || {
        Ok(Filler {
            checkpoint,
            allow_nonfinite: plan.allow_nonfinite,
            meter: &meter,
            lane: writer.lane()?,
            read: Vec::new(),
        })
    };
    let filled = pool::map(threads, order.len(), state, |filler, job, halt| {
        filler.fill(&plan.tensors[order[job]], halt)
    })?;
    meter.finish()?;

    let mut digests = vec![Digests::default(); plan.tensors.len()];
    for (i, d) in order.into_iter().zip(filled) {
        digests[i] = d;
    }
    Ok(digests)
}

/// One thread's part.
struct Filler<'a> {
    checkpoint: &'a Checkpoint,
    allow_nonfinite: bool,
    meter: &'a Meter<'a>,
    lane: Box<dyn Lane + 'a>,
    /// What was read and is to be converted.
    read: Vec<u8>,
}

impl Filler<'_> {
    fn fill(&mut self, placed: &Placed, halt: &Halt) -> Result<Option<Digests>, WorkerError> {
        let tensor = &self.checkpoint.tensors[placed.source];
        if placed.element == tensor.element {
            let digest = self.copy(tensor, placed, halt)?;
            Ok(digest.map(|d| (d, d)))
        } else {
            self.convert(tensor, placed, halt)
        }
    }

    fn copy(
        &mut self,
        tensor: &SourceTensor,
        placed: &Placed,
        halt: &Halt,
    ) -> Result<Option<Digest>, WorkerError> {
        let mut hasher = blake3::Hasher::new();
        let mut at = 0;
        while at < tensor.bytes {
            if halt.told() {
                return Ok(None);
            }
            let len = (tensor.bytes - at).min(CHUNK as u64) as usize;
            let chunk = &mut self.lane.buffer()?[..len];
            self.checkpoint.read_at(tensor, at, chunk)?;
            hasher.update(chunk);
            self.lane
                .send(len, placed.slab as usize, placed.offset + at)?;
            self.meter.add(len as u64)?;
            at += len as u64;
        }
        Ok(Some(hasher.finalize().into()))
    }

    fn convert(
        &mut self,
        tensor: &SourceTensor,
        placed: &Placed,
        halt: &Halt,
    ) -> Result<Option<Digests>, WorkerError> {
        let conversion = Conversion::new(tensor, placed, self.allow_nonfinite);
        let unit = conversion.unit();
        let (before, after) = conversion.bytes(unit);
        let run = CHUNK as u64 / before.max(after) * unit;
        let count = tensor.bytes / before * unit;
        let mut source = blake3::Hasher::new();
        let mut stored = blake3::Hasher::new();
        let mut loss = Loss::default();
        let mut at = 0;
        while at < count {
            if halt.told() {
                return Ok(None);
            }
            let n = (count - at).min(run);
            let (start, out_start) = conversion.bytes(at);
            let (length, out_length) = conversion.bytes(n);
            self.read.resize(length as usize, 0);
            self.checkpoint.read_at(tensor, start, &mut self.read)?;
            source.update(&self.read);
            let len = out_length as usize;
            let chunk = &mut self.lane.buffer()?[..len];
            loss.add(conversion.run(at, &self.read, chunk)?);
            stored.update(chunk);
            self.lane
                .send(len, placed.slab as usize, placed.offset + out_start)?;
            self.meter.add(length)?;
            at += n;
        }
        conversion.check(loss)?;
        Ok(Some((source.finalize().into(), stored.finalize().into())))
    }
}
