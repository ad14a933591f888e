//! GPU weights: candle tensors over slabs that are mapped into this process's view of a GPU, without a copy.
//! Memory is unmapped by [`sweep`] alone, after the last tensor over it is gone and the GPU has finished.
//!
//! The GPU itself refuses writes to mapped weights. candle's in-place operations (`zero_set`,
//! `slice_set`, an in-place custom op) on one are therefore fatal to this process's use of the GPU, not an
//! error; other engines are not touched. A `Tensor::copy` of a weight keeps the weights mapped while it
//! lives; dropping the weight before its copy makes the copy's own next `copy` fail once.

use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use candle_core::cuda::{CudaStorage, CudaStorageSlice};
use candle_core::op::BackpropOp;
use candle_core::quantized::QTensor;
use candle_core::{CudaDevice, DType, Device, Storage, Tensor};
use cudarc::driver::{CudaContext, CudaStream, DriverError};
use rayon::prelude::*;

use super::qtensor_cuda::{self, Adopted};
use super::{Alive, MappedWeights, Plain, TensorError, TensorPart};
use super::{check_digest, require_ggml, require_plain, shape_of};
use crate::manifest::{ElementType, Manifest, TensorEntry};
use crate::slab::SlabError;
use crate::slab::cuda::{CudaMapping, gpu};

/// Bytes that are brought to the host at a time, to be hashed.
const CHUNK: usize = 8 << 20;
/// candle's CUDA kernels read this many elements past the end of GGML blocks.
pub(super) const PADDING: usize = 512;

/// Weights in GPU slabs.
pub struct CudaWeights {
    manifest: Arc<Manifest>,
    device: Device,
    /// Where tensors start, sorted by slab and offset: made when it is first needed.
    starts: OnceLock<Vec<(u32, u64)>>,
    /// `None` only while this is being dropped.
    mapped: Option<Mapped>,
}

/// A mapping, and everything that may still read it.
struct Mapped {
    mapping: CudaMapping,
    slices: Mutex<Vec<Slice>>,
    /// Entries that were served in place.
    served: Mutex<HashSet<usize>>,
    quantized: Mutex<HashMap<usize, Adopted>>,
    /// Whatever must outlive the mapping, for instance the lease on it.
    held: Arc<dyn Any + Send + Sync>,
}

/// A plain tensor over mapped memory, for as long as anybody refers to it.
struct Slice {
    entry: usize,
    alive: Weak<CudaStream>,
}

/// Mappings whose handles are gone.
static PARKED: Mutex<Vec<Mapped>> = Mutex::new(Vec::new());

/// Unmaps every mapping whose handle and tensors are all gone, and counts what keeps the others.
///
/// Waits for the GPU where there is something to unmap. cudarc tells nobody when a tensor is dropped, so
/// this runs when a handle drops, at attach and at detach, and when the daemon asks for memory back.
pub fn sweep() -> Alive {
    let mut alive = Alive::default();
    // Ends leases, which may wait: not under the lock.
    let mut ended = Vec::new();
    {
        let mut parked = lock(&PARKED);
        for mapped in std::mem::take(&mut *parked) {
            match mapped.close() {
                Ok(held) => ended.push(held),
                Err(mapped) => {
                    alive.tensors += mapped.alive();
                    alive.bytes += mapped.mapping.bytes();
                    parked.push(mapped);
                }
            }
        }
    }
    drop(ended);
    alive
}

