//! candle tensors over mapped slabs: the seam between devices.
//! Stored element types are matched with candle's here; a type that candle lacks is an error by name.

use std::any::Any;
use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, DeviceLocation, Tensor};

use crate::manifest::{Digest, ElementType, Manifest, TensorEntry};
use crate::shard::{Cut, Runs};
use crate::slab::host::HostMapping;
use crate::slab::{DeviceId, SlabError};

pub mod copied;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(not(feature = "cuda"))]
#[path = "tensors/dummy_cuda.rs"]
pub mod cuda;
pub mod host;
#[cfg(feature = "cuda")]
mod qtensor_cuda;
mod qtensor_host;

/// An epoch's weights, mapped read-only into this process.
///
/// An entry is named by its index into [`crate::manifest::Manifest::tensors`].
pub trait MappedWeights: Send + Sync {
    /// The entry as a tensor on `device`, in the dtype that [`plain_dtype`] gives for it.
    ///
    /// # Errors
    /// When candle has no such dtype, the entry holds GGML blocks, or the device refuses.
    fn plain(&self, entry: usize, device: &Device) -> Result<Plain, TensorError>;

    /// A part of the entry as a contiguous tensor on `device`: a view where it lies in one piece and the memory can be
    /// read in place, otherwise a copy.
    ///
    /// # Errors
    /// As [`MappedWeights::plain`].
    fn part(&self, entry: usize, part: &TensorPart, device: &Device) -> Result<Plain, TensorError>;

    /// The entry as a quantized tensor over the mapped memory. While one is alive, every call for
    /// the same entry returns that one.
    ///
    /// # Errors
    /// When the entry's type is no GGML type, or its shape is none that candle takes.
    fn quantized(&self, entry: usize) -> Result<Arc<QTensor>, TensorError>;

    /// The entry's bytes as they are stored; `None` where this process cannot read them in place.
    fn bytes(&self, entry: usize) -> Option<&[u8]>;

    /// A copy of the entry in memory of candle's own on `device`: synchronize that before the weights are
    /// let go.
    ///
    /// # Errors
    /// As [`MappedWeights::plain`], and when there is no room.
    fn copied(&self, entry: usize, device: &Device) -> Result<Tensor, TensorError>;

    /// Writes the entry's bytes, as they are stored, to `into`, which has their length.
    ///
    /// # Errors
    /// When the memory cannot be reached.
    fn read(&self, entry: usize, into: &mut [u8]) -> Result<(), TensorError>;

    /// Computes the digest of every entry's bytes and compares it with the manifest's.
    ///
    /// # Errors
    /// [`TensorError::Damaged`] names the first entry that differs.
    fn verify(&self) -> Result<(), TensorError>;

    /// Gives back memory that nothing refers to any more, and says what is still referred to.
    fn sweep(&self) -> Alive;

    /// Bytes of the entries that were served in place, as plain or quantized tensors, and that no tensor refers to
    /// any more; `None` where that cannot be known.
    fn let_go(&self) -> Option<u64> {
        None
    }
}

/// A tensor, and what making it took.
#[derive(Debug)]
pub struct Plain {
    /// The tensor.
    pub tensor: Tensor,
    /// Bytes that were copied for it; zero where it lies in the mapped memory.
    pub copied: u64,
}

/// One rank's slice of an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorPart {
    /// How the entry is cut.
    pub cut: Cut,
    /// The slice's shape.
    pub shape: Vec<usize>,
    /// Where it lies among the entry's bytes.
    pub runs: Runs,
}

impl TensorPart {
    /// The slice of a tensor that holds the entry: shares its storage where it lies in one piece.
    ///
    /// # Errors
    /// candle's own.
    pub fn of(&self, tensor: &Tensor) -> candle_core::Result<Tensor> {
        let Cut { dim, part } = self.cut;
        let len = self.shape[dim];
        tensor
            .narrow(dim, part.rank as usize * len, len)?
            .contiguous()
    }

