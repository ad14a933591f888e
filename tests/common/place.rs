//! Where the weights of a test lie: host memory or a GPU, and what rightly differs between the two.
//! Each difference is a property with its reason here; a body says what follows from it.
#![allow(dead_code, reason = "each test binary uses a part of this")]

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{CpuStorage, Device, Storage, Tensor};
use candle_ipc_cache::manifest::ElementType;
use candle_ipc_cache::slab::DeviceId;
use candle_ipc_cache::{AttachError, GetError, IpcCache, IpcConfig, tensors};

use crate::stand_in::{Entry, Model, StandIn, slab_bytes};

/// Memory for weights, and the candle device that computes on it.
pub(crate) struct Place {
    pub(crate) device: Device,
    memory: DeviceId,
}

impl Place {
    /// Host memory.
    pub(crate) fn host() -> Self {
        Self {
            device: Device::Cpu,
            memory: DeviceId::Host,
        }
    }

    /// The memory of the GPU that `device` computes on.
    pub(crate) fn gpu(device: Device) -> Self {
        let memory = tensors::device_id(&device).unwrap();
        assert!(matches!(memory, DeviceId::Cuda(_)));
        Self { device, memory }
    }

    /// The entry of a model, here.
    pub(crate) fn build(&self, model: Model) -> Entry {
        model.build_on(self.memory)
    }

    /// A daemon that holds the model here.
    pub(crate) fn serve(&self, model: Model) -> StandIn {
        StandIn::serving(self.build(model))
    }

    /// An engine of the entry `m`.
    pub(crate) fn attach(&self, daemon: &StandIn) -> IpcCache {
        self.attach_as(&daemon.config("m")).expect("an attach")
    }

    pub(crate) fn attach_as(&self, config: &IpcConfig) -> Result<IpcCache, AttachError> {
        IpcCache::attach(config, &self.device)
    }

    /// candle's own quantized tensor here, of values that lie on the CPU.
    pub(crate) fn quantize(
        &self,
        values: &Tensor,
        dtype: GgmlDType,
    ) -> candle_core::Result<QTensor> {
        if self.is_host() {
            return QTensor::quantize(values, dtype);
        }
        QTensor::quantize_onto(values, dtype, &self.device)
    }

    /// The processor itself can read the memory: bytes are there as `raw`, and candle checks every row number and
    /// takes tensors of no elements.
    pub(crate) fn is_host(&self) -> bool {
        self.memory == DeviceId::Host
    }

    /// Plain tensors lie in the shared memory. candle's CPU storage is a `Vec` of its own, its GPU storage an address.
    pub(crate) fn serves_in_place(&self) -> bool {
        !self.is_host()
    }

    /// Bytes that are copied to serve a plain tensor of `bytes`. candle has no U16, so that is copied everywhere.
    pub(crate) fn copied(&self, element: ElementType, bytes: usize) -> u64 {
        if self.serves_in_place() && element != ElementType::U16 {
            return 0;
        }
        bytes as u64
    }

    /// What a slab for `bytes` takes: on a GPU whole granules.
    pub(crate) fn slab_bytes(&self, bytes: u64) -> u64 {
        slab_bytes(self.memory, bytes)
    }

    /// What a tensor in a slab of `slab` bytes keeps mapped, of an entry of `entry` bytes: a GPU maps an entry's slabs
    /// into one range, which goes as a whole.
    pub(crate) fn kept_mapped(&self, slab: u64, entry: u64) -> u64 {
        if self.is_host() { slab } else { entry }
    }

    /// An engine's copy holds the bytes of a type that candle has no tensor for. A GPU's memory has no other form.
    pub(crate) fn copies_bytes_without_a_type(&self) -> bool {
        self.is_host()
    }

    /// Whether candle multiplies by these blocks here. Its CUDA kernels know ten types.
    pub(crate) fn multiplies(&self, dtype: GgmlDType) -> bool {
        use GgmlDType::{BF16, F16, F32, Q8_1, Q8K};
        self.is_host() || !matches!(dtype, F32 | F16 | BF16 | Q8_1 | Q8K)
    }

    /// Whether candle takes rows out of these blocks here.
    pub(crate) fn embeds(&self, dtype: GgmlDType) -> bool {
        self.is_host() || !matches!(dtype, GgmlDType::Q8_1 | GgmlDType::Q8K)
    }