impl CudaWeights {
    /// Maps slabs, one for each that the manifest lists, for the GPU that `device` computes on. `held` is
    /// kept for as long as the memory stays mapped.
    ///
    /// The manifest must have passed [`Manifest::check`], as every decoded one has.
    ///
    /// # Errors
    /// When `device` is no GPU, or a slab lies elsewhere, has another length, or cannot be mapped.
    pub fn map(
        manifest: Arc<Manifest>,
        slabs: &[OwnedFd],
        device: &Device,
        held: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self, SlabError> {
        let Device::Cuda(cuda) = device else {
            return Err(SlabError::Device(format!(
                "slabs of a GPU cannot be mapped for {:?}",
                device.location()
            )));
        };
        // What earlier handles left makes room.
        sweep();
        let gpu = gpu(ordinal(cuda))?;
        if slabs.len() != manifest.slabs.len() {
            return Err(SlabError::Device(format!(
                "{} slabs came, the manifest lists {}",
                slabs.len(),
                manifest.slabs.len()
            )));
        }
        let lengths = manifest.slabs.iter().copied();
        let slabs: Vec<_> = slabs.iter().map(AsFd::as_fd).zip(lengths).collect();
        let mapping = CudaMapping::map(&gpu, &slabs)?;
        Ok(Self {
            manifest,
            device: device.clone(),
            starts: OnceLock::new(),
            mapped: Some(Mapped {
                mapping,
                slices: Mutex::default(),
                served: Mutex::default(),
                quantized: Mutex::default(),
                held,
            }),
        })
    }

    /// `device`, where an entry can be served on it as it lies.
    fn in_place_for<'a>(&self, entry: &TensorEntry, device: &'a Device) -> Option<&'a CudaDevice> {
        let here = self.mapped.as_ref()?.mapping.gpu().ordinal;
        match device {
            // The same GPU, not the same candle device: a second `new_cuda(0)` needs no copy either.
            Device::Cuda(cuda) if ordinal(cuda) == here && entry.element != ElementType::U16 => {
                Some(cuda)
            }
            _ => None,
        }
    }

    fn mapped(&self, entry: &TensorEntry) -> Result<&Mapped, TensorError> {
        self.mapped.as_ref().ok_or_else(|| {
            memory(
                entry,
                SlabError::Device("the weights are being unmapped".into()),
            )
        })
    }

    /// Brings an entry's bytes to the host.
    fn read_into(&self, entry: &TensorEntry, into: &mut [u8]) -> Result<(), TensorError> {
        if into.is_empty() {
            return Ok(());
        }
        let mapping = &self.mapped(entry)?.mapping;
        mapping
            .read(entry.slab as usize, entry.offset, into)
            .map_err(|source| memory(entry, source))
    }

    fn in_place(
        &self,
        index: usize,
        dtype: DType,
        cuda: &CudaDevice,
    ) -> Result<Tensor, TensorError> {
        let entry = &self.manifest.tensors[index];
        let shape = shape_of(entry)?;
        let mapped = self.mapped(entry)?;
        let (slab, offset) = match entry.bytes {
            // Where an empty tensor lies is not checked, and does not matter.
            0 => (0, 0),
            _ => (entry.slab as usize, entry.offset),
        };
        let address = mapped
            .mapping
            .address(slab, offset, entry.bytes)
            .map_err(|source| memory(entry, source))?;
        let count = match dtype {
            // candle keeps these as bytes.
            DType::F4 | DType::F6E2M3 | DType::F6E3M2 | DType::F8E8M0 => entry.bytes as usize,
            _ => shape.iter().product(),
        };
        let slice = mapped
            .slice(index, dtype, address, count, cuda)
            .map_err(|source| candle(entry, source))?;
        Ok(tensor_of(slice, shape, cuda))
    }

    fn adopt(&self, entry: &TensorEntry) -> Result<Adopted, TensorError> {
        let dtype = require_ggml(entry)?;
        let shape = shape_of(entry)?;
        let bytes = entry.bytes as usize;
        let tail = if entry.element.is_quantized() {
            PADDING * dtype.type_size() / dtype.block_size()
        } else {
            0
        };
        let refused = |why: String| TensorError::NotInPlace {
            name: entry.name.clone(),
            why,
        };
        let end = entry.offset.saturating_add((bytes + tail) as u64);
        let starts = self.starts();
        // A stack's members begin within it.
        let after = (entry.slab, entry.offset + entry.bytes);
        let next = starts.partition_point(|s| *s < after);
        if starts
            .get(next)
            .is_some_and(|(slab, at)| *slab == entry.slab && *at < end)
        {
            return Err(refused(format!(
                "the {tail} bytes behind it, which candle's kernels read, belong to another tensor"
            )));
        }
        let address = self
            .mapped(entry)?
            .mapping
            .address(entry.slab as usize, entry.offset, (bytes + tail) as u64)
            .map_err(|_| {
                refused(format!(
                    "its slab ends within the {tail} bytes that candle's kernels read behind it"
                ))
            })?;
        qtensor_cuda::adopt(&self.device, dtype, shape, address, bytes, bytes + tail).map_err(|e| {
            match e {
                qtensor_cuda::AdoptError::Layout(why) => refused(why),
                qtensor_cuda::AdoptError::Candle(source) => candle(entry, source),
            }
        })
    }

    fn starts(&self) -> &[(u32, u64)] {
        self.starts.get_or_init(|| {
            let tensors = self.manifest.tensors.iter().filter(|t| t.bytes > 0);
            let mut starts: Vec<_> = tensors.map(|t| (t.slab, t.offset)).collect();
            starts.sort_unstable();
            starts
        })
    }
}

