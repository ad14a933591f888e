//! Answer for answer as candle's `ShardedSafeTensors`, on the same file.

use candle_core::{DType, Device, Result, Tensor};
use candle_ipc_cache::Trace;
use candle_ipc_cache::manifest::ElementType;
use candle_ipc_cache::shard::ShardId;
use candle_ipc_cache::trace::{Asked, ShardHint};
use candle_ipc_cache::worker::LoadOptions;
use candle_nn::var_builder::{Shard, ShardedSafeTensors};
use proptest::prelude::*;
use safetensors::Dtype;

use crate::support::{self, Raw, attach, bytes, fill, open, planned, serve, write};

/// The types that candle's sharded loader reads.
const TYPES: [Dtype; 8] = [
    Dtype::F32,
    Dtype::F64,
    Dtype::F16,
    Dtype::BF16,
    Dtype::U8,
    Dtype::U32,
    Dtype::I64,
    Dtype::F8_E4M3,
];
const ASKED: [DType; 4] = [DType::F32, DType::F16, DType::BF16, DType::U8];

fn same(ours: Result<Tensor>, theirs: Result<Tensor>, what: &str) {
    let text = |e: candle_core::Error| {
        let e = e.to_string();
        let line = e.lines().next().unwrap_or_default();
        line.to_string()
    };
    match (ours, theirs) {
        (Ok(ours), Ok(theirs)) => {
            assert_eq!(ours.dims(), theirs.dims(), "{what}");
            assert_eq!(ours.dtype(), theirs.dtype(), "{what}");
            assert_eq!(
                ours.is_contiguous(),
                theirs.is_contiguous(),
                "{what}: contiguous"
            );
            let values = |t: &Tensor| {
                let t = t.to_dtype(DType::F64)?.flatten_all()?;
                t.to_vec1::<f64>()
            };
            assert_eq!(values(&ours).unwrap(), values(&theirs).unwrap(), "{what}");
        }
        (Err(ours), Err(theirs)) => {
            // Where candle has an error of a kind of its own, it is the same one.
            let (ours, theirs) = (text(ours), text(theirs));
            for kind in ["ShapeMismatchSplit", "shape mismatch for", "Get sharded on"] {
                assert_eq!(
                    ours.contains(kind),
                    theirs.contains(kind),
                    "{what}: {ours} / {theirs}"
                );
            }
        }
        (ours, theirs) => panic!("{what}: ours {ours:?}, candle's {theirs:?}"),
    }
}

/// One tensor of a random checkpoint: which type, which shape, and along which dimension it is cut for a rank.
type Kind = (usize, Vec<usize>, Option<usize>);

fn tensors(kinds: &[Kind]) -> Vec<Raw> {
    let one = |(i, (kind, shape, _)): (usize, &Kind)| {
        let dtype = TYPES[*kind];
        let bytes = bytes(dtype, shape.iter().product(), i as u8);
        (format!("t{i}"), dtype, shape.clone(), bytes)
    };
    kinds.iter().enumerate().map(one).collect()
}

/// Every hint that candle takes without a panic, and some that it refuses.
fn hints(shape: &[usize]) -> Vec<Shard> {
    let mut hints = Vec::new();
    for dim in 0..shape.len() {
        for world_size in 2..=4 {
            for rank in 0..=world_size {
                hints.push(Shard {
                    dim,
                    rank,
                    world_size,
                });
            }
        }
    }
    hints
}

