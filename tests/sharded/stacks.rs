//! Experts that lie one behind the other: one tensor, and each of its slices by its own name.

use candle_core::{DType, Device, IndexOp, Tensor};
use candle_ipc_cache::loader::Proof;
use candle_ipc_cache::manifest::{ALIGNMENT, Manifest, ManifestError};
use candle_ipc_cache::quantize::Quantize;
use candle_ipc_cache::shard::ShardId;
use candle_ipc_cache::slab::host::HostMapping;
use candle_ipc_cache::trace::Asked;
use candle_ipc_cache::worker::select::{Selection, ShardPlan};
use candle_ipc_cache::worker::{LoadOptions, Loaded, WorkerError};
use candle_ipc_cache::{IpcCache, Trace};
use candle_nn::var_builder::Shard;
use safetensors::Dtype;

use crate::common::{Daemon, assert_ok};
use crate::support::{
    Raw, attach, bytes, fill, floats, manifest, open, options, rules, serve, write,
};

const EXPERTS: usize = 11;

/// Two layers of experts whose lengths are no multiple of an aligned place, and what is beside them.
fn model() -> Vec<Raw> {
    let mut tensors = vec![floats("l.0.norm.weight", &[5], 1)];
    for layer in 0..2 {
        for expert in 0..EXPERTS {
            let seed = (layer * EXPERTS + expert) as u8;
            let name = |what: &str| format!("l.{layer}.experts.{expert}.{what}.weight");
            tensors.push(floats(&name("up"), &[6, 5], seed));
            tensors.push((
                name("down"),
                Dtype::BF16,
                vec![4, 6],
                bytes(Dtype::BF16, 24, seed),
            ));
        }
    }
    // An expert may be equal to another, and a tensor outside to an expert.
    tensors.push(floats("like.weight", &[6, 5], 3));
    tensors[5].3 = tensors[3].3.clone();
    tensors
}

fn stacked(selection: Selection, rank: u16, size: u16) -> LoadOptions {
    LoadOptions {
        stack_experts: true,
        ..options(selection, rank, size)
    }
}

fn path(folder: &tempfile::TempDir) -> std::path::PathBuf {
    folder.path().join("m.safetensors")
}

/// The experts' own values, put together by candle.
fn wanted(tensors: &[Raw], what: &str) -> Tensor {
    let all: Vec<Tensor> = (0..EXPERTS)
        .map(|expert| {
            let name = format!("l.1.experts.{expert}.{what}.weight");
            let (_, dtype, shape, bytes) = tensors.iter().find(|t| t.0 == name).unwrap();
            let dtype = DType::try_from(*dtype).unwrap();
            Tensor::from_raw_buffer(bytes, dtype, shape, &Device::Cpu).unwrap()
        })
        .collect();
    Tensor::stack(&all, 0).unwrap()
}

fn same(a: &Tensor, b: &Tensor) {
    assert_eq!((a.dtype(), a.dims()), (b.dtype(), b.dims()));
    let values = |t: &Tensor| {
        let t = t.to_dtype(DType::F64).unwrap().flatten_all().unwrap();
        t.to_vec1::<f64>().unwrap()
    };
    assert_eq!(values(a), values(b));
}

/// The whole and every expert, as plain tensors.
fn check(cache: &IpcCache, tensors: &[Raw]) {
    for (what, dtype) in [("up", DType::F32), ("down", DType::BF16)] {
        let wanted = wanted(tensors, what);
        let vb = cache.var_builder(dtype);
        let all = vb.get(wanted.dims(), &format!("l.1.experts.{what}.weight"));
        same(&all.unwrap(), &wanted);
        for expert in 0..EXPERTS {
            let name = format!("l.1.experts.{expert}.{what}.weight");
            let one = vb.get(&wanted.dims()[1..], &name).unwrap();
            same(&one, &wanted.i(expert).unwrap());
        }
    }
}

