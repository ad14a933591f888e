//! The worker, on real files: what lies in the slabs afterwards, and what it refuses to publish.
//! The daemon's side of a connection is played by the tests.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use candle_ipc_cache::checkpoint::{Checkpoint, SourceFile, SourceTensor};
use candle_ipc_cache::key::{Freshness, Receipt};
use candle_ipc_cache::manifest::{ALIGNMENT, Digest, ElementType, MAX_SLABS, Manifest};
use candle_ipc_cache::protocol::{EntryId, EpochId, Progress, Refusal, Reply, Request};
use candle_ipc_cache::slab::host::{HostMapping, HostWriter};
use candle_ipc_cache::slab::{CHUNK, DeviceId, Export, Lane, SlabError, SlabWriter};
use candle_ipc_cache::socket::{Connection, SocketError};
use candle_ipc_cache::worker::alias::{self, Aliases};
use candle_ipc_cache::worker::plan::Plan;
use candle_ipc_cache::worker::taken::Taken;
use candle_ipc_cache::worker::{
    self, LoadOptions, Loaded, TargetDtype, WorkerError, already_held, fill, publish, stream,
};
use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{RngCore, SeedableRng};
use safetensors::Dtype;
use safetensors::tensor::{SafeTensors, TensorView};

/// Hang guard of the played daemon.
const WAIT: Duration = Duration::from_secs(60);

type Raw = (&'static str, Dtype, Vec<usize>, Vec<u8>);

fn random(seed: u64, bytes: usize) -> Vec<u8> {
    let mut out = vec![0; bytes];
    StdRng::seed_from_u64(seed).fill_bytes(&mut out);
    out
}

fn element(dtype: Dtype) -> ElementType {
    let text = format!("{dtype:?}").replace("F8_", "F8").replace('_', "");
    let same = |e: &&ElementType| e.as_str().replace('_', "").eq_ignore_ascii_case(&text);
    *ElementType::ALL
        .iter()
        .find(same)
        .expect("a dtype of safetensors")
}

/// Writes safetensors files into `folder`, and opens them as one checkpoint.
fn checkpoint(folder: &Path, files: &[Vec<Raw>]) -> Checkpoint {
    let mut paths = Vec::new();
    for (i, tensors) in files.iter().enumerate() {
        let path = folder.join(format!("model-{i}.safetensors"));
        let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
            let view = TensorView::new(*dtype, shape.clone(), bytes).expect("a tensor");
            (*name, view)
        });
        safetensors::serialize_to_file(views, None, &path).expect("file written");
        paths.push(path);
    }
    open(&paths)
}

fn open(paths: &[PathBuf]) -> Checkpoint {
    let mut out = empty_checkpoint();
    for (index, path) in paths.iter().enumerate() {
        let bytes = std::fs::read(path).expect("file read");
        let (header, metadata) = SafeTensors::read_metadata(&bytes).expect("a header");
        for (name, info) in metadata.tensors() {
            let (start, end) = info.data_offsets;
            out.tensors.push(SourceTensor {
                name,
                element: element(info.dtype),
                shape: info.shape.iter().map(|d| *d as u64).collect(),
                file: index,
                offset: (8 + header + start) as u64,
                bytes: (end - start) as u64,
                slice: None,
            });
        }
        out.files.push(source_file(path));
    }
    out.tensors.sort_by(|a, b| a.name.cmp(&b.name));
    out
}

fn source_file(path: &Path) -> SourceFile {
    let file = File::open(path).expect("file opened");
    let receipt = Receipt::of(&file, path).expect("receipt");
    SourceFile { file, receipt }
}

fn empty_checkpoint() -> Checkpoint {
    Checkpoint {
        name: "model".into(),
        files: Vec::new(),
        tensors: Vec::new(),
        small_files: vec![("config.json".into(), b"{\"a\": Infinity}".to_vec())],
        attributes: vec![("format".into(), "pt".into())],
    }
}

fn options(change: impl FnOnce(&mut LoadOptions)) -> LoadOptions {
    let mut options = LoadOptions::default();
    change(&mut options);
    options
}

fn taken<'a>(checkpoint: &'a Checkpoint, options: &LoadOptions) -> Taken<'a> {
    Taken::of(checkpoint, options).expect("a selection that fits")
}

fn plan_of(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<Plan, WorkerError> {
    Plan::new(&taken(checkpoint, options), options, &Aliases::none())
}

fn quiet(_: Progress) {}

fn memory(fd: impl AsFd) -> HostMapping {
    HostMapping::map(fd.as_fd(), None, "memory").expect("sealed memory")
}

/// candle's own conversion of a whole tensor.
fn converted(bytes: &[u8], from: DType, to: DType) -> Vec<u8> {
    let count = bytes.len() / from.size_in_bytes();
    let tensor = Tensor::from_raw_buffer(bytes, from, &[count], &Device::Cpu)
        .and_then(|t| t.to_dtype(to))
        .expect("candle converts");
    let (storage, _) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(CpuStorage::BF16(v)) => v.iter().flat_map(|v| v.to_le_bytes()).collect(),
        Storage::Cpu(CpuStorage::F16(v)) => v.iter().flat_map(|v| v.to_le_bytes()).collect(),
        Storage::Cpu(CpuStorage::F32(v)) => v.iter().flat_map(|v| v.to_le_bytes()).collect(),
        _ => panic!("{to:?} is no target"),
    }
}

