//! CUDA `QTensor`s whose blocks lie in mapped memory: candle's own type and kernels, no copy.
//! candle 0.11.1 has no constructor for that; this file goes the day it has one.
//!
//! A tiny `QTensor` is made through candle's public interface. Three words of it hold its memory's
//! address, padded length and length; they are found by their values, replaced by ours, and what candle
//! then says about the tensor is compared. To let go, its own words are put back, so that candle frees
//! what candle took. Where the words are not found as expected nothing is touched: a typed error.

use std::mem::ManuallyDrop;
use std::sync::{Arc, OnceLock};

use candle_core::Device;
use candle_core::quantized::cuda::QCudaStorage;
use candle_core::quantized::{GgmlDType, QStorage, QTensor};

use super::cuda::PADDING;

const WORD: usize = size_of::<usize>();
/// Blocks of the tensor that is made to be changed.
const SEED_BLOCKS: usize = 3;

const _: () = {
    assert!(size_of::<QCudaStorage>().is_multiple_of(WORD));
    assert!(align_of::<QCudaStorage>() >= WORD);
    assert!(size_of::<QTensor>().is_multiple_of(WORD));
    assert!(align_of::<QTensor>() >= WORD);
    assert!(WORD == size_of::<u64>());
};

/// Why memory cannot become a `QTensor`.
#[derive(Debug)]
pub(super) enum AdoptError {
    /// candle's type is not laid out as this file knows it.
    Layout(String),
    /// candle refused.
    Candle(candle_core::Error),
}

impl From<candle_core::Error> for AdoptError {
    fn from(e: candle_core::Error) -> Self {
        Self::Candle(e)
    }
}

/// Address, padded length in bytes, length in bytes.
type Values = [usize; 3];

/// Which words of a `QCudaStorage` hold its [`Values`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Layout([usize; 3]);

/// A `QTensor` over memory that is not candle's. Dropped without [`Adopted::release`] it is leaked: candle
/// must not free what it did not take.
pub(super) struct Adopted {
    tensor: ManuallyDrop<Arc<QTensor>>,
    layout: Layout,
    seed: Values,
    ours: Values,
}

/// Makes a `QTensor` of `bytes` at `address`, with readable memory up to `padded` bytes from there.
pub(super) fn adopt(
    device: &Device,
    dtype: GgmlDType,
    shape: Vec<usize>,
    address: u64,
    bytes: usize,
    padded: usize,
) -> Result<Adopted, AdoptError> {
    // What `QTensor::new` would refuse, it would drop, with our address inside.
    if shape
        .last()
        .is_none_or(|d| !d.is_multiple_of(dtype.block_size()))
    {
        return Err(AdoptError::Layout(format!(
            "shape {shape:?} has no last dimension of whole {dtype:?} blocks"
        )));
    }
    let layout = layout(device)?;
    let (mut storage, seed) = seed(device, dtype, SEED_BLOCKS)?;
    let QStorage::Cuda(inner) = &mut storage else {
        return Err(AdoptError::Layout(format!("{device:?} is no GPU")));
    };
    let at = |words: &[usize]| layout.0.map(|i| words.get(i).copied());
    let found = at(&words(inner)?);
    if found != seed.map(Some) {
        return Err(AdoptError::Layout(format!(
            "candle's quantized storage holds {found:x?} where {seed:x?} was expected"
        )));
    }
    let ours = [address as usize, padded, bytes];
    // SAFETY: the words are the ones that hold these values (just compared), and `ours` describes
    // memory that is mapped until the `Adopted` is released.
    unsafe { put((&raw mut *inner).cast(), layout, ours) };
    if inner.device_ptr().ok().map(|p| p as u64) != Some(address)
        || inner.storage_size_in_bytes() != bytes
    {
        // SAFETY: as above; these are the values that were there.
        unsafe { put((&raw mut *inner).cast(), layout, seed) };
        return Err(AdoptError::Layout(
            "candle does not see what was put in place".into(),
        ));
    }
    // From here on the storage must not be dropped as it is; `QTensor::new` accepts it, as checked above.
    let tensor = QTensor::new(storage, shape)?;
    Ok(Adopted {
        tensor: ManuallyDrop::new(Arc::new(tensor)),
        layout,
        seed,
        ours,
    })
}

impl Adopted {
    /// One more holder of the tensor.
    pub(super) fn tensor(&self) -> Arc<QTensor> {
        Arc::clone(&self.tensor)
    }

    /// Drops the tensor where nobody else holds it; else gives `self` back.
    pub(super) fn release(mut self) -> Result<(), Self> {
        let Some(tensor) = Arc::get_mut(&mut self.tensor) else {
            return Err(self);
        };
        if let Err(why) = restore(tensor, self.layout, self.ours, self.seed) {
            tracing::error!("a quantized tensor stays mapped until this process ends: {why}");
            return Err(self);
        }
        drop(ManuallyDrop::into_inner(self.tensor));
        Ok(())
    }
}

