//! Conversion and quantization of a tensor's elements, done by candle on the CPU, so that the results are candle's own
//! to the bit. Works on runs of whole blocks, in small pieces that every idle thread of the pool takes a share of: how
//! a tensor is cut does not show.

use std::borrow::Cow;
use std::ops::Range;

use candle_core::quantized::{QStorage, QTensor};
use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use half::f16;
use rayon::prelude::*;

use super::WorkerError;
use super::plan::Placed;
use crate::checkpoint::SourceTensor;
use crate::manifest::ElementType;
use crate::tensors::{ggml_dtype, plain_dtype};

/// Elements that are converted at a time: whole blocks of every type.
const PIECE: u64 = 64 << 10;

const BEYOND: &str = "has no block scale for";
const LOST: &str = "makes something else of";
/// A block whose largest value is at least this must keep it, to one half of it. Smaller ones may be nothing beside
/// their neighbours: rows of tokens that were never trained, for instance.
const NOTABLE: f32 = 1e-3;
/// Nothing beyond this fits a block whose scale is a half: Q6_K reaches furthest. candle's own sums overflow somewhat
/// later, and what comes out then has scales that look sound.
const FURTHEST: f32 = 65504.0 * 128.0 * 32.0;

/// How one tensor's elements become others.
pub(super) struct Conversion<'a> {
    tensor: &'a SourceTensor,
    from: ElementType,
    to: ElementType,
    /// Elements of a row, and rows of one expert's matrix.
    row: u64,
    rows: u64,
    importance: Option<&'a [f32]>,
    by_recipe: bool,
    allow_nonfinite: bool,
}

/// How much of a tensor has been lost so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Loss {
    /// Sum of the squares of the values, and of the differences that quantizing made.
    values: f64,
    differences: f64,
    /// The first value of which more was lost than kept.
    first: Option<(u64, f32)>,
}

impl Loss {
    /// Adds what came after.
    pub(super) fn add(&mut self, after: Self) {
        self.values += after.values;
        self.differences += after.differences;
        self.first = self.first.or(after.first);
    }
}

/// One piece of a run: where it begins in the tensor, and its bytes before and after.
struct Piece<'a> {
    at: u64,
    elements: u64,
    source: &'a [u8],
    out: &'a mut [u8],
}

impl<'a> Conversion<'a> {
    pub(super) fn new(tensor: &'a SourceTensor, placed: &'a Placed, allow_nonfinite: bool) -> Self {
        let mut shape = tensor.shape.iter().rev().copied();
        Self {
            tensor,
            from: tensor.element,
            to: placed.element,
            row: shape.next().unwrap_or(1),
            rows: shape.next().unwrap_or(1),
            importance: placed.importance.as_deref(),
            by_recipe: placed.by_recipe,
            allow_nonfinite,
        }
    }

    /// Elements of the smallest run: a whole number of blocks before and after.
    pub(super) fn unit(&self) -> u64 {
        // Both are powers of two.
        self.from.block_elements().max(self.to.block_elements())
    }

    /// Bytes that `elements` take before and after.
    pub(super) fn bytes(&self, elements: u64) -> (u64, u64) {
        let of = |t: ElementType| elements / t.block_elements() * t.block_bytes();
        (of(self.from), of(self.to))
    }

    /// Converts the run that begins at element `at`. `out` must have room for exactly what comes out.
    ///
    /// # Errors
    /// candle's own; and [`WorkerError::Ruined`] for a value that no block can hold.
    pub(super) fn run(&self, at: u64, source: &[u8], out: &mut [u8]) -> Result<Loss, WorkerError> {
        let elements = source.len() as u64 / self.from.block_bytes() * self.from.block_elements();
        let (mut source, mut out) = (source, out);
        let mut pieces = Vec::new();
        for range in self.cut(at..at + elements) {
            let elements = range.end - range.start;
            let (before, after) = self.bytes(elements);
            let (mine, rest) = source.split_at(before as usize);
            source = rest;
            let (mine_out, rest) = out.split_at_mut(after as usize);
            out = rest;
            pieces.push(Piece {
                at: range.start,
                elements,
                source: mine,
                out: mine_out,
            });
        }
        let outcomes: Vec<Result<Loss, WorkerError>> = pieces
            .into_par_iter()
            .map(|piece| self.piece(piece))
            .collect();
        // The first in order, not in time: an error names the tensor's first bad element.
        let mut loss = Loss::default();
        for outcome in outcomes {
            loss.add(outcome?);
        }
        Ok(loss)
    }

