//! Sums over GPUs, by NCCL. One thread of a process talks to it.

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::nccl::safe::{Comm, Id, ReduceOp};
use candle_core::op::BackpropOp;
use candle_core::{CudaStorage, DType, Device, Error, Result, Storage, Tensor, bail};
use half::{bf16, f16};

use crate::parallel::Group;

/// What every rank must be given to find the others: 128 bytes, as hexadecimal digits.
pub(crate) fn new_id() -> Result<String> {
    let id = Id::new().map_err(Error::debug)?;
    Ok(id
        .internal()
        .iter()
        .map(|b| format!("{:02x}", *b as u8))
        .collect())
}

/// One rank among those that share an id.
pub(crate) struct Nccl(Comm);

impl Nccl {
    /// Joins the others. Returns when all have.
    pub(crate) fn join(id: &str, rank: usize, size: usize, device: &Device) -> Result<Self> {
        let digits = id.as_bytes();
        if digits.len() != 256 || !id.is_ascii() {
            bail!("the group's id has {} digits, not 256", digits.len())
        }
        let mut bytes = [0; 128];
        for (i, byte) in bytes.iter_mut().enumerate() {
            let pair = &id[2 * i..2 * i + 2];
            let value = u8::from_str_radix(pair, 16).map_err(Error::wrap)?;
            *byte = value as core::ffi::c_char;
        }
        let Device::Cuda(cuda) = device else {
            bail!("NCCL joins GPUs")
        };
        let comm = Comm::from_rank(cuda.cuda_stream(), rank, size, Id::uninit(bytes));
        Ok(Self(comm.map_err(Error::debug)?))
    }
}

impl Group for Nccl {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn size(&self) -> usize {
        self.0.world_size()
    }

    fn sum(&self, part: &Tensor) -> Result<Tensor> {
        let part = part.contiguous()?;
        let (storage, layout) = part.storage_and_layout();
        let Storage::Cuda(cuda) = &*storage else {
            bail!("the tensor is not on a GPU")
        };
        let (start, end) = layout
            .contiguous_offsets()
            .ok_or_else(|| Error::msg("a tensor that was made contiguous is not").bt())?;
        let device = cuda.device().clone();
        macro_rules! sum {
            ($type:ty) => {{
                let from = cuda.as_cuda_slice::<$type>()?.slice(start..end);
                let mut to = device.alloc_zeros::<$type>(from.len())?;
                self.0
                    .all_reduce(&from, &mut to, &ReduceOp::Sum)
                    .map_err(Error::debug)?;
                CudaStorage::wrap_cuda_slice(to, device.clone())
            }};
        }
        let sum = match part.dtype() {
            DType::BF16 => sum!(bf16),
            DType::F16 => sum!(f16),
            DType::F32 => sum!(f32),
            other => bail!("{other:?} is not summed over GPUs"),
        };
        let shape = part.shape().clone();
        Ok(Tensor::from_storage(
            Storage::Cuda(sum),
            shape,
            BackpropOp::none(),
            false,
        ))
    }
}