/// Puts candle's own values back into a tensor, so that dropping it frees what candle took.
fn restore(tensor: &mut QTensor, layout: Layout, ours: Values, seed: Values) -> Result<(), String> {
    let words = words(tensor).map_err(|e| format!("{e:?}"))?;
    // The storage is a field of the tensor, somewhere. Our address alone may stand in padding too, left there by
    // a move: the place is the one where all three words are ours, and where candle sees what is put back.
    let last = layout.0.into_iter().max().unwrap_or_default();
    let starts = 0..words.len().saturating_sub(last);
    for start in starts.filter(|start| layout.0.map(|i| words[start + i]) == ours) {
        let base = (&raw mut *tensor).cast::<usize>();
        // SAFETY: the three words lie in the tensor (`words` has its length) and hold what was put there. The
        // values that go back are those of a live allocation of candle's.
        unsafe { put(base.add(start), layout, seed) };
        if tensor.device_ptr().is_ok_and(|p| p as usize == seed[0])
            && tensor.storage_size_in_bytes() == seed[2]
        {
            return Ok(());
        }
        // SAFETY: as above; these are the values that were there.
        unsafe { put(base.add(start), layout, ours) };
    }
    Err(format!("{ours:x?} was not found in it"))
}

/// Where the words are: found twice, with storages of different lengths, and compared.
fn layout(device: &Device) -> Result<Layout, AdoptError> {
    static KNOWN: OnceLock<Layout> = OnceLock::new();
    if let Some(known) = KNOWN.get() {
        return Ok(*known);
    }
    let mut found: Vec<Layout> = Vec::new();
    // A length may be some other word's value by chance, a counter's for instance: hence the choice.
    for blocks in [3, 7, 31, 127, 1021] {
        let (mut storage, values) = seed(device, GgmlDType::Q4_0, blocks)?;
        let QStorage::Cuda(inner) = &mut storage else {
            return Err(AdoptError::Layout(format!("{device:?} is no GPU")));
        };
        let words = words(inner)?;
        if let [Some(a), Some(b), Some(c)] = values.map(|v| only(&words, v)) {
            found.push(Layout([a, b, c]));
        }
        if let [first, second, ..] = found[..] {
            if first != second {
                break;
            }
            return Ok(*KNOWN.get_or_init(|| first));
        }
    }
    Err(AdoptError::Layout(format!(
        "this build of candle lays quantized storage out in an unknown way (found: {found:?})"
    )))
}

/// The index of the one word with this value.
fn only(words: &[usize], value: usize) -> Option<usize> {
    let mut hits = words.iter().enumerate().filter(|(_, w)| **w == value);
    let (first, _) = hits.next()?;
    hits.next().is_none().then_some(first)
}

/// A small storage of candle's own, and what its three words must hold.
fn seed(
    device: &Device,
    dtype: GgmlDType,
    blocks: usize,
) -> Result<(QStorage, Values), AdoptError> {
    let Device::Cuda(cuda) = device else {
        return Err(AdoptError::Layout(format!("{device:?} is no GPU")));
    };
    let bytes = blocks * dtype.type_size();
    // Not `QStorage::from_data`: its copy from the host waits for the GPU, for each of a model's tensors.
    let zeros = QCudaStorage::zeros(cuda, blocks * dtype.block_size(), dtype)?;
    let storage = QStorage::Cuda(zeros);
    let address = storage.device_ptr()? as usize;
    let padded = bytes + PADDING * dtype.type_size() / dtype.block_size();
    Ok((storage, [address, padded, bytes]))
}

/// Writes the three words.
///
/// # Safety
/// `base` is the start of a `QCudaStorage` laid out as `layout` says, and nobody else refers to it.
unsafe fn put(base: *mut usize, layout: Layout, values: Values) {
    for (i, value) in layout.0.into_iter().zip(values) {
        // SAFETY: the caller's promise; the words are plain integers in that type.
        unsafe { base.add(i).write(value) };
    }
}

/// The words of a value. It has padding and unset parts, which are not values to Rust, so they are copied
/// where the compiler cannot look.
fn words<T>(value: &mut T) -> Result<Vec<usize>, AdoptError> {
    let count = size_of::<T>() / WORD;
    let mut out = vec![0usize; count];
    let (from, to) = ((&raw const *value).cast::<u8>(), out.as_mut_ptr());
    #[cfg(target_arch = "x86_64")]
    // SAFETY: copies `count` words from a live value into a vector of that length; they do not overlap.
    unsafe {
        core::arch::asm!(
            "rep movsb",
            inout("rcx") count * WORD => _,
            inout("rsi") from => _,
            inout("rdi") to => _,
            options(nostack, preserves_flags)
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        core::arch::asm!(
            "2:",
            "cbz {n}, 3f",
            "ldr {word}, [{from}], #8",
            "str {word}, [{to}], #8",
            "sub {n}, {n}, #1",
            "b 2b",
            "3:",
            n = inout(reg) count => _,
            from = inout(reg) from => _,
            to = inout(reg) to => _,
            word = out(reg) _,
            options(nostack, preserves_flags)
        );
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        let _ = (from, to);
        return Err(AdoptError::Layout("not done yet on this processor".into()));
    }
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    Ok(out)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_word_is_found_only_where_it_stands_once() {
        assert_eq!(only(&[1, 2, 3], 2), Some(1));
        assert_eq!(only(&[2, 2, 3], 2), None);
        assert_eq!(only(&[1, 3], 2), None);
    }

    #[test]
    fn words_are_copied_as_they_are() {
        let mut value = [7usize, usize::MAX, 0, 9];
        assert_eq!(words(&mut value).unwrap(), value);
    }
}