    /// Refuses a tensor of which more was lost than kept: one that is too small for a block's scales, as a whole.
    pub(super) fn check(&self, loss: Loss) -> Result<(), WorkerError> {
        match loss.first {
            Some((index, value)) if loss.differences > 0.5 * loss.values => {
                Err(self.ruined(index, value, LOST))
            }
            _ => Ok(()),
        }
    }

    /// Cuts a run into pieces. What columns matter for goes by whole rows, or by parts of one.
    fn cut(&self, run: Range<u64>) -> Vec<Range<u64>> {
        let mut pieces = Vec::new();
        let mut at = run.start;
        while at < run.end {
            let left = run.end - at;
            let column = at % self.row;
            let whole_rows = PIECE.min(left) / self.row * self.row;
            let length = match self.importance {
                None => PIECE.min(left),
                Some(_) if column == 0 && whole_rows > 0 => {
                    // Not past an expert's last row: the next has its own columns.
                    let row = at / self.row;
                    whole_rows.min((self.rows - row % self.rows) * self.row)
                }
                Some(_) => PIECE.min(left).min(self.row - column),
            };
            pieces.push(at..at + length);
            at += length;
        }
        pieces
    }

    fn piece(&self, piece: Piece<'_>) -> Result<Loss, WorkerError> {
        let candle = |e| self.candle(e);
        let floats = match self.to.is_quantized() || self.from.is_quantized() {
            true => self.floats(piece.source, piece.elements),
            false => self.plain(piece.source),
        };
        let floats = floats.map_err(candle)?;
        if !self.to.is_quantized() {
            let made = self.put(&floats, piece.out).map_err(candle)?;
            self.check_conversion(&floats, &made, piece.at)?;
            return Ok(Loss::default());
        }
        self.check_finite(&floats, piece.at)?;
        let quantized = self
            .quantize(&floats, piece.at, piece.out)
            .map_err(candle)?;
        self.check_scales(&floats, piece.at, piece.out)?;
        self.loss(&floats, &quantized, piece.at)
    }

    /// The elements as they are, shape `(elements,)`.
    fn plain(&self, source: &[u8]) -> candle_core::Result<Tensor> {
        let from = float(self.from)?;
        let count = source.len() / from.size_in_bytes();
        Tensor::from_raw_buffer(source, from, &[count], &Device::Cpu)
    }

    /// Writes a tensor's values as the type that is wanted, and returns them.
    fn put(&self, tensor: &Tensor, out: &mut [u8]) -> candle_core::Result<Tensor> {
        let to = float(self.to)?;
        let tensor = tensor.to_dtype(to)?;
        if out.len() != tensor.elem_count() * to.size_in_bytes() {
            candle_core::bail!(
                "{} values of {to:?} do not fill {} bytes",
                tensor.elem_count(),
                out.len()
            );
        }
        let (storage, _) = tensor.storage_and_layout();
        match &*storage {
            Storage::Cpu(CpuStorage::BF16(values)) => put(values, out, |v| v.to_le_bytes()),
            Storage::Cpu(CpuStorage::F16(values)) => put(values, out, |v| v.to_le_bytes()),
            Storage::Cpu(CpuStorage::F32(values)) => put(values, out, |v| v.to_le_bytes()),
            _ => candle_core::bail!("{to:?} is not a type to convert to"),
        }
        drop(storage);
        Ok(tensor)
    }

    /// The elements as F32, shape `(elements,)`.
    fn floats(&self, source: &[u8], elements: u64) -> candle_core::Result<Tensor> {
        let count = elements as usize;
        match (ggml_dtype(self.from), self.from.is_quantized()) {
            (Some(dtype), true) => {
                let storage = QStorage::from_data(Cow::Borrowed(source), &Device::Cpu, dtype)?;
                QTensor::new(storage, count)?.dequantize(&Device::Cpu)
            }
            _ => Tensor::from_raw_buffer(source, float(self.from)?, &[count], &Device::Cpu)?
                .to_dtype(DType::F32),
        }
    }

