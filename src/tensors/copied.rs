//! Weights that were copied into memory of candle's own, so that the shared memory can be let go.
//! Each tensor is copied once and served as often as it is asked for.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{Device, Tensor};

use super::{Known, MappedWeights, Plain, TensorError, TensorPart, ggml_dtype, plain_dtype};
use super::{require_ggml, require_plain, shape_of};
use crate::manifest::{Manifest, TensorEntry};

/// Weights in candle's own memory.
pub struct CopiedWeights {
    manifest: Arc<Manifest>,
    device: Device,
    copies: Vec<Held>,
    bytes: AtomicU64,
    /// Plain tensors that were asked for as quantized ones.
    quantized: Known,
}

/// One entry's copy.
enum Held {
    Plain(Tensor),
    Quantized(Arc<QTensor>),
    /// Empty, or of a type or shape that candle has no tensor for.
    Bytes(Vec<u8>),
    /// The same, on a GPU, where its bytes cannot be had either.
    Nothing,
}

impl CopiedWeights {
    /// Copies every entry to `device`, and waits until that is done: `weights` may be dropped then.
    ///
    /// # Errors
    /// When there is no room, or the device fails.
    pub fn of(
        weights: &dyn MappedWeights,
        manifest: Arc<Manifest>,
        device: &Device,
    ) -> Result<Self, TensorError> {
        let mut bytes = 0;
        let mut parts: HashMap<usize, Tensor> = HashMap::new();
        for stack in &manifest.stacks {
            let entry = &manifest.tensors[stack.tensor as usize];
            // Blocks cannot be views of others: there, whole and members are copied each.
            if shape_of(entry).is_err() || plain_dtype(entry.element).is_none() {
                continue;
            }
            let whole = weights.copied(stack.tensor as usize, device)?;
            bytes += entry.bytes;
            for (i, member) in stack.members.iter().enumerate() {
                let part = whole.get(i).map_err(|e| candle(entry, e))?;
                parts.insert(*member as usize, part);
            }
            parts.insert(stack.tensor as usize, whole);
        }
        let mut copies = Vec::with_capacity(manifest.tensors.len());
        for (index, entry) in manifest.tensors.iter().enumerate() {
            if let Some(part) = parts.remove(&index) {
                copies.push(Held::Plain(part));
                continue;
            }
            let held = copy(weights, index, entry, device)?;
            if !matches!(held, Held::Nothing) {
                bytes += entry.bytes;
            }
            copies.push(held);
        }
        device
            .synchronize()
            .map_err(|source| TensorError::Copy { bytes, source })?;
        Ok(Self {
            manifest,
            device: device.clone(),
            copies,
            bytes: AtomicU64::new(bytes),
            quantized: Known::default(),
        })
    }

    /// The entry as a tensor on `device`, in the dtype that [`plain_dtype`] gives for it. Every call on
    /// one device returns the same storage.
    ///
    /// # Errors
    /// As [`MappedWeights::plain`].
    pub fn plain(&self, index: usize, device: &Device) -> Result<Plain, TensorError> {
        let entry = &self.manifest.tensors[index];
        let dtype = require_plain(entry)?;
        let shape = shape_of(entry)?;
        let Held::Plain(tensor) = &self.copies[index] else {
            // Whatever else has a dtype and a shape is empty.
            let tensor = Tensor::zeros(shape, dtype, device).map_err(|e| candle(entry, e))?;
            return Ok(Plain { tensor, copied: 0 });
        };
        if tensor.device().same_device(device) {
            let tensor = tensor.clone();
            return Ok(Plain { tensor, copied: 0 });
        }
        let tensor = tensor.to_device(device).map_err(|e| candle(entry, e))?;
        Ok(Plain {
            tensor,
            copied: entry.bytes,
        })
    }

    /// A part of the entry, as [`MappedWeights::part`]: shares the copy's storage where it lies in one piece.
    ///
    /// # Errors
    /// As [`MappedWeights::plain`].
    pub fn part(
        &self,
        index: usize,
        part: &TensorPart,
        device: &Device,
    ) -> Result<Plain, TensorError> {
        part.of_plain(self.plain(index, device)?, &self.manifest.tensors[index])
    }