prop_compose! {
    fn kinds()(
        kinds in prop::collection::vec(
            (0..TYPES.len(), prop::collection::vec(1usize..9, 1..4), prop::option::of(0usize..3)),
            1..6,
        ),
    ) -> Vec<Kind> {
        kinds
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn a_whole_entry_answers_every_hint_as_candle_does(kinds in kinds(), asked in 0..ASKED.len()) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.safetensors");
        let tensors = tensors(&kinds);
        write(&path, &tensors);
        let options = LoadOptions { name: Some("m".into()), ..LoadOptions::default() };
        let daemon = serve(fill(&open(&path), &options).unwrap());
        let cache = attach(&daemon, ShardId::default());
        let (dtype, device) = (ASKED[asked], Device::Cpu);
        // SAFETY: nobody writes to the file while it is mapped.
        let theirs = unsafe { ShardedSafeTensors::var_builder(&[&path], dtype, &device) }.unwrap();
        let ours = cache.sharded(dtype);
        for (name, _, shape, _) in &tensors {
            same(ours.get(shape.as_slice(), name), theirs.get(shape.as_slice(), name), name);
            same(ours.get((3, 5, 7), name), theirs.get((3, 5, 7), name), name);
            for hint in hints(shape) {
                let what = format!("{name} {shape:?} {hint:?} as {dtype:?}");
                let (a, b) = (ours.get_with_hints((), name, hint), theirs.get_with_hints((), name, hint));
                same(a, b, &what);
            }
        }
        let hint = Shard { dim: 0, rank: 0, world_size: 2 };
        same(ours.get_with_hints((), "absent", hint), theirs.get_with_hints((), "absent", hint), "absent");
        prop_assert!(ours.contains_tensor("t0") && !ours.contains_tensor("absent"));
    }

    #[test]
    fn a_ranks_entry_answers_its_own_hints_as_candle_does_and_no_others(
        kinds in kinds(), size in 2u16..5, asked in 0..ASKED.len(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.safetensors");
        // The cut dimension is made one that the ranks can share, in the first two: candle slices no others.
        let mut kinds = kinds;
        for (_, shape, cut) in &mut kinds {
            *cut = cut.map(|dim| dim % shape.len().min(2));
            if let Some(dim) = *cut {
                shape[dim] *= size as usize;
            }
        }
        let tensors = tensors(&kinds);
        write(&path, &tensors);
        let asked_for = |(i, (_, _, cut)): (usize, &Kind)| Asked {
            name: format!("t{i}"),
            shape: None,
            dtype: None,
            shard: cut.map(|dim| ShardHint { dim: dim as u32, rank: 0, size: size.into() }),
        };
        let trace = Trace::new(kinds.iter().enumerate().map(asked_for).collect(), Vec::new());
        let dtype = ASKED[asked];
        // SAFETY: nobody writes to the file while it is mapped.
        let theirs = unsafe { ShardedSafeTensors::var_builder(&[&path], dtype, &Device::Cpu) }.unwrap();
        let checkpoint = open(&path);
        for rank in 0..size {
            let options = support::options(planned(&trace), rank, size);
            let daemon = serve(fill(&checkpoint, &options).unwrap());
            let cache = attach(&daemon, options.shard);
            let ours = cache.sharded(dtype);
            for ((name, _, shape, _), (_, _, cut)) in tensors.iter().zip(&kinds) {
                let Some(dim) = *cut else {
                    // Whole: for any rank of any size.
                    for hint in hints(shape) {
                        let theirs = theirs.get_with_hints((), name, hint);
                        same(ours.get_with_hints((), name, hint), theirs, name);
                    }
                    continue;
                };
                let mine = Shard { dim, rank: rank as usize, world_size: size as usize };
                let what = format!("{name} {shape:?} {mine:?} as {dtype:?}");
                same(ours.get_with_hints((), name, mine), theirs.get_with_hints((), name, mine), &what);
                for other in hints(shape).into_iter().filter(|other| *other != mine) {
                    let error = ours.get_with_hints((), name, other).unwrap_err().to_string();
                    let held = format!("rank {rank}/{size} along dimension {dim}");
                    let wanted = format!("rank {}/{} along dimension {}", other.rank, other.world_size, other.dim);
                    prop_assert!(error.contains(&held) && error.contains(&wanted), "{}", error);
                }
            }
        }
    }
}

#[test]
fn every_type_is_of_a_size_that_the_file_says() {
    for dtype in TYPES {
        let len = bytes(dtype, 3, 0).len() as u64;
        let element = ElementType::ALL
            .iter()
            .find(|e| e.as_str() == dtype.to_string())
            .unwrap();
        assert_eq!(element.bytes(&[3]), Some(len), "{dtype:?}");
    }
}