#[test]
fn stacked_experts_are_one_tensor_and_each_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = model();
    write(&path(&folder), &tensors);
    let checkpoint = open(&path(&folder));
    let loaded = fill(&checkpoint, &stacked(Selection::default(), 0, 1)).unwrap();
    let table = manifest(&loaded);
    assert_eq!(table.stacks.len(), 4);
    let at = |name: &str| &table.tensors[table.find(name).unwrap()];
    let (all, third) = (at("l.1.experts.up.weight"), at("l.1.experts.3.up.weight"));
    assert_eq!(all.shape, [EXPERTS as u64, 6, 5]);
    // In the order of their numbers, not of their names, and nothing between them.
    assert_eq!(third.offset, all.offset + 3 * third.bytes);
    assert_eq!((third.slab, all.bytes), (all.slab, 11 * third.bytes));
    assert!(third.offset % ALIGNMENT != 0);
    // The same bytes are counted once.
    let plain = fill(&checkpoint, &options(Selection::default(), 0, 1)).unwrap();
    assert!(table.memory_bytes() <= manifest(&plain).memory_bytes() + 2 * 250);
    assert_ne!(table.root, manifest(&plain).root);
    let differing = table.key.differences(&manifest(&plain).key);
    assert_eq!(differing[0].field, "stacked experts");

    let daemon = serve(loaded);
    let cache = attach(&daemon, ShardId::default());
    check(&cache, &tensors);
    let raw = |name: &str| cache.raw(name).unwrap().as_ptr() as usize;
    let whole = raw("l.0.experts.down.weight");
    assert_eq!(raw("l.0.experts.10.down.weight"), whole + 10 * 48);
    let config = daemon.config("m").verify(true).checkpoint(path(&folder));
    let verified = IpcCache::attach(&config, &Device::Cpu).unwrap();
    assert!(verified.report().verified);
    assert!(matches!(
        verified.report().identity,
        Proof::CheckpointHashed | Proof::CheckpointUntouched
    ));
    let copied = IpcCache::attach(&daemon.config("m").copy(true), &Device::Cpu).unwrap();
    check(&copied, &tensors);
    // Whole and slices are one copy.
    let bytes: u64 = tensors.iter().map(|t| t.3.len() as u64).sum();
    assert!(copied.report().copied_bytes <= bytes);
}

#[test]
fn who_asked_for_the_whole_asked_for_every_expert() {
    let folder = tempfile::tempdir().unwrap();
    write(&path(&folder), &model());
    let checkpoint = open(&path(&folder));
    let daemon = serve(fill(&checkpoint, &stacked(Selection::default(), 0, 1)).unwrap());
    let cache = attach(&daemon, ShardId::default());
    let before = cache.report().unasked;
    let vb = cache.var_builder(DType::F32);
    vb.get((EXPERTS, 6, 5), "l.0.experts.up.weight").unwrap();
    let after = cache.report().unasked;
    assert_eq!(before.tensors - after.tensors, EXPERTS);
    assert_eq!(before.bytes - after.bytes, EXPERTS as u64 * 120);
}

#[test]
fn stacked_blocks_are_quantized_tensors_of_three_dimensions() {
    let folder = tempfile::tempdir().unwrap();
    let tensors: Vec<Raw> = (0..3)
        .map(|i| floats(&format!("experts.{i}.w.weight"), &[4, 64], i))
        .collect();
    write(&path(&folder), &tensors);
    let with = |stack_experts| LoadOptions {
        quantize: Some(Quantize::new("q8_0".parse().unwrap())),
        stack_experts,
        ..options(Selection::default(), 0, 1)
    };
    let checkpoint = open(&path(&folder));
    let daemon = serve(fill(&checkpoint, &with(true)).unwrap());
    let plain = serve(fill(&checkpoint, &with(false)).unwrap());
    let plain = attach(&plain, ShardId::default());
    for copy in [false, true] {
        let config = daemon.config("m").copy(copy);
        let cache = IpcCache::attach(&config, &Device::Cpu).unwrap();
        let weights = cache.quantized();
        let all = weights.get((3, 4, 64), "experts.w.weight").unwrap();
        let all = all.dequantize(&Device::Cpu).unwrap();
        for i in 0..3 {
            let name = format!("experts.{i}.w.weight");
            let one = weights.get((4, 64), &name).unwrap();
            let wanted = plain.quantized().get((4, 64), &name).unwrap();
            let wanted = wanted.dequantize(&Device::Cpu).unwrap();
            same(&one.dequantize(&Device::Cpu).unwrap(), &wanted);
            same(&all.i(i).unwrap(), &wanted);
        }
    }
}

#[test]
fn ranks_of_stacked_experts_hold_the_slices_of_each() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = model();
    write(&path(&folder), &tensors);
    let plan = ShardPlan::read(&rules(folder.path(), "[rules]\n\"*.up\" = 0\n")).unwrap();
    let options = stacked(Selection::default().plan(plan), 1, 2);
    let daemon = serve(fill(&open(&path(&folder)), &options).unwrap());
    let vb = attach(&daemon, options.shard).sharded(DType::F32);
    let hint = |dim| Shard {
        dim,
        rank: 1,
        world_size: 2,
    };
    let wanted = wanted(&tensors, "up").narrow(1, 3, 3).unwrap();
    let all = vb.get_with_hints((), "l.1.experts.up.weight", hint(1));
    same(&all.unwrap(), &wanted);
    let one = vb.get_with_hints((), "l.1.experts.4.up.weight", hint(0));
    same(&one.unwrap(), &wanted.i(4).unwrap());
    let error = vb.get_with_hints((), "l.1.experts.up.weight", hint(0));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("along dimension 1"), "{error}");
}

