//! Host weights: candle tensors from slabs that are mapped memory files.
//! Quantized tensors read the shared pages; plain ones are copied, because candle's own storage is a `Vec`.

use std::any::Any;
use std::fmt;
use std::mem::MaybeUninit;
use std::sync::Arc;

use candle_core::op::BackpropOp;
use candle_core::quantized::QTensor;
use candle_core::{CpuStorage, Device, Storage, Tensor};
use rayon::prelude::*;

use super::{Alive, Known, MappedWeights, Plain, TensorError, TensorPart, qtensor_host};
use super::{check_digest, require_ggml, require_plain, shape_of};
use crate::manifest::{Digest, ElementType, Manifest, TensorEntry};
use crate::slab::host::HostMapping;

/// Bytes that one thread copies or hashes at a time.
const CHUNK: usize = 1 << 20;
/// From this many bytes on, more threads than the caller's copy: below, waking them costs more than it saves.
const PARALLEL: usize = 8 << 20;

/// One mapped slab. Tensors that read it in place hold it.
pub(super) struct Slab {
    pub(super) mapping: HostMapping,
    /// Whatever must outlive the mapping's users, for instance the lease on it.
    _held: Arc<dyn Any + Send + Sync>,
}

/// Weights in mapped host slabs.
pub struct HostWeights {
    manifest: Arc<Manifest>,
    slabs: Vec<Arc<Slab>>,
    quantized: Known,
}

impl fmt::Debug for HostWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostWeights")
            .field("slabs", &self.slabs.len())
            .field("tensors", &self.manifest.tensors.len())
            .finish()
    }
}

impl HostWeights {
    /// Takes mapped slabs, one for each that the manifest lists and of the length that it lists.
    /// `held` is kept for as long as anything refers to the memory.
    ///
    /// The manifest must have passed [`Manifest::check`], as every decoded one has.
    pub fn new(
        manifest: Arc<Manifest>,
        slabs: Vec<HostMapping>,
        held: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        let slabs = slabs
            .into_iter()
            .map(|mapping| {
                Arc::new(Slab {
                    mapping,
                    _held: held.clone(),
                })
            })
            .collect();
        Self {
            manifest,
            slabs,
            quantized: Known::default(),
        }
    }

    fn entry_bytes(&self, entry: &TensorEntry) -> &[u8] {
        if entry.bytes == 0 {
            return &[];
        }
        let slab = self.slabs[entry.slab as usize].mapping.as_slice();
        &slab[entry.offset as usize..][..entry.bytes as usize]
    }
}

impl HostWeights {
    /// Bytes of an entry as a tensor of this shape.
    fn tensor(
        entry: &TensorEntry,
        bytes: &[u8],
        shape: Vec<usize>,
        device: &Device,
    ) -> Result<Plain, TensorError> {
        let dtype = require_plain(entry)?;
        let failed = |source| TensorError::Candle {
            name: entry.name.clone(),
            source,
        };
        let tensor = match (device, entry.element) {
            (Device::Cpu, _) => {
                let storage =
                    copied(entry.element, bytes).ok_or_else(|| TensorError::Unsupported {
                        name: entry.name.clone(),
                        element: entry.element,
                    })?;
                Tensor::from_storage(Storage::Cpu(storage), shape, BackpropOp::none(), false)
            }
            (_, ElementType::U16) => {
                Tensor::from_vec(widened(bytes), shape, device).map_err(failed)?
            }
            _ => Tensor::from_raw_buffer(bytes, dtype, &shape, device).map_err(failed)?,
        };
        Ok(Plain {
            tensor,
            copied: bytes.len() as u64,
        })
    }
}

impl MappedWeights for HostWeights {
    fn plain(&self, entry: usize, device: &Device) -> Result<Plain, TensorError> {
        let entry = &self.manifest.tensors[entry];
        require_plain(entry)?;
        Self::tensor(entry, self.entry_bytes(entry), shape_of(entry)?, device)
    }

    fn part(&self, entry: usize, part: &TensorPart, device: &Device) -> Result<Plain, TensorError> {
        let entry = &self.manifest.tensors[entry];
        require_plain(entry)?;
        let (bytes, shape) = (self.entry_bytes(entry), part.shape.clone());
        if part.runs.count == 1 {
            let (start, len) = (part.runs.start as usize, part.runs.run as usize);
            return Self::tensor(entry, &bytes[start..][..len], shape, device);
        }
        Self::tensor(entry, &part.runs.gather(bytes), shape, device)
    }

    fn quantized(&self, index: usize) -> Result<Arc<QTensor>, TensorError> {
        let entry = &self.manifest.tensors[index];
        let dtype = require_ggml(entry)?;
        let shape = shape_of(entry)?;
        self.quantized.get_or_make(index, || {
            let storage = if entry.bytes == 0 {
                qtensor_host::empty(dtype)
            } else {
                let slab = &self.slabs[entry.slab as usize];
                qtensor_host::mapped(slab, entry, dtype)?
            };
            QTensor::new(storage, shape).map_err(|source| TensorError::Candle {
                name: entry.name.clone(),
                source,
            })
        })
    }

