//! CPU `QTensor`s whose blocks lie in mapped slabs: candle's own kernels over shared pages.
//! candle adds a private repacked copy of some types at the first forward; the blocks themselves are never copied.

use std::marker::PhantomData;
use std::sync::Arc;

use candle_core::quantized::k_quants::{
    self, BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K,
    BlockQ6K, BlockQ8_0, BlockQ8_1, BlockQ8K, GgmlType,
};
use candle_core::quantized::{GgmlDType, QStorage, QuantizedType};
use candle_core::{CpuStorage, Result, bail};
use half::{bf16, f16};

use super::TensorError;
use super::host::Slab;
use crate::manifest::TensorEntry;

/// Blocks of one tensor inside a mapped slab.
struct MappedBlocks<T> {
    slab: Arc<Slab>,
    offset: usize,
    count: usize,
    blocks: PhantomData<fn() -> T>,
}

/// Storage over the entry's own bytes in `slab`.
pub(super) fn mapped(
    slab: &Arc<Slab>,
    entry: &TensorEntry,
    dtype: GgmlDType,
) -> std::result::Result<QStorage, TensorError> {
    let storage = match dtype {
        GgmlDType::F32 => blocks::<f32>(slab, entry),
        GgmlDType::F16 => blocks::<f16>(slab, entry),
        GgmlDType::BF16 => blocks::<bf16>(slab, entry),
        GgmlDType::Q4_0 => blocks::<BlockQ4_0>(slab, entry),
        GgmlDType::Q4_1 => blocks::<BlockQ4_1>(slab, entry),
        GgmlDType::Q5_0 => blocks::<BlockQ5_0>(slab, entry),
        GgmlDType::Q5_1 => blocks::<BlockQ5_1>(slab, entry),
        GgmlDType::Q8_0 => blocks::<BlockQ8_0>(slab, entry),
        GgmlDType::Q8_1 => blocks::<BlockQ8_1>(slab, entry),
        GgmlDType::Q2K => blocks::<BlockQ2K>(slab, entry),
        GgmlDType::Q3K => blocks::<BlockQ3K>(slab, entry),
        GgmlDType::Q4K => blocks::<BlockQ4K>(slab, entry),
        GgmlDType::Q5K => blocks::<BlockQ5K>(slab, entry),
        GgmlDType::Q6K => blocks::<BlockQ6K>(slab, entry),
        GgmlDType::Q8K => blocks::<BlockQ8K>(slab, entry),
    };
    storage.map_err(|source| TensorError::Candle {
        name: entry.name.clone(),
        source,
    })
}

/// Storage of a tensor without elements.
pub(super) fn empty(dtype: GgmlDType) -> QStorage {
    QStorage::Cpu(dtype.cpu_zeros(0))
}

fn blocks<T: GgmlType + 'static>(slab: &Arc<Slab>, entry: &TensorEntry) -> Result<QStorage> {
    let (offset, bytes) = (entry.offset as usize, entry.bytes as usize);
    let memory = slab.mapping.as_slice();
    if offset
        .checked_add(bytes)
        .is_none_or(|end| end > memory.len())
    {
        bail!("{bytes} bytes at {offset} lie outside their slab")
    }
    if !bytes.is_multiple_of(size_of::<T>()) {
        bail!("{bytes} bytes are not whole blocks of {}", size_of::<T>())
    }
    if !(memory.as_ptr() as usize + offset).is_multiple_of(align_of::<T>()) {
        bail!("blocks at offset {offset} are not aligned")
    }
    Ok(QStorage::Cpu(Box::new(MappedBlocks::<T> {
        slab: slab.clone(),
        offset,
        count: bytes / size_of::<T>(),
        blocks: PhantomData,
    })))
}

impl<T: GgmlType> MappedBlocks<T> {
    fn as_slice(&self) -> &[T] {
        let start = &self.slab.mapping.as_slice()[self.offset..];
        // SAFETY: `blocks` checked that `count` blocks lie in the mapping from `offset` on, aligned for
        // `T`. The mapping is immutable and held by `self`. `T` is one of the types that `mapped` lists:
        // plain integers, halves and floats in C layout without padding, for which any bytes are values.
        unsafe { std::slice::from_raw_parts(start.as_ptr().cast(), self.count) }
    }

    fn bytes(&self) -> usize {
        self.count * size_of::<T>()
    }
}

impl<T: GgmlType> QuantizedType for MappedBlocks<T> {
    fn dtype(&self) -> GgmlDType {
        T::DTYPE
    }

    fn matmul_t(&self, mkn: (usize, usize, usize), lhs: &[f32], dst: &mut [f32]) -> Result<()> {
        k_quants::matmul(mkn, lhs, self.as_slice(), dst)
    }

    fn matmul_t_f16(&self, mkn: (usize, usize, usize), lhs: &[f16], dst: &mut [f16]) -> Result<()> {
        k_quants::matmul_f16(mkn, lhs, self.as_slice(), dst)
    }

    fn embedding(&self, ids: &[u32], rows: usize, hidden: usize) -> Result<CpuStorage> {
        let row_blocks = hidden / T::BLCK_SIZE;
        if !hidden.is_multiple_of(T::BLCK_SIZE) || Some(self.count) != rows.checked_mul(row_blocks)
        {
            bail!(
                "a quantized embedding of {rows} rows of {hidden} over {} blocks of {}",
                self.count,
                T::BLCK_SIZE
            )
        }
        let mut out = vec![0f32; ids.len() * hidden];
        if hidden == 0 {
            return Ok(CpuStorage::F32(out));
        }
        let blocks = self.as_slice();
        for (to, id) in out.chunks_exact_mut(hidden).zip(ids) {
            let row = *id as usize;
            if row >= rows {
                bail!("embedding id {row} is out of range for {rows} rows")
            }
            T::to_float(&blocks[row * row_blocks..][..row_blocks], to);
        }
        Ok(CpuStorage::F32(out))
    }

    fn dequantize(&self, elements: usize) -> Result<CpuStorage> {
        if elements != self.count * T::BLCK_SIZE {
            bail!(
                "{elements} elements asked of {} blocks of {}",
                self.count,
                T::BLCK_SIZE
            )
        }
        let mut out = vec![0f32; elements];
        T::to_float(self.as_slice(), &mut out);
        Ok(CpuStorage::F32(out))
    }

    fn storage_size_in_bytes(&self) -> usize {
        self.bytes()
    }

    fn as_ptr(&self) -> *const u8 {
        self.as_slice().as_ptr().cast()
    }

    fn block_size(&self) -> usize {
        T::BLCK_SIZE
    }

    // candle calls these two on storage that it has made itself and still owns, never through a
    // `QTensor`. They cannot return an error, and the mapped weights must stay as they are.
    fn from_float(&mut self, _: &[f32]) {
        tracing::error!("shared weights are read-only: nothing was quantized into them");
    }

    fn from_float_imatrix(&mut self, _: &[f32], _: &[f32], _: usize) {
        tracing::error!("shared weights are read-only: nothing was quantized into them");
    }

    fn size(&self) -> usize {
        self.bytes()
    }
}