    fn quantize(&self, floats: &Tensor, at: u64, out: &mut [u8]) -> candle_core::Result<QTensor> {
        let Some(dtype) = ggml_dtype(self.to) else {
            candle_core::bail!("{} is no type to quantize to", self.to)
        };
        let quantized = match self.importance {
            None => QTensor::quantize(floats, dtype)?,
            Some(importance) => {
                let (row, column) = (at / self.row, at % self.row);
                // One row of values for all, or one for each expert.
                let start = match importance.len() as u64 {
                    all if all == self.row => column,
                    _ => row / self.rows * self.row + column,
                };
                let columns = (floats.elem_count() as u64).min(self.row);
                let important = &importance[start as usize..][..columns as usize];
                let rows = floats.reshape(((), columns as usize))?;
                QTensor::quantize_imatrix(&rows, important, dtype)?
            }
        };
        let data = quantized.data()?;
        if data.len() != out.len() {
            candle_core::bail!("{} bytes came out, {} were expected", data.len(), out.len());
        }
        out.copy_from_slice(&data);
        drop(data);
        Ok(quantized)
    }

    /// A recipe's floats must stay numbers. `--dtype` converts as candle does, whatever comes out.
    fn check_conversion(&self, from: &Tensor, made: &Tensor, at: u64) -> Result<(), WorkerError> {
        if !self.by_recipe || self.allow_nonfinite {
            return Ok(());
        }
        let values = |t: &Tensor| t.to_dtype(DType::F64)?.to_vec1::<f64>();
        let before = values(from).map_err(|e| self.candle(e))?;
        let after = values(made).map_err(|e| self.candle(e))?;
        let mut pairs = before.iter().zip(&after);
        match pairs.position(|(before, after)| before.is_finite() && !after.is_finite()) {
            None => Ok(()),
            Some(i) => Err(self.ruined(at + i as u64, before[i] as f32, "cannot hold")),
        }
    }

    /// What quantizing lost, block by block: candle's own answer is compared with what it was given.
    fn loss(&self, floats: &Tensor, made: &QTensor, at: u64) -> Result<Loss, WorkerError> {
        if self.allow_nonfinite {
            return Ok(Loss::default());
        }
        let made = made.dequantize(&Device::Cpu).and_then(|t| t.flatten_all());
        let made = made
            .and_then(|t| t.to_vec1::<f32>())
            .map_err(|e| self.candle(e))?;
        let block = self.to.block_elements() as usize;
        let mut loss = Loss::default();
        self.with(floats, |values| {
            let blocks = values.chunks(block).zip(made.chunks(block));
            for (number, (values, made)) in blocks.enumerate() {
                let (mut largest, mut furthest, mut place) = (0f32, 0f32, 0);
                let (mut squares, mut differences) = (0f64, 0f64);
                for (i, (value, made)) in values.iter().zip(made).enumerate() {
                    let difference = (value - made).abs();
                    squares += f64::from(*value) * f64::from(*value);
                    differences += f64::from(difference) * f64::from(difference);
                    largest = largest.max(value.abs());
                    if difference > furthest {
                        (furthest, place) = (difference, i);
                    }
                }
                loss.values += squares;
                loss.differences += differences;
                let index = at + (number * block + place) as u64;
                // What does not matter may go where columns are weighed.
                let weighed = self.importance.is_some();
                if !weighed && largest >= NOTABLE && furthest > 0.5 * largest {
                    return Err(self.ruined(index, values[place], LOST));
                }
                if differences > 0.5 * squares {
                    loss.first.get_or_insert((index, values[place]));
                }
            }
            Ok(())
        })?;
        Ok(loss)
    }