/// What a tensor must look like in its slab: type and bytes.
fn expected(t: &SourceTensor, source: &[u8], dtype: TargetDtype) -> (ElementType, Vec<u8>) {
    let from = match t.element {
        ElementType::F64 => DType::F64,
        ElementType::F32 => DType::F32,
        ElementType::F16 => DType::F16,
        ElementType::BF16 => DType::BF16,
        other => return (other, source.to_vec()),
    };
    let (element, to) = match dtype {
        TargetDtype::Stored => return (t.element, source.to_vec()),
        TargetDtype::Bf16 => (ElementType::BF16, DType::BF16),
        TargetDtype::F16 => (ElementType::F16, DType::F16),
        TargetDtype::F32 => (ElementType::F32, DType::F32),
    };
    (element, converted(source, from, to))
}

/// Loads, checks everything that must hold of any load, and returns the result.
fn load(checkpoint: &Checkpoint, options: &LoadOptions) -> Loaded {
    let loaded = fill(checkpoint, options, &quiet).expect("the load succeeds");
    let table = memory(&loaded.manifest_fd);
    let manifest = Manifest::decode(table.as_slice()).expect("a manifest that holds");
    assert_eq!(manifest, loaded.manifest);
    let names: std::collections::BTreeSet<_> = manifest.names().collect();
    assert_eq!(names.len(), checkpoint.tensors.len());

    let slabs: Vec<_> = loaded.export.slabs.iter().map(memory).collect();
    let lengths: Vec<_> = slabs.iter().map(|s| s.as_slice().len() as u64).collect();
    assert_eq!(lengths, manifest.slabs);
    for t in &checkpoint.tensors {
        let mut source = vec![0; t.bytes as usize];
        checkpoint.read_at(t, 0, &mut source).expect("tensor read");
        let (element, stored) = expected(t, &source, options.dtype);
        let found = &manifest.tensors[manifest.find(&t.name).expect("the name is there")];
        assert_eq!(found.element, element, "{}", t.name);
        assert_eq!(found.shape, t.shape, "{}", t.name);
        assert_eq!(found.source, Digest::of(&source), "{}", t.name);
        assert_eq!(found.stored, Digest::of(&stored), "{}", t.name);
        if found.bytes > 0 {
            let slab = slabs[found.slab as usize].as_slice();
            let there = &slab[found.offset as usize..(found.offset + found.bytes) as usize];
            assert!(there == stored, "the bytes of {} differ", t.name);
        }
    }
    for file in &manifest.files {
        let bytes = &table.as_slice()[file.offset as usize..(file.offset + file.bytes) as usize];
        let given = checkpoint.small_files.iter().find(|f| f.0 == file.name);
        assert_eq!(given.map(|f| f.1.as_slice()), Some(bytes));
    }
    assert_eq!(manifest.files.len(), checkpoint.small_files.len());
    assert_eq!(manifest.attributes, checkpoint.attributes);
    loaded
}

#[test]
fn the_bytes_in_the_slabs_are_those_of_the_files() {
    let folder = tempfile::tempdir().expect("folder");
    let large = CHUNK + 12_344;
    let first: Vec<Raw> = vec![
        ("a.bf16", Dtype::BF16, vec![7, 9], random(1, 126)),
        ("b.large", Dtype::U8, vec![large], random(2, large)),
        ("c.f8", Dtype::F8_E4M3, vec![33], random(3, 33)),
        ("d.bool", Dtype::BOOL, vec![3], vec![1, 0, 1]),
    ];
    let second: Vec<Raw> = vec![
        ("a.i64", Dtype::I64, vec![2, 2], random(4, 32)),
        ("e.f64", Dtype::F64, vec![5], random(5, 40)),
        ("f.u16", Dtype::U16, vec![5], random(6, 10)),
        ("g.f8", Dtype::F8_E8M0, vec![4], random(7, 4)),
    ];
    let checkpoint = checkpoint(folder.path(), &[first, second]);
    let loaded = load(&checkpoint, &LoadOptions::default());
    assert_eq!(loaded.name, "model");
    assert_eq!(loaded.export.device, DeviceId::Host);
    assert_eq!(loaded.export.slabs.len(), 1);
    let key = &loaded.manifest.key;
    assert_eq!(
        (key.dtype.as_str(), key.recipe.as_str()),
        ("stored", "none")
    );
    assert_eq!(key.sources.len(), 2);
    assert!(key.sources[1].same_file(&checkpoint.files[1].receipt));
}

#[test]
fn files_that_candle_saved_come_back_as_the_same_tensors() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("saved.safetensors");
    let weight = Tensor::randn(0f32, 1., (17, 31), &Device::Cpu).expect("tensor");
    let ids = Tensor::arange(0u32, 11, &Device::Cpu).expect("tensor");
    let tensors = [("weight".to_string(), weight.clone()), ("ids".into(), ids)];
    candle_core::safetensors::save(&tensors.into_iter().collect(), &path).expect("saved");
    let loaded = load(&open(&[path]), &LoadOptions::default());
    let slab = memory(&loaded.export.slabs[0]);
    let entry = &loaded.manifest.tensors[loaded.manifest.find("weight").expect("there")];
    let bytes = &slab.as_slice()[entry.offset as usize..][..entry.bytes as usize];
    let back = Tensor::from_raw_buffer(bytes, DType::F32, &[17, 31], &Device::Cpu).expect("tensor");
    let values = |t: &Tensor| t.to_vec2::<f32>().expect("values");
    assert_eq!(values(&back), values(&weight));
}