    /// As [`TensorPart::of`], with what it took.
    fn of_plain(&self, plain: Plain, entry: &TensorEntry) -> Result<Plain, TensorError> {
        let whole = plain.tensor;
        let tensor = self.of(&whole).map_err(|source| TensorError::Candle {
            name: entry.name.clone(),
            source,
        })?;
        let viewed = self.runs.count <= 1;
        let copied = if viewed { 0 } else { self.runs.bytes() };
        Ok(Plain {
            tensor,
            copied: plain.copied + copied,
        })
    }
}

/// What still refers to mapped memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Alive {
    /// Tensors.
    pub tensors: usize,
    /// Bytes of the slabs that those tensors lie in.
    pub bytes: u64,
}

/// Why an entry cannot be had as a tensor.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TensorError {
    /// candle has no dtype for it.
    #[error(
        "tensor `{name}` is stored as {element}, which candle has no dtype for: its bytes are there as \
         `IpcCache::raw(\"{name}\")`"
    )]
    Unsupported {
        /// The tensor.
        name: String,
        /// Its stored type.
        element: ElementType,
    },
    /// It holds GGML blocks and was asked for as a plain tensor.
    #[error(
        "tensor `{name}` is stored as {element} blocks, not as a plain tensor: ask for it through \
         `IpcCache::quantized()` or `IpcCache::maybe_quantized()`, or let plain requests be answered with \
         dequantized tensors (`IpcConfig::dequantize(true)`)"
    )]
    Quantized {
        /// The tensor.
        name: String,
        /// Its stored type.
        element: ElementType,
    },
    /// It was asked for as a `QTensor`, and its type is none of GGML's.
    #[error(
        "tensor `{name}` is stored as {element}, which is no GGML type: ask for it through `IpcCache::var_builder()`, \
         or for its bytes as `IpcCache::raw(\"{name}\")`"
    )]
    NotGgml {
        /// The tensor.
        name: String,
        /// Its stored type.
        element: ElementType,
    },
    /// Its shape is too large for this machine's numbers.
    #[error("tensor `{name}` has shape {shape:?}, whose strides this machine cannot count")]
    Shape {
        /// The tensor.
        name: String,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// It cannot be a `QTensor` in the memory that it lies in.
    #[error(
        "tensor `{name}` cannot be a `QTensor` where it lies: {why}; use the releases of candle and of this crate \
         that go together, or load the model from its file"
    )]
    NotInPlace {
        /// The tensor.
        name: String,
        /// What stands against it.
        why: String,
    },
    /// Its memory cannot be reached.
    #[error("tensor `{name}`: {source}")]
    Memory {
        /// The tensor.
        name: String,
        /// What went wrong.
        source: SlabError,
    },
    /// The copies did not arrive.
    #[error("copying {bytes} bytes of weights: {source}")]
    Copy {
        /// Bytes of all tensors.
        bytes: u64,
        /// candle's answer.
        source: candle_core::Error,
    },
    /// candle refused.
    #[error("tensor `{name}`: {source}")]
    Candle {
        /// The tensor.
        name: String,
        /// candle's answer.
        source: candle_core::Error,
    },
    /// Its bytes are not the ones that were loaded.
    #[error(
        "the bytes of tensor `{name}` have digest {found}, its manifest says {wanted}: the memory is damaged; \
         remove the entry with `candle-cache unload` and load it again"
    )]
    Damaged {
        /// The tensor.
        name: String,
        /// Digest of the mapped bytes.
        found: Digest,
        /// Digest in the manifest.
        wanted: Digest,
    },
}

impl From<TensorError> for candle_core::Error {
    fn from(e: TensorError) -> Self {
        Self::wrap(e)
    }
}