impl MappedWeights for CudaWeights {
    fn plain(&self, index: usize, device: &Device) -> Result<Plain, TensorError> {
        let entry = &self.manifest.tensors[index];
        let dtype = require_plain(entry)?;
        if let Some(cuda) = self.in_place_for(entry, device) {
            let tensor = self.in_place(index, dtype, cuda)?;
            return Ok(Plain { tensor, copied: 0 });
        }
        let shape = shape_of(entry)?;
        let mut bytes = vec![0; entry.bytes as usize];
        self.read_into(entry, &mut bytes)?;
        let tensor = if entry.element == ElementType::U16 {
            let pairs = bytes.chunks_exact(2);
            let wide: Vec<u32> = pairs
                .map(|p| u32::from(u16::from_ne_bytes([p[0], p[1]])))
                .collect();
            Tensor::from_vec(wide, shape, device)
        } else {
            Tensor::from_raw_buffer(&bytes, dtype, &shape, device)
        };
        Ok(Plain {
            tensor: tensor.map_err(|source| candle(entry, source))?,
            copied: entry.bytes,
        })
    }

    fn part(&self, index: usize, part: &TensorPart, device: &Device) -> Result<Plain, TensorError> {
        let entry = &self.manifest.tensors[index];
        let dtype = require_plain(entry)?;
        // candle's views count elements, which types of less than a byte have no addresses for.
        let packed = entry.element.block_elements() > 1;
        if !packed {
            return part.of_plain(self.plain(index, device)?, entry);
        }
        let mut bytes = vec![0; entry.bytes as usize];
        self.read_into(entry, &mut bytes)?;
        let mine = part.runs.gather(&bytes);
        let tensor = Tensor::from_raw_buffer(&mine, dtype, &part.shape, device);
        Ok(Plain {
            tensor: tensor.map_err(|source| candle(entry, source))?,
            copied: part.runs.bytes(),
        })
    }

    fn quantized(&self, index: usize) -> Result<Arc<QTensor>, TensorError> {
        let entry = &self.manifest.tensors[index];
        if entry.bytes == 0 {
            let empty = || {
                let nothing = Tensor::zeros(shape_of(entry)?, DType::F32, &Device::Cpu)?;
                QTensor::quantize_onto(&nothing, require_ggml(entry)?, &self.device)
            };
            return empty()
                .map(Arc::new)
                .map_err(|source| candle(entry, source));
        }
        let mut known = lock(&self.mapped(entry)?.quantized);
        if let Some(adopted) = known.get(&index) {
            return Ok(adopted.tensor());
        }
        let adopted = self.adopt(entry)?;
        let tensor = adopted.tensor();
        known.insert(index, adopted);
        lock(&self.mapped(entry)?.served).insert(index);
        Ok(tensor)
    }

    fn bytes(&self, _: usize) -> Option<&[u8]> {
        None
    }

