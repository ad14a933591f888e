//! Checkpoints and plans on disk, and engines of what the worker makes of them.

use std::path::{Path, PathBuf};

use candle_core::Device;
use candle_ipc_cache::checkpoint::{self, Checkpoint};
use candle_ipc_cache::manifest::Manifest;
use candle_ipc_cache::protocol::EpochId;
use candle_ipc_cache::shard::ShardId;
use candle_ipc_cache::slab::host::HostMapping;
use candle_ipc_cache::worker::select::{Selection, ShardPlan};
use candle_ipc_cache::worker::{self, LoadOptions, Loaded, WorkerError};
use candle_ipc_cache::{IpcCache, Trace};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use crate::stand_in::{Entry, StandIn};

/// Name, dtype, shape, bytes.
pub(crate) type Raw = (String, Dtype, Vec<usize>, Vec<u8>);

/// Bytes that are small numbers in every type, so that no value is NaN.
pub(crate) fn bytes(dtype: Dtype, count: usize, seed: u8) -> Vec<u8> {
    let value = |i: usize| (i * 7 + seed as usize) % 64;
    let float = |i: usize| value(i) as f32 / 4.;
    (0..count)
        .flat_map(|i| match dtype {
            Dtype::F32 => float(i).to_le_bytes().to_vec(),
            Dtype::F64 => f64::from(float(i)).to_le_bytes().to_vec(),
            Dtype::BF16 => half::bf16::from_f32(float(i)).to_le_bytes().to_vec(),
            Dtype::F16 => half::f16::from_f32(float(i)).to_le_bytes().to_vec(),
            Dtype::I64 => (value(i) as i64).to_le_bytes().to_vec(),
            Dtype::U32 => (value(i) as u32).to_le_bytes().to_vec(),
            _ => vec![value(i) as u8],
        })
        .collect()
}

pub(crate) fn floats(name: &str, shape: &[usize], seed: u8) -> Raw {
    let count = shape.iter().product();
    let bytes = bytes(Dtype::F32, count, seed);
    (name.into(), Dtype::F32, shape.to_vec(), bytes)
}

pub(crate) fn write(path: &Path, tensors: &[Raw]) {
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        let view = TensorView::new(*dtype, shape.clone(), bytes).unwrap();
        (name, view)
    });
    safetensors::serialize_to_file(views, None, path).unwrap();
}

pub(crate) fn open(path: &Path) -> Checkpoint {
    Checkpoint::open(path, &checkpoint::Options::default()).unwrap()
}

/// A plan of rules, as its file would say them.
pub(crate) fn rules(folder: &Path, text: &str) -> PathBuf {
    let path = folder.join("plan.toml");
    std::fs::write(&path, text).unwrap();
    path
}

/// What a trace selects, and how it cuts.
pub(crate) fn planned(trace: &Trace) -> Selection {
    Selection::default().plan(ShardPlan::of_trace(trace, "t.json").unwrap())
}

pub(crate) fn options(selection: Selection, rank: u16, size: u16) -> LoadOptions {
    LoadOptions {
        name: Some("m".into()),
        selection,
        shard: ShardId::tensor_parallel(rank, size),
        ..LoadOptions::default()
    }
}

pub(crate) fn fill(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<Loaded, WorkerError> {
    worker::fill(checkpoint, options, &|_| {})
}

/// The stored bytes of a tensor.
pub(crate) fn stored(loaded: &Loaded, name: &str) -> Vec<u8> {
    let entry = &loaded.manifest.tensors[loaded.manifest.find(name).unwrap()];
    let slab = &loaded.export.slabs[entry.slab as usize];
    let slab = HostMapping::map(std::os::fd::AsFd::as_fd(slab), None, "slab").unwrap();
    slab.as_slice()[entry.offset as usize..][..entry.bytes as usize].to_vec()
}

/// A daemon that holds what was loaded.
pub(crate) fn serve(loaded: Loaded) -> StandIn {
    StandIn::serving(Entry {
        epoch: EpochId([7; 16]),
        manifest: loaded.manifest,
        manifest_fd: loaded.manifest_fd,
        slabs: loaded.export.slabs,
    })
}

/// An engine of the rank that was loaded.
pub(crate) fn attach(daemon: &StandIn, shard: ShardId) -> IpcCache {
    let config = daemon.config("m").shard(shard);
    IpcCache::attach(&config, &Device::Cpu).unwrap()
}

pub(crate) fn manifest(loaded: &Loaded) -> &Manifest {
    &loaded.manifest
}