    fn bytes(&self, entry: usize) -> Option<&[u8]> {
        Some(self.entry_bytes(&self.manifest.tensors[entry]))
    }

    fn copied(&self, entry: usize, device: &Device) -> Result<Tensor, TensorError> {
        Ok(self.plain(entry, device)?.tensor)
    }

    fn read(&self, entry: usize, into: &mut [u8]) -> Result<(), TensorError> {
        into.copy_from_slice(self.entry_bytes(&self.manifest.tensors[entry]));
        Ok(())
    }

    fn verify(&self) -> Result<(), TensorError> {
        // A stack is its members.
        let tensors = self.manifest.tensors.par_iter().enumerate();
        let own = tensors.filter(|(i, _)| !self.manifest.is_stack(*i));
        own.try_for_each(|(_, entry)| {
            let bytes = self.entry_bytes(entry);
            let found = if bytes.len() < CHUNK {
                Digest::of(bytes)
            } else {
                blake3::Hasher::new().update_rayon(bytes).finalize().into()
            };
            check_digest(entry, found)
        })
    }

    fn sweep(&self) -> Alive {
        // A mapping goes with its last holder: nothing to do here but to count the holders.
        let mut alive = Alive::default();
        for slab in &self.slabs {
            let tensors = Arc::strong_count(slab) - 1;
            if tensors > 0 {
                alive.tensors += tensors;
                alive.bytes += slab.mapping.as_slice().len() as u64;
            }
        }
        alive
    }
}

/// candle's storage for `bytes`, or `None` where candle has none.
fn copied(element: ElementType, bytes: &[u8]) -> Option<CpuStorage> {
    // SAFETY: in each arm every bit pattern is a value: integers, floats, and candle's one-byte
    // float, which is a plain byte inside.
    Some(unsafe {
        match element {
            ElementType::U8 => CpuStorage::U8(copy(bytes)),
            ElementType::U16 => CpuStorage::U32(widened(bytes)),
            ElementType::U32 => CpuStorage::U32(copy(bytes)),
            ElementType::I16 => CpuStorage::I16(copy(bytes)),
            ElementType::I32 => CpuStorage::I32(copy(bytes)),
            ElementType::I64 => CpuStorage::I64(copy(bytes)),
            ElementType::F4 => CpuStorage::F4(copy(bytes)),
            ElementType::F6E2M3 => CpuStorage::F6E2M3(copy(bytes)),
            ElementType::F6E3M2 => CpuStorage::F6E3M2(copy(bytes)),
            ElementType::F8E4M3 => CpuStorage::F8E4M3(copy(bytes)),
            ElementType::F8E8M0 => CpuStorage::F8E8M0(copy(bytes)),
            ElementType::BF16 => CpuStorage::BF16(copy(bytes)),
            ElementType::F16 => CpuStorage::F16(copy(bytes)),
            ElementType::F32 => CpuStorage::F32(copy(bytes)),
            ElementType::F64 => CpuStorage::F64(copy(bytes)),
            _ => return None,
        }
    })
}

fn widened(bytes: &[u8]) -> Vec<u32> {
    bytes
        .par_chunks_exact(2)
        .with_min_len(CHUNK)
        .map(|pair| u32::from(u16::from_ne_bytes([pair[0], pair[1]])))
        .collect()
}

/// Copies whole elements, with every core where there is enough to copy.
///
/// # Safety
/// Every bit pattern must be a value of `T`.
unsafe fn copy<T: Copy + Send>(bytes: &[u8]) -> Vec<T> {
    let count = bytes.len() / size_of::<T>();
    let mut out = Vec::<T>::with_capacity(count);
    let start = out.spare_capacity_mut().as_mut_ptr();
    // SAFETY: the spare capacity holds `count` elements, that is at least this many bytes; bytes have
    // no alignment, and `MaybeUninit` may be uninitialised. Nothing else refers to it meanwhile.
    let to: &mut [MaybeUninit<u8>] =
        unsafe { std::slice::from_raw_parts_mut(start.cast(), count * size_of::<T>()) };
    let from = &bytes[..to.len()];
    let piece = |(to, from): (&mut [MaybeUninit<u8>], &[u8])| {
        // SAFETY: both slices have one length, and a fresh vector does not overlap the mapping.
        unsafe {
            std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_mut_ptr().cast(), from.len());
        }
    };
    if from.len() < PARALLEL {
        piece((to, from));
    } else {
        to.par_chunks_mut(CHUNK)
            .zip(from.par_chunks(CHUNK))
            .for_each(piece);
    }
    // SAFETY: the pieces cover the slice, so all `count` elements have been written, and the caller
    // vouches that what was written are values.
    unsafe { out.set_len(count) };
    out
}