/// The memory that `device` computes on, by the identity that every process gives it.
///
/// # Errors
/// When its driver does not answer, or `device` is of a kind that has no slabs.
pub fn device_id(device: &Device) -> Result<DeviceId, SlabError> {
    match device.location() {
        DeviceLocation::Cpu => Ok(DeviceId::Host),
        DeviceLocation::Cuda { gpu_id } => Ok(crate::slab::cuda::gpu(gpu_id)?.id),
        other => Err(SlabError::Device(format!(
            "{other:?} has no memory that can be shared: give `Device::Cpu` or a CUDA device"
        ))),
    }
}

/// Maps an epoch's slabs, one for each that the manifest lists, for `device`. `held` is kept for as long as
/// anything refers to the memory.
///
/// The manifest must have passed [`Manifest::check`], as every decoded one has.
///
/// # Errors
/// When a slab lies elsewhere than on `device`, has another length than the manifest says, could still be
/// changed by others, or cannot be mapped.
pub fn map(
    manifest: Arc<Manifest>,
    slabs: &[OwnedFd],
    device: &Device,
    held: Arc<dyn Any + Send + Sync>,
) -> Result<Box<dyn MappedWeights>, SlabError> {
    if !device.is_cpu() {
        let weights = cuda::CudaWeights::map(manifest, slabs, device, held)?;
        return Ok(Box::new(weights));
    }
    if slabs.len() != manifest.slabs.len() {
        return Err(SlabError::Device(format!(
            "{} slabs came, the manifest lists {}",
            slabs.len(),
            manifest.slabs.len()
        )));
    }
    let slabs = (manifest.slabs.iter().zip(slabs).enumerate())
        .map(|(i, (bytes, fd))| HostMapping::map(fd.as_fd(), Some(*bytes), &format!("slab {i}")))
        .collect::<Result<_, _>>()?;
    Ok(Box::new(host::HostWeights::new(manifest, slabs, held)))
}

/// The candle dtype in which a plain tensor of this stored type is served; `None`: not as a plain tensor.
///
/// It is the stored type itself but for U16, which candle reads as U32.
pub fn plain_dtype(element: ElementType) -> Option<DType> {
    Some(match element {
        ElementType::U8 => DType::U8,
        ElementType::U16 | ElementType::U32 => DType::U32,
        ElementType::I16 => DType::I16,
        ElementType::I32 => DType::I32,
        ElementType::I64 => DType::I64,
        ElementType::F4 => DType::F4,
        ElementType::F6E2M3 => DType::F6E2M3,
        ElementType::F6E3M2 => DType::F6E3M2,
        ElementType::F8E4M3 => DType::F8E4M3,
        ElementType::F8E8M0 => DType::F8E8M0,
        ElementType::BF16 => DType::BF16,
        ElementType::F16 => DType::F16,
        ElementType::F32 => DType::F32,
        ElementType::F64 => DType::F64,
        _ => return None,
    })
}

/// The GGML type in which an entry of this stored type is served as a `QTensor`; `None`: not as one.
///
/// The plain floats that GGUF files mix with blocks (F32, F16, BF16) are GGML types too.
pub fn ggml_dtype(element: ElementType) -> Option<GgmlDType> {
    Some(match element {
        ElementType::F32 => GgmlDType::F32,
        ElementType::F16 => GgmlDType::F16,
        ElementType::BF16 => GgmlDType::BF16,
        ElementType::Q4_0 => GgmlDType::Q4_0,
        ElementType::Q4_1 => GgmlDType::Q4_1,
        ElementType::Q5_0 => GgmlDType::Q5_0,
        ElementType::Q5_1 => GgmlDType::Q5_1,
        ElementType::Q8_0 => GgmlDType::Q8_0,
        ElementType::Q8_1 => GgmlDType::Q8_1,
        ElementType::Q2K => GgmlDType::Q2K,
        ElementType::Q3K => GgmlDType::Q3K,
        ElementType::Q4K => GgmlDType::Q4K,
        ElementType::Q5K => GgmlDType::Q5K,
        ElementType::Q6K => GgmlDType::Q6K,
        ElementType::Q8K => GgmlDType::Q8K,
        _ => return None,
    })
}