    fn check_finite(&self, floats: &Tensor, at: u64) -> Result<(), WorkerError> {
        if self.allow_nonfinite {
            return Ok(());
        }
        self.with(floats, |values| {
            let limit = match self.to {
                ElementType::Q8K => f32::MAX,
                _ => FURTHEST,
            };
            // NaN is within nothing.
            let within = |v: &f32| v.abs() <= limit;
            match values.iter().position(|v| !within(v)) {
                None => Ok(()),
                Some(i) if values[i].is_finite() => {
                    Err(self.ruined(at + i as u64, values[i], BEYOND))
                }
                Some(i) => Err(self.ruined(at + i as u64, values[i], "cannot hold")),
            }
        })
    }

    /// A block whose scale is beyond its own type's range comes back as infinities and NaN.
    fn check_scales(&self, floats: &Tensor, at: u64, out: &[u8]) -> Result<(), WorkerError> {
        if self.allow_nonfinite {
            return Ok(());
        }
        let (elements, bytes) = (self.to.block_elements(), self.to.block_bytes());
        let bad = out
            .chunks_exact(bytes as usize)
            .position(|block| !scales_are_finite(self.to, block));
        let Some(bad) = bad else {
            return Ok(());
        };
        self.with(floats, |values| {
            let start = bad * elements as usize;
            let block = values[start..][..elements as usize].iter().enumerate();
            let largest = block.max_by(|a, b| a.1.abs().total_cmp(&b.1.abs()));
            let (i, value) = largest.map_or((0, 0.0), |(i, v)| (i, *v));
            let index = at + (start + i) as u64;
            Err(self.ruined(index, value, BEYOND))
        })
    }

    fn with(
        &self,
        floats: &Tensor,
        look: impl FnOnce(&[f32]) -> Result<(), WorkerError>,
    ) -> Result<(), WorkerError> {
        let (storage, _) = floats.storage_and_layout();
        match &*storage {
            Storage::Cpu(CpuStorage::F32(values)) => look(values),
            _ => Ok(()),
        }
    }

    fn ruined(&self, index: u64, value: f32, why: &'static str) -> WorkerError {
        WorkerError::Ruined {
            name: self.tensor.name.clone(),
            index: self.in_tensor(index),
            value,
            to: self.to,
            why,
        }
    }

    /// Where element `index` lies in the whole tensor, of which this may be a slice.
    fn in_tensor(&self, index: u64) -> u64 {
        let Some(slice) = &self.tensor.slice else {
            return index;
        };
        let (elements, bytes) = (self.from.block_elements(), self.from.block_bytes());
        let (at, _) = slice.runs.locate(index / elements * bytes);
        at / bytes * elements + index % elements
    }

    fn candle(&self, source: candle_core::Error) -> WorkerError {
        WorkerError::Convert {
            name: self.tensor.name.clone(),
            from: self.from,
            to: self.to,
            source: Box::new(source),
        }
    }
}

fn put<T: Copy, const N: usize>(values: &[T], out: &mut [u8], bytes: impl Fn(T) -> [u8; N]) {
    for (value, out) in values.iter().zip(out.chunks_exact_mut(N)) {
        out.copy_from_slice(&bytes(*value));
    }
}

fn float(element: ElementType) -> candle_core::Result<DType> {
    use ElementType::{BF16, F8E4M3, F16, F32, F64};
    match (element, plain_dtype(element)) {
        (BF16 | F16 | F32 | F64 | F8E4M3, Some(dtype)) => Ok(dtype),
        _ => candle_core::bail!("{element} is never converted"),
    }
}

/// Whether every scale of a block, where its layout has them, is a number.
fn scales_are_finite(element: ElementType, block: &[u8]) -> bool {
    use ElementType::{Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, Q8_1, Q8K};
    let halves: &[usize] = match element {
        Q4_0 | Q5_0 | Q8_0 => &[0],
        Q4_1 | Q5_1 | Q8_1 | Q4K | Q5K => &[0, 2],
        Q2K => &[80, 82],
        Q3K => &[108],
        Q6K => &[208],
        Q8K => return f32::from_le_bytes([block[0], block[1], block[2], block[3]]).is_finite(),
        _ => &[],
    };
    halves
        .iter()
        .all(|at| f16::from_le_bytes([block[*at], block[at + 1]]).is_finite())
}