#[test]
fn converted_floats_are_candles_own_to_the_bit() {
    let folder = tempfile::tempdir().expect("folder");
    // Random bits hold every kind of NaN, infinity and subnormal. The large ones need several chunks,
    // whose ends differ before and after the conversion.
    let (half, single, double) = (CHUNK / 2 + 777, CHUNK / 4 + 777, CHUNK / 8 + 777);
    let tensors: Vec<Raw> = vec![
        ("bf16", Dtype::BF16, vec![half], random(1, 2 * half)),
        ("bool", Dtype::BOOL, vec![3], vec![1, 0, 1]),
        ("f16", Dtype::F16, vec![half], random(2, 2 * half)),
        ("f32", Dtype::F32, vec![single], random(3, 4 * single)),
        ("f64", Dtype::F64, vec![double], random(4, 8 * double)),
        ("f8", Dtype::F8_E5M2, vec![5], random(5, 5)),
        ("i64", Dtype::I64, vec![5], random(6, 40)),
        ("none", Dtype::F32, vec![0, 4], vec![]),
        ("scalar", Dtype::F32, vec![], random(7, 4)),
    ];
    let checkpoint = checkpoint(folder.path(), &[tensors]);
    for dtype in [TargetDtype::Bf16, TargetDtype::F16, TargetDtype::F32] {
        let loaded = load(&checkpoint, &options(|o| o.dtype = dtype));
        assert_eq!(loaded.manifest.key.dtype, dtype.to_string());
        assert_eq!(dtype.to_string().parse::<TargetDtype>().ok(), Some(dtype));
    }
    assert!("q4k".parse::<TargetDtype>().is_err());
}

#[test]
fn quantized_blocks_stay_what_they_are_under_every_dtype() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("blocks");
    let norm = random(2, 128);
    let blocks = random(1, 4 * 144);
    std::fs::write(&path, [norm.as_slice(), &blocks].concat()).expect("file written");
    let mut checkpoint = empty_checkpoint();
    checkpoint.files.push(source_file(&path));
    let tensor = |name: &str, element, shape: &[u64], offset, bytes| SourceTensor {
        name: name.into(),
        element,
        shape: shape.to_vec(),
        file: 0,
        offset,
        bytes,
        slice: None,
    };
    checkpoint.tensors = vec![
        tensor("norm", ElementType::F32, &[32], 0, 128),
        tensor("q", ElementType::Q4K, &[2, 512], 128, 576),
    ];
    let loaded = load(&checkpoint, &options(|o| o.dtype = TargetDtype::F16));
    let elements: Vec<_> = loaded.manifest.tensors.iter().map(|t| t.element).collect();
    assert_eq!(elements, [ElementType::F16, ElementType::Q4K]);
}

#[test]
fn equal_tensors_share_one_storage_and_count_once() {
    let folder = tempfile::tempdir().expect("folder");
    let large = 300_000;
    let embeddings = random(1, large);
    let mut middle = embeddings.clone();
    middle[large / 2] ^= 1;
    let files: Vec<Vec<Raw>> = vec![
        vec![
            ("embed", Dtype::F16, vec![500, 300], embeddings.clone()),
            ("lm_head", Dtype::F16, vec![500, 300], embeddings.clone()),
            ("almost", Dtype::F16, vec![500, 300], middle),
            ("reshaped", Dtype::F16, vec![300, 500], embeddings.clone()),
            (
                "other_type",
                Dtype::BF16,
                vec![500, 300],
                embeddings.clone(),
            ),
        ],
        vec![
            ("bias.1", Dtype::F32, vec![8], vec![0; 32]),
            ("bias.2", Dtype::F32, vec![8], vec![0; 32]),
            ("bias.3", Dtype::F32, vec![8], random(9, 32)),
            ("a_third_head", Dtype::F16, vec![500, 300], embeddings),
        ],
    ];
    let checkpoint = checkpoint(folder.path(), &files);
    let loaded = load(&checkpoint, &LoadOptions::default());
    let manifest = &loaded.manifest;
    let aliases: BTreeMap<_, _> = manifest
        .aliases
        .iter()
        .map(|a| {
            (
                a.name.as_str(),
                manifest.tensors[a.tensor as usize].name.as_str(),
            )
        })
        .collect();
    let wanted = [
        ("bias.2", "bias.1"),
        ("embed", "a_third_head"),
        ("lm_head", "a_third_head"),
    ];
    assert_eq!(aliases, wanted.into_iter().collect());
    let bytes: u64 = manifest.tensors.iter().map(|t| t.bytes).sum();
    assert_eq!(bytes, 4 * large as u64 + 64);
    assert!(manifest.memory_bytes() < bytes + 6 * ALIGNMENT);
}