    fn copied(&self, index: usize, device: &Device) -> Result<Tensor, TensorError> {
        let tensor = self.plain(index, device)?.tensor;
        let entry = &self.manifest.tensors[index];
        let Some(cuda) = self.in_place_for(entry, device) else {
            return Ok(tensor);
        };
        // Not `Tensor::copy`: its copy would live on the slice's own context, and count as a use.
        let copy = || {
            let (storage, _) = tensor.storage_and_layout();
            let Storage::Cuda(storage) = &*storage else {
                candle_core::bail!("not on a GPU")
            };
            let slice = clone_onto(&storage.slice, &cuda.cuda_stream())
                .map_err(candle_core::Error::wrap)?;
            Ok(tensor_of(slice, tensor.dims().to_vec(), cuda))
        };
        copy().map_err(|source| candle(entry, source))
    }

    fn read(&self, index: usize, into: &mut [u8]) -> Result<(), TensorError> {
        self.read_into(&self.manifest.tensors[index], into)
    }

    fn verify(&self) -> Result<(), TensorError> {
        // A stack is its members.
        let tensors = self.manifest.tensors.par_iter().enumerate();
        let own = tensors.filter(|(i, _)| !self.manifest.is_stack(*i));
        own.try_for_each(|(_, entry)| {
            let mapping = &self.mapped(entry)?.mapping;
            let mut hasher = blake3::Hasher::new();
            let mut buffer = vec![0; CHUNK.min(entry.bytes as usize)];
            let mut done = 0;
            while done < entry.bytes {
                let len = CHUNK.min((entry.bytes - done) as usize);
                mapping
                    .read(entry.slab as usize, entry.offset + done, &mut buffer[..len])
                    .map_err(|source| memory(entry, source))?;
                hasher.update(&buffer[..len]);
                done += len as u64;
            }
            check_digest(entry, hasher.finalize().into())
        })
    }

    fn sweep(&self) -> Alive {
        sweep();
        let Some(mapped) = &self.mapped else {
            return Alive::default();
        };
        let tensors = mapped.alive();
        Alive {
            tensors,
            // One range: it is unmapped as a whole.
            bytes: if tensors > 0 {
                mapped.mapping.bytes()
            } else {
                0
            },
        }
    }

    fn let_go(&self) -> Option<u64> {
        let gone = self.mapped.as_ref()?.let_go();
        let bytes = gone.iter().map(|index| self.manifest.tensors[*index].bytes);
        Some(bytes.sum())
    }
}

impl Drop for CudaWeights {
    fn drop(&mut self) {
        lock(&PARKED).extend(self.mapped.take());
        sweep();
    }
}

impl fmt::Debug for CudaWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaWeights")
            .field("slabs", &self.manifest.slabs.len())
            .field("tensors", &self.manifest.tensors.len())
            .finish_non_exhaustive()
    }
}

impl Mapped {
    /// A slice over an entry's mapped memory, for work on `cuda`'s stream.
    fn slice(
        &self,
        entry: usize,
        dtype: DType,
        address: u64,
        count: usize,
        cuda: &CudaDevice,
    ) -> candle_core::Result<CudaStorageSlice> {
        // A slice frees its memory when dropped. The driver refuses that for mapped memory, and cudarc
        // keeps the refusal in the slice's context, for the next call to trip over. So each has a context
        // of its own: the same primary context underneath.
        let context =
            CudaContext::new(self.mapping.gpu().ordinal).map_err(candle_core::Error::wrap)?;
        // SAFETY: the memory is written by nobody and not freed by its slices, so there is nothing to
        // order between streams.
        unsafe { context.disable_event_tracking() };
        // SAFETY: candle's stream is of the same primary context. The storage that will hold this slice
        // holds the candle device after it, and that holds the stream.
        let stream = unsafe { context.wrap_borrowed_stream(cuda.cuda_stream().cu_stream()) };
        {
            let mut slices = lock(&self.slices);
            if slices.len() == slices.capacity() {
                slices.retain(|s| s.alive.strong_count() > 0);
            }
            slices.push(Slice {
                entry,
                alive: Arc::downgrade(&stream),
            });
        }
        lock(&self.served).insert(entry);
        macro_rules! over {
            ($($name:ident),*) => {
                match dtype {
                    // SAFETY: `count` elements of this type lie at `address`, aligned to their size and
                    // readable by the GPU. The mapping outlives the slice: it goes only when the
                    // slice's stream, which was noted above, has no holder any more.
                    $(DType::$name => CudaStorageSlice::$name(unsafe { stream.upgrade_device_ptr(address, count) }),)*
                    other => candle_core::bail!("no storage of {other:?} over mapped memory"),
                }
            };
        }
        Ok(over!(
            U8, U32, I16, I32, I64, BF16, F16, F32, F64, F8E4M3, F6E2M3, F6E3M2, F4, F8E8M0
        ))
    }