    /// Lets go of memory whose last tensor is gone. On the host that has happened already; on a GPU nobody hears of a
    /// tensor's end.
    pub(crate) fn sweep(&self) {
        if !self.is_host() {
            tensors::cuda::sweep();
        }
    }

    /// Checks a tensor's bytes as they are stored, which are to be had where the processor can read them.
    pub(crate) fn check_raw(&self, cache: &IpcCache, name: &str, stored: &[u8]) {
        match cache.raw(name) {
            Ok(raw) => assert!(self.is_host() && raw == stored, "{name}"),
            Err(e) => assert!(
                !self.is_host() && matches!(e, GetError::NotReadable { .. }),
                "{e}"
            ),
        }
    }

    /// Where the shared memory of an F32 tensor begins: seen as bytes on the host, as the tensor itself on a GPU.
    pub(crate) fn mapped_address(&self, cache: &IpcCache, name: &str) -> usize {
        if self.is_host() {
            return cache.raw(name).unwrap().as_ptr() as usize;
        }
        let vb = cache.var_builder(candle_core::DType::F32);
        address(&vb.get_unchecked(name).unwrap())
    }

    /// Where a quantized tensor's blocks begin.
    pub(crate) fn blocks_address(&self, tensor: &QTensor) -> usize {
        if self.is_host() {
            return tensor.data().unwrap().as_ptr() as usize;
        }
        tensor.device_ptr().unwrap() as usize
    }
}

/// The bytes in a tensor's own storage, brought to the host.
pub(crate) fn stored_bytes(tensor: &Tensor) -> Vec<u8> {
    macro_rules! bytes {
        ($values:expr) => {
            $values.iter().flat_map(|v| v.to_le_bytes()).collect()
        };
    }
    #[cfg(feature = "cuda")]
    if let Some(bytes) = packed_bytes(tensor) {
        return bytes;
    }
    let tensor = tensor.to_device(&Device::Cpu).unwrap();
    let (storage, _) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        panic!("not on the CPU")
    };
    match storage {
        CpuStorage::U8(v)
        | CpuStorage::F4(v)
        | CpuStorage::F6E2M3(v)
        | CpuStorage::F6E3M2(v)
        | CpuStorage::F8E8M0(v) => v.clone(),
        CpuStorage::U32(v) => bytes!(v),
        CpuStorage::I16(v) => bytes!(v),
        CpuStorage::I32(v) => bytes!(v),
        CpuStorage::I64(v) => bytes!(v),
        CpuStorage::BF16(v) => bytes!(v),
        CpuStorage::F16(v) => bytes!(v),
        CpuStorage::F32(v) => bytes!(v),
        CpuStorage::F64(v) => bytes!(v),
        CpuStorage::F8E4M3(v) => v.iter().map(|v| v.to_bits()).collect(),
    }
}

/// The bytes of the types that candle itself does not bring from a GPU to the host.
#[cfg(feature = "cuda")]
fn packed_bytes(tensor: &Tensor) -> Option<Vec<u8>> {
    use candle_core::cuda::CudaStorageSlice as Slice;
    let (storage, _) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        return None;
    };
    match &storage.slice {
        Slice::F4(s) | Slice::F6E2M3(s) | Slice::F6E3M2(s) | Slice::F8E8M0(s) => {
            Some(s.stream().clone_dtoh(s).unwrap())
        }
        _ => None,
    }
}

/// Where a tensor's F32 or F64 storage begins, in the memory that it lies in.
pub(crate) fn address(tensor: &Tensor) -> usize {
    let (storage, _) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(CpuStorage::F32(v)) => v.as_ptr() as usize,
        Storage::Cpu(CpuStorage::F64(v)) => v.as_ptr() as usize,
        #[cfg(feature = "cuda")]
        Storage::Cuda(storage) => {
            use candle_core::cuda::CudaStorageSlice as Slice;
            use cudarc::driver::DevicePtr;
            match &storage.slice {
                Slice::F32(s) => s.device_ptr(s.stream()).0 as usize,
                Slice::F64(s) => s.device_ptr(s.stream()).0 as usize,
                _ => panic!("neither F32 nor F64"),
            }
        }
        _ => panic!("neither F32 nor F64"),
    }
}