#[test]
fn converted_copies_share_one_storage_too() {
    let folder = tempfile::tempdir().expect("folder");
    let values = random(1, 40_000);
    let tensors: Vec<Raw> = vec![
        ("a", Dtype::F32, vec![10_000], values.clone()),
        ("b", Dtype::F32, vec![10_000], values),
    ];
    let checkpoint = checkpoint(folder.path(), &[tensors]);
    let loaded = load(&checkpoint, &options(|o| o.dtype = TargetDtype::Bf16));
    assert_eq!(loaded.manifest.aliases.len(), 1);
    assert_eq!(loaded.manifest.memory_bytes(), 20_000);
}

#[test]
fn small_slabs_keep_the_files_order_and_a_larger_tensor_gets_its_own() {
    let folder = tempfile::tempdir().expect("folder");
    let names = ["t0", "t1", "t2", "t3", "t4", "t5"];
    let tensors: Vec<Raw> = names
        .iter()
        .enumerate()
        .map(|(i, name)| {
            let bytes = if i == 3 { 10_000 } else { 1_000 };
            (*name, Dtype::U8, vec![bytes], random(i as u64, bytes))
        })
        .collect();
    let checkpoint = checkpoint(folder.path(), &[tensors]);
    let loaded = load(&checkpoint, &options(|o| o.slab_bytes = Some(2_048)));
    let manifest = &loaded.manifest;
    let mut by_place: Vec<_> = manifest.tensors.iter().collect();
    by_place.sort_by_key(|t| (t.slab, t.offset));
    let order: Vec<_> = by_place.iter().map(|t| t.name.as_str()).collect();
    assert_eq!(order, names);
    assert_eq!(manifest.slabs, [2_024, 1_000, 10_000, 2_024]);
}

#[test]
fn tensors_without_elements_take_no_room_and_scalars_do() {
    let folder = tempfile::tempdir().expect("folder");
    let tensors: Vec<Raw> = vec![
        ("empty", Dtype::F32, vec![0, 3], vec![]),
        ("other_empty", Dtype::F32, vec![0, 3], vec![]),
        ("scalar", Dtype::F32, vec![], random(1, 4)),
    ];
    let both = checkpoint(folder.path(), &[tensors]);
    let loaded = load(&both, &LoadOptions::default());
    assert!(loaded.manifest.aliases.is_empty());
    assert_eq!(loaded.manifest.slabs, [4]);

    let only: Vec<Raw> = vec![("empty", Dtype::F32, vec![0, 3], vec![])];
    let none = checkpoint(folder.path(), &[only]);
    let loaded = load(&none, &LoadOptions::default());
    assert!(loaded.manifest.slabs.is_empty());
}

#[test]
fn a_checkpoint_without_tensors_is_refused() {
    let nothing = fill(&empty_checkpoint(), &LoadOptions::default(), &quiet);
    assert!(matches!(nothing, Err(WorkerError::Manifest(_))));
}

/// Fills while `change` is done to the file at the moment when `when` first holds.
fn fill_while(
    bytes: usize,
    when: impl Fn(&Progress) -> bool + Sync,
    change: impl Fn(&mut File) + Sync,
) -> Result<Loaded, WorkerError> {
    let folder = tempfile::tempdir().expect("folder");
    let tensors: Vec<Raw> = vec![
        ("a", Dtype::U8, vec![bytes], random(1, bytes)),
        ("b", Dtype::U8, vec![bytes], random(2, bytes)),
    ];
    let checkpoint = checkpoint(folder.path(), &[tensors]);
    let path = folder.path().join("model-0.safetensors");
    let changed = AtomicUsize::new(0);
    let result = fill(&checkpoint, &LoadOptions::default(), &|p| {
        if when(&p) && changed.fetch_add(1, Ordering::Relaxed) == 0 {
            let file = File::options().read(true).write(true).open(&path);
            change(&mut file.expect("file opened"));
        }
    });
    assert_ne!(changed.into_inner(), 0, "the file was never changed");
    result
}

fn flip(file: &mut File) {
    let mut byte = [0];
    file.seek(SeekFrom::End(-1)).expect("seek");
    file.read_exact(&mut byte).expect("read");
    file.seek(SeekFrom::End(-1)).expect("seek");
    file.write_all(&[!byte[0]]).expect("write");
}

#[test]
fn a_file_that_changes_while_it_is_read_is_refused() {
    for bytes in [1_000, 2 * CHUNK] {
        // Before the first byte is read; and after the last.
        for edge in [|p: &Progress| p.done == 0, |p: &Progress| p.done == p.total] {
            let result = fill_while(bytes, |p| p.phase == "load" && edge(p), flip);
            let error = result.expect_err("nothing is published").to_string();
            assert!(error.contains("model-0.safetensors"), "{error}");
        }
    }
}

#[test]
fn a_file_that_shrinks_while_it_is_read_is_a_typed_error() {
    for phase in ["plan", "load"] {
        let shrink = |file: &mut File| file.set_len(2_000).expect("file cut");
        let result = fill_while(CHUNK, |p| p.phase == phase, shrink);
        assert!(matches!(result, Err(WorkerError::Checkpoint(_))), "{phase}");
    }
}