    /// How many tensors read this memory. Lets go of quantized ones that nobody else holds.
    fn alive(&self) -> usize {
        let mut slices = lock(&self.slices);
        slices.retain(|s| s.alive.strong_count() > 0);
        let mut quantized = lock(&self.quantized);
        for (index, adopted) in std::mem::take(&mut *quantized) {
            if let Err(adopted) = adopted.release() {
                quantized.insert(index, adopted);
            }
        }
        slices.len() + quantized.len()
    }

    /// The entries that were served in place and that nobody refers to any more.
    fn let_go(&self) -> HashSet<usize> {
        self.alive();
        let mut gone = lock(&self.served).clone();
        for slice in lock(&self.slices).iter() {
            gone.remove(&slice.entry);
        }
        for index in lock(&self.quantized).keys() {
            gone.remove(index);
        }
        gone
    }

    /// Unmaps, or gives `self` back where tensors are alive. Returns what was held with the mapping.
    #[allow(clippy::result_large_err)]
    fn close(self) -> Result<Arc<dyn Any + Send + Sync>, Self> {
        if self.alive() > 0 {
            return Err(self);
        }
        // The counts were read without ordering: what other threads did before they let go comes first.
        fence(Ordering::Acquire);
        // Where the GPU cannot be waited for now, it is tried again at the next sweep.
        if let Err(e) = self.mapping.synchronize() {
            tracing::error!("shared weights stay mapped for now: {e}");
            return Err(self);
        }
        let bytes = self.mapping.bytes();
        match self.mapping.unmap() {
            Ok(()) => tracing::debug!("unmapped {bytes} bytes of shared weights"),
            Err(e) => tracing::error!("{bytes} bytes of shared weights stay mapped: {e}"),
        }
        Ok(self.held)
    }
}

/// The GPU's number in this process. candle's own device ids tell two devices on one GPU apart.
fn ordinal(cuda: &CudaDevice) -> usize {
    cuda.cuda_stream().context().ordinal()
}

fn tensor_of(slice: CudaStorageSlice, shape: Vec<usize>, cuda: &CudaDevice) -> Tensor {
    let storage = Storage::Cuda(CudaStorage {
        slice,
        device: cuda.clone(),
    });
    Tensor::from_storage(storage, shape, BackpropOp::none(), false)
}

fn clone_onto(
    slice: &CudaStorageSlice,
    stream: &Arc<CudaStream>,
) -> Result<CudaStorageSlice, DriverError> {
    macro_rules! each {
        ($($name:ident),*) => {
            match slice {
                $(CudaStorageSlice::$name(s) => CudaStorageSlice::$name(stream.clone_dtod(s)?),)*
            }
        };
    }
    Ok(each!(
        U8, U32, I16, I32, I64, BF16, F16, F32, F64, F8E4M3, F6E2M3, F6E3M2, F4, F8E8M0
    ))
}

fn candle(entry: &TensorEntry, source: candle_core::Error) -> TensorError {
    TensorError::Candle {
        name: entry.name.clone(),
        source,
    }
}

fn memory(entry: &TensorEntry, source: SlabError) -> TensorError {
    TensorError::Memory {
        name: entry.name.clone(),
        source,
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
