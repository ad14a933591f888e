//! What the GPU tests share: a GPU to oneself, slabs and entries with known bytes, and child processes.

use std::any::Any;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};
use candle_ipc_cache::manifest::{ElementType, Manifest};
use candle_ipc_cache::slab::cuda::{CudaMapping, GRANULARITY, Gpu, gpus};
use candle_ipc_cache::slab::{self, CHUNK, DeviceId, Export, SlabError};
use candle_ipc_cache::socket::Connection;
use candle_ipc_cache::tensors::MappedWeights;
use candle_ipc_cache::tensors::cuda::CudaWeights;

pub(crate) use crate::bodies::noise;
use crate::stand_in::Model;

/// How long another process may take.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// What a child process is to do.
pub const ROLE: &str = "CANDLE_CACHE_TEST_ROLE";

/// The first GPU, and the right to use it alone: several tests look at its free memory.
pub fn gpu() -> Option<(Gpu, MutexGuard<'static, ()>)> {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    match gpus() {
        Ok(gpus) => match gpus.into_iter().next() {
            Some(gpu) => return Some((gpu, alone)),
            None => println!("skipped: no GPU (the driver shows none)"),
        },
        Err(e) => println!("skipped: no GPU ({e})"),
    }
    None
}

/// The same, with candle on it.
pub fn engine() -> Option<(Gpu, Device, MutexGuard<'static, ()>)> {
    let (gpu, alone) = gpu()?;
    if cfg!(not(feature = "cuda")) {
        println!("skipped: candle was built without CUDA (--features cuda)");
        return None;
    }
    Some((gpu, Device::new_cuda(0).unwrap(), alone))
}

pub fn padded(len: u64) -> u64 {
    len.next_multiple_of(GRANULARITY)
}

/// Slabs with these bytes at their starts, filled by two lanes side by side.
pub fn export(id: DeviceId, contents: &[Vec<u8>]) -> Export {
    let lengths: Vec<u64> = contents.iter().map(|c| padded(c.len() as u64)).collect();
    let writer = slab::writer(id, &lengths).unwrap();
    std::thread::scope(|scope| {
        for half in 0..2 {
            let writer = &writer;
            scope.spawn(move || {
                let mut lane = writer.lane().unwrap();
                let pieces = contents.iter().enumerate().flat_map(|(slab, bytes)| {
                    bytes
                        .chunks(CHUNK)
                        .enumerate()
                        .map(move |(i, piece)| (slab, i, piece))
                });
                for (slab, i, piece) in pieces.filter(|(_, i, _)| i % 2 == half) {
                    lane.buffer().unwrap()[..piece.len()].copy_from_slice(piece);
                    lane.send(piece.len(), slab, (i * CHUNK) as u64).unwrap();
                }
            });
        }
    });
    writer.finish().unwrap()
}

pub fn map(gpu: &Gpu, fds: &[OwnedFd], lengths: &[u64]) -> Result<CudaMapping, SlabError> {
    let slabs: Vec<_> = fds
        .iter()
        .map(AsFd::as_fd)
        .zip(lengths.iter().copied())
        .collect();
    CudaMapping::map(gpu, &slabs)
}

pub fn read(mapping: &CudaMapping, slab: usize, len: u64) -> Vec<u8> {
    let mut out = vec![0xEE; len as usize];
    mapping.read(slab, 0, &mut out).unwrap();
    out
}

pub fn free(gpu: &Gpu) -> u64 {
    gpu.memory().unwrap().0
}

/// Free memory, once it has come back to within 8 MiB of `wanted`. The driver may take a moment.
pub fn free_again(gpu: &Gpu, wanted: u64) -> u64 {
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        let now = free(gpu);
        if now + (8 << 20) >= wanted || Instant::now() > end {
            return now;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Open descriptors. There may be fewer later, never more: an earlier test's lease may still be closing its socket.
pub fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// An entry made for a test: its manifest, and its slabs.
pub struct Entry {
    pub manifest: Arc<Manifest>,
    pub export: Export,
}

pub type Content<'a> = (&'a str, ElementType, &'a [u64], Vec<u8>);

/// Lays tensors out as the worker does, 512 elements of zeros behind each that holds blocks.
pub fn entry(id: DeviceId, contents: &[Content]) -> Entry {
    let mut model = Model::new("test");
    for (name, element, shape, bytes) in contents {
        model = model.tensor(name, *element, shape, bytes.clone());
    }
    let (mut manifest, export) = model.fill(id);
    let encoded = manifest.encode(Vec::new()).unwrap();
    Entry {
        manifest: Arc::new(Manifest::decode(&encoded).unwrap()),
        export,
    }
}

impl Entry {
    pub fn map(&self, device: &Device) -> CudaWeights {
        self.try_map(device, Arc::new(())).unwrap()
    }

    pub fn try_map(
        &self,
        device: &Device,
        held: Arc<dyn Any + Send + Sync>,
    ) -> Result<CudaWeights, SlabError> {
        CudaWeights::map(self.manifest.clone(), &self.export.slabs, device, held)
    }

    pub fn find(&self, name: &str) -> usize {
        self.manifest.find(name).unwrap()
    }
}

pub fn floats(len: usize, seed: u64) -> Vec<f32> {
    noise(len, seed)
        .into_iter()
        .map(|b| f32::from(b) / 128.0 - 1.0)
        .collect()
}

pub fn bytes_of_floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// One square F32 matrix called `w`.
pub fn square(id: DeviceId, n: usize) -> (Entry, Vec<f32>) {
    let values = floats(n * n, n as u64);
    let shape = [n as u64, n as u64];
    let entry = entry(
        id,
        &[("w", ElementType::F32, &shape, bytes_of_floats(&values))],
    );
    (entry, values)
}

pub fn plain(weights: &CudaWeights, index: usize, device: &Device) -> Tensor {
    let plain = weights.plain(index, device).unwrap();
    assert_eq!(plain.copied, 0, "a copy was made");
    plain.tensor
}

pub fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap()
}

/// A child of this test program that plays `role` and sees `visible` GPUs, and a connection to it.
pub fn child(role: &str, visible: Option<&str>) -> (Child, Connection) {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    let (ours, theirs) = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "a_child_process_plays_its_role", "--nocapture"])
        .env(ROLE, role)
        .stdin(Stdio::from(theirs));
    if let Some(visible) = visible {
        command.env("CUDA_VISIBLE_DEVICES", visible);
    }
    let child = command.spawn().unwrap();
    (child, Connection::from_fd(ours, Path::new("the child")))
}

pub fn send(to: &Connection, lengths: &[u64], fds: &[OwnedFd]) {
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    to.send(&lengths, &fds, PATIENCE).unwrap();
}

pub fn receive(from: &Connection) -> (Vec<u64>, Vec<OwnedFd>) {
    from.receive(PATIENCE).unwrap()
}