#[test]
fn equal_tensors_that_change_together_after_they_were_found_equal_are_refused() {
    let folder = tempfile::tempdir().expect("folder");
    let same = random(1, 100);
    let tensors: Vec<Raw> = vec![
        ("a", Dtype::U8, vec![100], same.clone()),
        ("b", Dtype::U8, vec![100], same),
    ];
    let checkpoint = checkpoint(folder.path(), &[tensors]);
    let path = folder.path().join("model-0.safetensors");
    let result = fill(&checkpoint, &LoadOptions::default(), &|p| {
        if p.phase == "load" && p.done == 0 {
            let mut bytes = std::fs::read(&path).expect("file read");
            for t in &checkpoint.tensors {
                bytes[t.offset as usize] ^= 1;
            }
            std::fs::write(&path, bytes).expect("file written");
        }
    });
    assert!(matches!(result, Err(WorkerError::Changed { name }) if name == "a"));
}

/// Counts lanes that live at the same time, and the longest write, before a real host writer.
struct Counting {
    inner: HostWriter,
    lanes: AtomicUsize,
    most: AtomicUsize,
    longest: AtomicUsize,
}

struct CountingLane<'a> {
    inner: Box<dyn Lane + 'a>,
    of: &'a Counting,
}

impl SlabWriter for Counting {
    fn lane(&self) -> Result<Box<dyn Lane + '_>, SlabError> {
        let now = self.lanes.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(now, Ordering::SeqCst);
        let inner = self.inner.lane()?;
        Ok(Box::new(CountingLane { inner, of: self }))
    }

    fn finish(self: Box<Self>) -> Result<Export, SlabError> {
        Box::new(self.inner).finish()
    }
}

impl Lane for CountingLane<'_> {
    fn buffer(&mut self) -> Result<&mut [u8], SlabError> {
        self.inner.buffer()
    }

    fn send(&mut self, len: usize, slab: usize, offset: u64) -> Result<(), SlabError> {
        self.of.longest.fetch_max(len, Ordering::SeqCst);
        self.inner.send(len, slab, offset)
    }
}

impl Drop for CountingLane<'_> {
    fn drop(&mut self) {
        self.of.lanes.fetch_sub(1, Ordering::SeqCst);
    }
}

#[test]
fn memory_is_bounded_by_the_threads_and_not_by_the_model() {
    let folder = tempfile::tempdir().expect("folder");
    let names: Vec<&'static str> = vec!["a", "b", "c", "d", "e", "f", "g", "h"];
    let tensors: Vec<Raw> = names
        .into_iter()
        .enumerate()
        .map(|(i, name)| {
            (
                name,
                Dtype::U8,
                vec![CHUNK + 1],
                random(i as u64, CHUNK + 1),
            )
        })
        .collect();
    let checkpoint = checkpoint(folder.path(), &[tensors]);
    let plan = plan_of(&checkpoint, &LoadOptions::default()).expect("plan");
    for threads in [1, 3, 100] {
        let writer = Counting {
            inner: HostWriter::new(&plan.slabs).expect("slabs"),
            lanes: AtomicUsize::new(0),
            most: AtomicUsize::new(0),
            longest: AtomicUsize::new(0),
        };
        stream::fill_slabs(&checkpoint, &plan, &writer, threads, &|_| Ok(())).expect("filled");
        let most = writer.most.load(Ordering::SeqCst);
        assert!(
            (1..=threads.min(8)).contains(&most),
            "{most} lanes of {threads}"
        );
        assert_eq!(writer.lanes.load(Ordering::SeqCst), 0);
        assert!(writer.longest.load(Ordering::SeqCst) <= CHUNK);
    }
}

#[test]
fn thirty_thousand_tensors_of_one_shape_are_no_trouble() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("many");
    let count = 30_000u64;
    // Ten thousand different values, each three times.
    let bytes: Vec<u8> = (0..count)
        .flat_map(|i| ((i % 10_000) as u32).to_le_bytes())
        .collect();
    std::fs::write(&path, bytes).expect("file written");
    let mut checkpoint = empty_checkpoint();
    checkpoint.files.push(source_file(&path));
    checkpoint.tensors = (0..count)
        .map(|i| SourceTensor {
            name: format!("t{i:05}"),
            element: ElementType::U32,
            shape: vec![1],
            file: 0,
            offset: 4 * i,
            bytes: 4,
            slice: None,
        })
        .collect();
    let loaded = load(&checkpoint, &LoadOptions::default());
    assert_eq!(loaded.manifest.tensors.len(), 10_000);
    assert_eq!(loaded.manifest.aliases.len(), 20_000);
    assert_eq!(
        loaded.manifest.find("t25000"),
        loaded.manifest.find("t05000")
    );
}

#[test]
fn progress_goes_through_the_phases_in_order_and_ends_complete() {
    let folder = tempfile::tempdir().expect("folder");
    let tensors: Vec<Raw> = vec![
        ("a", Dtype::U8, vec![CHUNK], random(1, CHUNK)),
        ("b", Dtype::U8, vec![CHUNK], random(2, CHUNK)),
    ];
    let checkpoint = checkpoint(folder.path(), &[tensors]);
    let seen = Mutex::new(Vec::new());
    let note = |p: Progress| seen.lock().expect("no panic before").push(p);
    fill(&checkpoint, &LoadOptions::default(), &note).expect("loaded");
    let seen = seen.into_inner().expect("no panic before");
    let mut phases: Vec<_> = seen.iter().map(|p| p.phase.as_str()).collect();
    phases.dedup();
    assert_eq!(phases, ["plan", "load", "seal"]);
    assert!(seen.iter().all(|p| p.done <= p.total));
    let loads: Vec<_> = seen.iter().filter(|p| p.phase == "load").collect();
    assert_eq!(loads[0].done, 0);
    assert_eq!(loads[loads.len() - 1].done, 2 * CHUNK as u64);
}