#[test]
fn experts_that_are_no_stack_are_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let expert = |i: usize, shape: &[usize]| floats(&format!("experts.{i}.w"), shape, i as u8);
    let refused = |tensors: &[Raw], selection: Selection| {
        write(&path(&folder), tensors);
        let error = fill(&open(&path(&folder)), &stacked(selection, 0, 1)).unwrap_err();
        assert!(matches!(error, WorkerError::Stack(_)), "{error}");
        error.to_string()
    };
    let all = Selection::default;
    let error = refused(&[floats("w", &[2], 1)], all());
    assert!(error.contains("no tensor here is an expert's"), "{error}");
    let error = refused(&[expert(0, &[2, 2]), expert(2, &[2, 2])], all());
    assert!(error.contains("`experts.w` are 0, 2"), "{error}");
    let error = refused(&[expert(0, &[2, 2]), expert(1, &[2, 3])], all());
    for said in ["`experts.0.w` (F32 [2, 2])", "`experts.1.w` (F32 [2, 3])"] {
        assert!(error.contains(said), "{error}");
    }
    let error = refused(&[expert(0, &[2]), floats("experts.w", &[1, 2], 1)], all());
    assert!(error.contains("`experts.w` already"), "{error}");
    let two = [expert(0, &[2]), expert(1, &[2])];
    let error = refused(&two, all().keep(["experts.1.*".to_string()]));
    assert!(error.contains("are 1"), "{error}");
}

#[test]
fn a_manifest_that_lies_about_a_stack_is_not_believed() {
    let folder = tempfile::tempdir().unwrap();
    write(&path(&folder), &model());
    let loaded: Loaded = fill(&open(&path(&folder)), &stacked(Selection::default(), 0, 1)).unwrap();
    let table = HostMapping::map(std::os::fd::AsFd::as_fd(&loaded.manifest_fd), None, "m").unwrap();
    let honest = Manifest::decode(table.as_slice()).unwrap();
    honest.check(u64::MAX).unwrap();
    type Lie = fn(&mut Manifest);
    let lies: [(&str, Lie); 9] = [
        ("members in another order", |m| {
            m.stacks[0].members.swap(0, 1)
        }),
        ("one less", |m| m.stacks[0].members.truncate(1)),
        ("none", |m| m.stacks[0].members.clear()),
        ("a stack of itself", |m| {
            m.stacks[0].members[0] = m.stacks[0].tensor
        }),
        ("no such tensor", |m| m.stacks[0].tensor = u32::MAX),
        ("no such member", |m| m.stacks[0].members[0] = u32::MAX),
        ("twice", |m| m.stacks[1] = m.stacks[0].clone()),
        ("another digest", |m| {
            let at = m.stacks[0].tensor as usize;
            m.tensors[at].stored = m.tensors[at].source;
            m.tensors[at].stored.0[0] ^= 1;
        }),
        ("no stack at all", |m| m.stacks.clear()),
    ];
    for (what, lie) in lies {
        let mut manifest = honest.clone();
        lie(&mut manifest);
        let refused = manifest.check(u64::MAX).expect_err(what);
        assert!(
            matches!(refused, ManifestError::Entry { .. }),
            "{what}: {refused}"
        );
    }
}

#[test]
fn a_trace_may_name_the_stack() {
    let folder = tempfile::tempdir().unwrap();
    write(&path(&folder), &model());
    let asked = |name: &str| Asked {
        name: name.into(),
        shape: Some(vec![EXPERTS as u64, 6, 5]),
        dtype: None,
        shard: None,
    };
    let trace = Trace::new(vec![asked("l.1.experts.up.weight")], Vec::new());
    let only = || Selection::default().only(&trace, "t.json").unwrap();
    let loaded = fill(&open(&path(&folder)), &stacked(only(), 0, 1)).unwrap();
    assert_eq!(manifest(&loaded).names().count(), EXPERTS + 1);
    let error = fill(&open(&path(&folder)), &options(only(), 0, 1)).unwrap_err();
    assert!(
        error.to_string().contains("`l.1.experts.up.weight`"),
        "{error}"
    );
}

#[test]
fn the_program_stacks_experts_when_it_is_told_to() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = model();
    write(&path(&folder), &tensors);
    let daemon = Daemon::start();
    let file = path(&folder);
    let load = ["load", file.to_str().unwrap(), "--name", "m"];
    assert_ok(&daemon.run(&load));
    assert_ok(&daemon.run(&[&load[..], &["--stack-experts"]].concat()));
    let cache = IpcCache::attach(&daemon.config("m"), &Device::Cpu).unwrap();
    check(&cache, &tensors);
}