/// The plain dtype of an entry, or the error that says how to get at it otherwise.
///
/// # Errors
/// [`TensorError::Quantized`] or [`TensorError::Unsupported`].
pub fn require_plain(entry: &TensorEntry) -> Result<DType, TensorError> {
    let (name, element) = (entry.name.clone(), entry.element);
    plain_dtype(element).ok_or(if element.is_quantized() {
        TensorError::Quantized { name, element }
    } else {
        TensorError::Unsupported { name, element }
    })
}

/// The GGML type of an entry, or the error that says how to get at it otherwise.
///
/// # Errors
/// [`TensorError::NotGgml`].
pub fn require_ggml(entry: &TensorEntry) -> Result<GgmlDType, TensorError> {
    ggml_dtype(entry.element).ok_or_else(|| TensorError::NotGgml {
        name: entry.name.clone(),
        element: entry.element,
    })
}

/// An entry's shape as candle counts it.
///
/// # Errors
/// When strides over it overflow, which an empty tensor's other dimensions can bring about.
pub fn shape_of(entry: &TensorEntry) -> Result<Vec<usize>, TensorError> {
    let strides = entry
        .shape
        .iter()
        .filter(|d| **d > 0)
        .try_fold(1u64, |n, d| n.checked_mul(*d));
    strides
        .filter(|n| isize::try_from(*n).is_ok())
        .map(|_| entry.shape.iter().map(|d| *d as usize).collect())
        .ok_or_else(|| TensorError::Shape {
            name: entry.name.clone(),
            shape: entry.shape.clone(),
        })
}

/// Compares the digest over an entry's bytes with the manifest's.
fn check_digest(entry: &TensorEntry, found: Digest) -> Result<(), TensorError> {
    if found == entry.stored {
        return Ok(());
    }
    Err(TensorError::Damaged {
        name: entry.name.clone(),
        found,
        wanted: entry.stored,
    })
}

/// The `QTensor`s that somebody holds, by entry.
#[derive(Default)]
struct Known(Mutex<HashMap<usize, Weak<QTensor>>>);

impl Known {
    /// The entry's `QTensor`, made where nobody holds one. Two threads that ask at once get one.
    fn get_or_make(
        &self,
        entry: usize,
        make: impl FnOnce() -> Result<QTensor, TensorError>,
    ) -> Result<Arc<QTensor>, TensorError> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(tensor) = known.get(&entry).and_then(Weak::upgrade) {
            return Ok(tensor);
        }
        let tensor = Arc::new(make()?);
        known.insert(entry, Arc::downgrade(&tensor));
        Ok(tensor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_ggml_type_has_candles_block_size() {
        for element in ElementType::ALL {
            if let Some(dtype) = ggml_dtype(*element) {
                assert_eq!(
                    dtype.block_size() as u64,
                    element.block_elements(),
                    "{element}"
                );
                assert_eq!(dtype.type_size() as u64, element.block_bytes(), "{element}");
            }
            assert!(
                !element.is_quantized() || ggml_dtype(*element).is_some(),
                "{element}"
            );
        }
    }

    #[test]
    fn exactly_five_types_have_no_tensor_at_all() {
        let none: Vec<_> = ElementType::ALL
            .iter()
            .filter(|e| plain_dtype(**e).is_none() && ggml_dtype(**e).is_none())
            .map(|e| e.as_str())
            .collect();
        assert_eq!(none, ["BOOL", "I8", "U64", "F8_E5M2", "C64"]);
    }

    #[test]
    fn an_empty_tensor_with_uncountable_strides_is_an_error() {
        let entry = TensorEntry {
            name: "e".into(),
            element: ElementType::F32,
            shape: vec![0, 1 << 40, 1 << 40],
            cut: None,
            slab: 0,
            offset: 0,
            bytes: 0,
            source: Digest::default(),
            stored: Digest::default(),
        };
        assert!(matches!(shape_of(&entry), Err(TensorError::Shape { .. })));
    }
}