#[test]
fn a_model_that_does_not_fit_is_refused_before_memory_is_taken() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("huge");
    let huge = 8u64 << 40;
    let file = File::create(&path).expect("file made");
    if let Err(e) = file.set_len(huge) {
        eprintln!("skipped: no sparse file of 8 TiB here: {e}");
        return;
    }
    let mut checkpoint = empty_checkpoint();
    checkpoint.files.push(source_file(&path));
    checkpoint.tensors = vec![SourceTensor {
        name: "huge".into(),
        element: ElementType::U8,
        shape: vec![huge],
        file: 0,
        offset: 0,
        bytes: huge,
        slice: None,
    }];
    let error = fill(&checkpoint, &LoadOptions::default(), &quiet).expect_err("no room");
    let WorkerError::NoRoom { needs, free, .. } = error else {
        panic!("another error: {error}");
    };
    assert!(needs >= huge && free < huge);
}

// The daemon's side, played.

fn pair() -> (Connection, Connection) {
    let (a, b) = rustix::net::socketpair(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::SEQPACKET,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )
    .expect("socket pair");
    let path = Path::new("pair");
    (Connection::from_fd(a, path), Connection::from_fd(b, path))
}

fn next(conn: &Connection) -> (Request, Vec<OwnedFd>) {
    conn.receive(WAIT).expect("a request")
}

fn say(conn: &Connection, reply: &Reply, fds: &[OwnedFd]) {
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    conn.send(reply, &fds, WAIT).expect("reply sent");
}

fn two_tensors(folder: &Path) -> Checkpoint {
    let tensors: Vec<Raw> = vec![
        ("a", Dtype::F32, vec![100], random(1, 400)),
        ("b", Dtype::F32, vec![100], random(1, 400)),
    ];
    checkpoint(folder, &[tensors])
}

#[test]
fn publishing_announces_first_and_then_offers_manifest_and_slabs() {
    let folder = tempfile::tempdir().expect("folder");
    let checkpoint = two_tensors(folder.path());
    let entry = EntryId::new("renamed", DeviceId::Host);
    let (worker, daemon) = pair();
    let epoch = EpochId([7; 16]);
    let announced = entry.clone();
    let daemon = std::thread::spawn(move || {
        let (first, _) = next(&daemon);
        assert_eq!(
            first,
            Request::Announce {
                entry: announced,
                bytes: 912,
                set: Vec::new(),
            }
        );
        say(&daemon, &Reply::Done, &[]);
        let (offer, fds) = loop {
            match next(&daemon) {
                (Request::Progress(_), fds) => assert!(fds.is_empty()),
                other => break other,
            }
        };
        assert_eq!(
            offer,
            Request::Offer {
                anchor: false,
                slabs: 1
            }
        );
        let unchanged = false;
        say(&daemon, &Reply::Accepted { epoch, unchanged }, &[]);
        fds
    });
    let published = publish(
        &worker,
        &entry,
        &checkpoint,
        &LoadOptions::default(),
        &quiet,
    );
    let published = published.expect("published");
    let fds = daemon.join().expect("the daemon's side holds");
    let manifest = Manifest::decode(memory(&fds[0]).as_slice()).expect("manifest");
    assert_eq!(manifest.key.model, "renamed");
    assert_eq!(manifest.slabs, [memory(&fds[1]).as_slice().len() as u64]);
    assert_eq!(fds.len(), 2);
    assert_eq!((published.epoch, published.root), (epoch, manifest.root));
    assert_eq!((published.tensors, published.aliases), (1, 1));
    assert_eq!(published.memory_bytes, 400);
}

#[test]
fn a_refusal_comes_back_with_the_daemons_words() {
    let folder = tempfile::tempdir().expect("folder");
    let checkpoint = two_tensors(folder.path());
    let entry = EntryId::new("m", DeviceId::Host);
    let (worker, daemon) = pair();
    let code = Refusal::AlreadyLoading;
    let reason = "another worker is at it".to_string();
    say(&daemon, &Reply::Refused { code, reason }, &[]);
    let refused = publish(
        &worker,
        &entry,
        &checkpoint,
        &LoadOptions::default(),
        &quiet,
    );
    let refused = refused.expect_err("refused");
    assert!(refused.to_string().contains("another worker is at it"));
    assert!(matches!(
        refused,
        WorkerError::Refused {
            code: Refusal::AlreadyLoading,
            ..
        }
    ));
}

#[test]
fn a_load_that_fails_tells_the_daemon_why() {
    let folder = tempfile::tempdir().expect("folder");
    let checkpoint = two_tensors(folder.path());
    let file = File::options()
        .write(true)
        .open(folder.path().join("model-0.safetensors"));
    file.and_then(|f| f.set_len(10)).expect("file cut");
    let entry = EntryId::new("m", DeviceId::Host);
    let (worker, daemon) = pair();
    let daemon = std::thread::spawn(move || {
        next(&daemon);
        say(&daemon, &Reply::Done, &[]);
        loop {
            match next(&daemon).0 {
                Request::Progress(_) => {}
                Request::Failed { reason } => {
                    say(&daemon, &Reply::Done, &[]);
                    return reason;
                }
                other => panic!("unexpected: {other:?}"),
            }
        }
    });
    let failed = publish(
        &worker,
        &entry,
        &checkpoint,
        &LoadOptions::default(),
        &quiet,
    );
    let failed = failed.expect_err("failed").to_string();
    assert_eq!(daemon.join().expect("the daemon's side holds"), failed);
}