    /// The entry as a quantized tensor. A plain one that GGML has a type for is copied once more for that.
    ///
    /// # Errors
    /// As [`MappedWeights::quantized`].
    pub fn quantized(&self, index: usize) -> Result<Arc<QTensor>, TensorError> {
        let entry = &self.manifest.tensors[index];
        let dtype = require_ggml(entry)?;
        let tensor = match &self.copies[index] {
            Held::Quantized(tensor) => return Ok(tensor.clone()),
            Held::Plain(tensor) => tensor,
            // Empty, or candle's own answer to a shape that it does not take.
            Held::Bytes(_) | Held::Nothing => {
                return blocks(entry, dtype, &Aligned::new(entry.bytes), &self.device)
                    .map(Arc::new);
            }
        };
        self.quantized.get_or_make(index, || {
            let mut bytes = Aligned::new(entry.bytes);
            tensor
                .write_bytes(&mut bytes.as_mut_slice())
                .map_err(|e| candle(entry, e))?;
            let tensor = blocks(entry, dtype, &bytes, &self.device)?;
            self.bytes.fetch_add(entry.bytes, Ordering::Relaxed);
            Ok(tensor)
        })
    }

    /// The entry's bytes as they were stored; `None` where the copy cannot be read in place.
    pub fn bytes(&self, index: usize) -> Option<&[u8]> {
        match &self.copies[index] {
            Held::Bytes(bytes) => Some(bytes),
            _ => None,
        }
    }

    /// Bytes that have been copied so far.
    pub fn copied_bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for CopiedWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CopiedWeights")
            .field("tensors", &self.copies.len())
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

fn copy(
    weights: &dyn MappedWeights,
    index: usize,
    entry: &TensorEntry,
    device: &Device,
) -> Result<Held, TensorError> {
    if entry.bytes == 0 {
        return Ok(Held::Bytes(Vec::new()));
    }
    let shape = shape_of(entry).ok();
    if shape.is_some() && plain_dtype(entry.element).is_some() {
        return Ok(Held::Plain(weights.copied(index, device)?));
    }
    let whole_blocks = |dtype: &GgmlDType| {
        let last = shape.as_ref().and_then(|s| s.last());
        last.is_some_and(|d| d.is_multiple_of(dtype.block_size()))
    };
    if let Some(dtype) = ggml_dtype(entry.element).filter(whole_blocks) {
        let mut bytes = Aligned::new(entry.bytes);
        weights.read(index, bytes.as_mut_slice())?;
        let tensor = blocks(entry, dtype, &bytes, device)?;
        return Ok(Held::Quantized(Arc::new(tensor)));
    }
    Ok(weights
        .bytes(index)
        .map_or(Held::Nothing, |bytes| Held::Bytes(bytes.to_vec())))
}

/// A `QTensor` of candle's own with these blocks.
fn blocks(
    entry: &TensorEntry,
    dtype: GgmlDType,
    bytes: &Aligned,
    device: &Device,
) -> Result<QTensor, TensorError> {
    let shape = shape_of(entry)?;
    QStorage::from_data(bytes.as_slice().into(), device, dtype)
        .and_then(|storage| QTensor::new(storage, shape))
        .map_err(|e| candle(entry, e))
}

fn candle(entry: &TensorEntry, source: candle_core::Error) -> TensorError {
    TensorError::Candle {
        name: entry.name.clone(),
        source,
    }
}

/// Bytes at an address that suits every block type: candle asserts that, even where there are none.
struct Aligned {
    words: Vec<u64>,
    len: usize,
}

impl Aligned {
    fn new(len: u64) -> Self {
        let len = len as usize;
        Self {
            words: vec![0; len.div_ceil(8)],
            len,
        }
    }

    fn as_slice(&self) -> &[u8] {
        // SAFETY: the words hold at least `len` bytes, and any byte is a `u8`.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast(), self.len) }
    }

    fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above; any bytes are words, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), self.len) }
    }
}
