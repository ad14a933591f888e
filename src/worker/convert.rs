//! Conversion of float elements, done by candle on the CPU, so that the results are candle's own to the bit.
//! Works on runs of whole elements: how a tensor is cut into runs does not show.

use candle_core::{CpuStorage, DType, Device, Storage, Tensor};

use crate::manifest::ElementType;

/// Converts whole elements of type `from` into `out`, which must have room for exactly as many of type `to`.
///
/// # Errors
/// candle's own; and when either type is none of F64, F32, F16 and BF16, or the lengths do not fit.
pub(super) fn convert(
    bytes: &[u8],
    from: ElementType,
    to: ElementType,
    out: &mut [u8],
) -> candle_core::Result<()> {
    let (from, to) = (dtype(from)?, dtype(to)?);
    let count = bytes.len() / from.size_in_bytes();
    let tensor = Tensor::from_raw_buffer(bytes, from, &[count], &Device::Cpu)?.to_dtype(to)?;
    if out.len() != count * to.size_in_bytes() || bytes.len() != count * from.size_in_bytes() {
        candle_core::bail!(
            "{} bytes of {from:?} do not fill {} bytes of {to:?}",
            bytes.len(),
            out.len()
        );
    }
    let (storage, _) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(CpuStorage::BF16(values)) => {
            put(values, out, |v| v.to_le_bytes());
        }
        Storage::Cpu(CpuStorage::F16(values)) => {
            put(values, out, |v| v.to_le_bytes());
        }
        Storage::Cpu(CpuStorage::F32(values)) => {
            put(values, out, |v| v.to_le_bytes());
        }
        _ => candle_core::bail!("{to:?} is not a type to convert to"),
    }
    Ok(())
}

fn put<T: Copy, const N: usize>(values: &[T], out: &mut [u8], bytes: impl Fn(T) -> [u8; N]) {
    for (value, out) in values.iter().zip(out.chunks_exact_mut(N)) {
        out.copy_from_slice(&bytes(*value));
    }
}

fn dtype(element: ElementType) -> candle_core::Result<DType> {
    match element {
        ElementType::BF16 => Ok(DType::BF16),
        ElementType::F16 => Ok(DType::F16),
        ElementType::F32 => Ok(DType::F32),
        ElementType::F64 => Ok(DType::F64),
        other => candle_core::bail!("{other} is never converted"),
    }
}