#[test]
fn a_daemon_that_goes_away_stops_the_load() {
    let folder = tempfile::tempdir().expect("folder");
    let checkpoint = two_tensors(folder.path());
    let entry = EntryId::new("m", DeviceId::Host);
    let (worker, daemon) = pair();
    say(&daemon, &Reply::Done, &[]);
    let daemon = Mutex::new(Some(daemon));
    let loads = AtomicUsize::new(0);
    let stopped = publish(
        &worker,
        &entry,
        &checkpoint,
        &LoadOptions::default(),
        &|p| {
            if p.phase == "plan" {
                daemon.lock().expect("no panic before").take();
            } else {
                loads.fetch_add(1, Ordering::Relaxed);
            }
        },
    );
    assert!(matches!(stopped, Err(WorkerError::DaemonGone)));
    assert_eq!(loads.into_inner(), 0);
}

/// Asks a played daemon that holds `loaded` whether it holds what loading `checkpoint` would make.
fn held(loaded: &Loaded, checkpoint: &Checkpoint, options: &LoadOptions) -> bool {
    let (worker, daemon) = pair();
    let entry = EntryId::new(loaded.name.clone(), DeviceId::Host);
    let fds: Vec<OwnedFd> = std::iter::once(&loaded.manifest_fd)
        .chain(&loaded.export.slabs)
        .map(|fd| fd.try_clone().expect("descriptor"))
        .collect();
    let attached = Reply::Attached {
        epoch: EpochId([1; 16]),
        anchor: false,
        slabs: loaded.export.slabs.len() as u32,
        memory_bytes: loaded.manifest.memory_bytes(),
    };
    say(&daemon, &attached, &fds);
    let held = already_held(worker, &entry, checkpoint, options).expect("asked");
    assert!(matches!(
        next(&daemon).0,
        Request::Attach {
            wait: Duration::ZERO,
            ..
        }
    ));
    assert_eq!(next(&daemon).0, Request::Received);
    assert_eq!(next(&daemon).0, Request::Goodbye);
    if let Some(held) = &held {
        assert_eq!(held.root, loaded.manifest.root);
    }
    held.is_some()
}

/// Waits until a receipt of the file is able to say "same".
fn settled(folder: &Path) -> Checkpoint {
    let path = folder.join("model-0.safetensors");
    let end = std::time::Instant::now() + WAIT;
    loop {
        let checkpoint = open(std::slice::from_ref(&path));
        if checkpoint.files[0].receipt.freshness() == Freshness::Same {
            return checkpoint;
        }
        assert!(std::time::Instant::now() < end, "the file never settles");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn what_is_held_already_is_recognised_and_everything_else_is_loaded() {
    let folder = tempfile::tempdir().expect("folder");
    two_tensors(folder.path());
    let stored = LoadOptions::default();
    let mut checkpoint = settled(folder.path());
    let loaded = load(&checkpoint, &stored);
    assert!(held(&loaded, &checkpoint, &stored));
    assert!(held(&loaded, &settled(folder.path()), &stored));

    let bf16 = options(|o| o.dtype = TargetDtype::Bf16);
    assert!(!held(&loaded, &checkpoint, &bf16));
    checkpoint.small_files[0].1.push(b' ');
    assert!(!held(&loaded, &checkpoint, &stored));
    checkpoint.small_files[0].1.pop();
    checkpoint.attributes.clear();
    assert!(!held(&loaded, &checkpoint, &stored));

    let path = folder.path().join("model-0.safetensors");
    let file = File::options().read(true).write(true).open(path);
    flip(&mut file.expect("file opened"));
    assert!(!held(&loaded, &settled(folder.path()), &stored));
}

#[test]
fn an_entry_that_is_not_there_is_to_be_loaded() {
    let folder = tempfile::tempdir().expect("folder");
    let checkpoint = two_tensors(folder.path());
    for (code, there) in [(Refusal::NoEntry, true), (Refusal::Busy, false)] {
        let (worker, daemon) = pair();
        let reason = "no".to_string();
        say(&daemon, &Reply::Refused { code, reason }, &[]);
        let entry = EntryId::new("m", DeviceId::Host);
        let held = already_held(worker, &entry, &checkpoint, &LoadOptions::default());
        assert_eq!(matches!(held, Ok(None)), there);
    }
}

// The layout alone, on any checkpoint.

fn sized(element: ElementType, shape: Vec<u64>, at: &mut u64, index: usize) -> SourceTensor {
    let bytes = element.bytes(&shape).expect("whole blocks");
    let offset = *at;
    *at += bytes;
    SourceTensor {
        name: format!("t{index:04}"),
        element,
        shape,
        file: 0,
        offset,
        bytes,
        slice: None,
    }
}

prop_compose! {
    fn any_checkpoint()(
        kinds in prop::collection::vec((0..ElementType::ALL.len(), 0u64..40, 0u64..200), 1..400),
        backwards in any::<bool>(),
    ) -> Checkpoint {
        let mut checkpoint = empty_checkpoint();
        let mut at = 0;
        for (i, (kind, rows, blocks)) in kinds.into_iter().enumerate() {
            let element = ElementType::ALL[kind];
            let shape = vec![rows, blocks * element.block_elements()];
            checkpoint.tensors.push(sized(element, shape, &mut at, i));
        }
        if backwards {
            for t in &mut checkpoint.tensors {
                t.offset = at - t.offset;
            }
        }
        checkpoint
    }
}

proptest! {
    #[test]
    fn every_layout_holds(
        checkpoint in any_checkpoint(),
        slab_bytes in prop_oneof![Just(None), Just(Some(0)), Just(Some(u64::MAX)),
            (1u64..3_000_000).prop_map(Some)],
        cuda in any::<bool>(),
        dtype in prop_oneof![Just(TargetDtype::Stored), Just(TargetDtype::Bf16),
            Just(TargetDtype::F16), Just(TargetDtype::F32)],
    ) {
        let device = if cuda { DeviceId::Cuda([1; 16]) } else { DeviceId::Host };
        let options = options(|o| {
            o.slab_bytes = slab_bytes;
            o.device = device;
            o.dtype = dtype;
        });
        let plan = plan_of(&checkpoint, &options).expect("a layout");
        // Alignment, places inside slabs, lengths, overlaps, and the number of slabs.
        let manifest = plan.manifest(&checkpoint, taken(&checkpoint, &options).key(&options), &[]);
        manifest.check(0).expect("a manifest that holds");
        prop_assert!(plan.slabs.len() <= MAX_SLABS);

        let mut placed: Vec<_> = plan.tensors.iter().filter(|t| t.bytes > 0).collect();
        for t in &plan.tensors {
            prop_assert_eq!(t.element, dtype.of(checkpoint.tensors[t.source].element));
            let tail = if cuda && t.element.is_quantized() && t.bytes > 0 {
                512 * t.element.block_bytes() / t.element.block_elements()
            } else {
                0
            };
            prop_assert_eq!(t.tail, tail);
            if t.bytes == 0 {
                prop_assert_eq!((t.slab, t.offset), (0, 0));
            }
        }
        // Tails overlap nothing either, and the files' order is kept.
        placed.sort_by_key(|t| (t.slab, t.offset));
        for pair in placed.windows(2) {
            let (a, b) = (pair[0], pair[1]);
            prop_assert!(a.slab < b.slab || a.offset + a.bytes + a.tail <= b.offset);
            let at = |t: &worker::plan::Placed| checkpoint.tensors[t.source].offset;
            prop_assert!(at(a) < at(b));
        }
        for t in &placed {
            prop_assert!(t.offset + t.bytes + t.tail <= plan.slabs[t.slab as usize]);
        }
        if cuda {
            prop_assert!(plan.slabs.iter().all(|s| s.is_multiple_of(2 << 20)));
        }
        // No slab is empty, and a larger limit never makes more of them than a smaller one needs.
        prop_assert!(plan.slabs.iter().all(|s| *s > 0));
        if slab_bytes == Some(u64::MAX) {
            prop_assert!(plan.slabs.len() <= 1);
        }
    }
}

#[test]
fn the_default_slab_is_four_gib_and_a_large_model_gets_larger_ones() {
    let mut checkpoint = empty_checkpoint();
    let mut at = 0;
    let gib = 1u64 << 30;
    let fill = |checkpoint: &mut Checkpoint, at: &mut u64, count: usize, bytes: u64| {
        checkpoint.tensors = (0..count)
            .map(|i| sized(ElementType::U8, vec![bytes], at, i))
            .collect();
    };
    let plan =
        |checkpoint: &Checkpoint| plan_of(checkpoint, &LoadOptions::default()).expect("a layout");
    fill(&mut checkpoint, &mut at, 15, gib);
    assert_eq!(
        plan(&checkpoint).slabs,
        [4 * gib, 4 * gib, 4 * gib, 3 * gib]
    );
    // Each slab would waste nearly half: 300 tensors of 2.1 GiB, one to a slab of 4 GiB.
    fill(&mut checkpoint, &mut at, 300, 21 * gib / 10);
    let large = plan(&checkpoint).slabs;
    assert!(large.len() <= MAX_SLABS, "{} slabs", large.len());
}

#[test]
fn lengths_that_add_up_beyond_reach_are_an_error() {
    let mut checkpoint = empty_checkpoint();
    checkpoint.tensors = (0..3)
        .map(|i| sized(ElementType::U8, vec![u64::MAX / 3], &mut 0, i))
        .collect();
    let plan = plan_of(&checkpoint, &LoadOptions::default());
    assert!(matches!(plan, Err(WorkerError::TooLarge { name, .. }) if name == "t0001"));
}

#[test]
fn looking_for_equals_stops_when_it_is_told_to() {
    let folder = tempfile::tempdir().expect("folder");
    let checkpoint = two_tensors(folder.path());
    let stop = |_: Progress| Err(SocketError::Closed.into());
    assert!(matches!(
        alias::find(&checkpoint, 2, &stop),
        Err(WorkerError::Socket(SocketError::Closed))
    ));
}
