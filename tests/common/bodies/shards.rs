//! Slices of tensors, as tensor-parallel models ask for them by hints.

use candle_core::{DType, Device, Error, Result, Tensor};
use candle_ipc_cache::manifest::ElementType;
use candle_ipc_cache::protocol::ShardId;
use candle_ipc_cache::{IpcCache, ShardedVarBuilder};
use candle_nn::var_builder::Shard;

use super::{bare, blocks, noise, values};
use crate::place::{Place, address, stored_bytes};
use crate::stand_in::Model;

const TYPES: [(ElementType, DType); 4] = [
    (ElementType::F32, DType::F32),
    (ElementType::BF16, DType::BF16),
    (ElementType::U8, DType::U8),
    (ElementType::I64, DType::I64),
];

fn hint(dim: usize, rank: usize, world_size: usize) -> Shard {
    Shard {
        dim,
        rank,
        world_size,
    }
}

/// The slice as candle cuts it out of a whole tensor on the CPU.
fn cut(bytes: &[u8], dtype: DType, shape: &[usize], hint: Shard) -> Tensor {
    let whole = Tensor::from_raw_buffer(bytes, dtype, shape, &Device::Cpu).unwrap();
    let len = shape[hint.dim] / hint.world_size;
    let slice = whole.narrow(hint.dim, hint.rank * len, len);
    slice.unwrap().force_contiguous().unwrap()
}

fn check(asked: Result<Tensor>, wanted: &Tensor, what: &str) {
    let tensor = asked.unwrap_or_else(|e| panic!("{what}: {e}"));
    assert_eq!(
        (tensor.dtype(), tensor.dims()),
        (wanted.dtype(), wanted.dims())
    );
    assert!(tensor.is_contiguous(), "{what}");
    // A view's storage is that of the whole tensor.
    let own = tensor.force_contiguous().unwrap();
    assert_eq!(stored_bytes(&own), stored_bytes(wanted), "{what}");
}

fn sharded(cache: &IpcCache, dtype: DType) -> ShardedVarBuilder<'static> {
    cache.sharded(dtype)
}

pub(crate) fn a_whole_entry_serves_the_slices_of_every_rank(place: &Place) {
    let shape = [4usize, 6, 10];
    let dims = shape.map(|d| d as u64);
    let mut model = Model::new("m");
    for (element, _) in TYPES {
        model = model.tensor(element.as_str(), element, &dims, values(element, 240));
    }
    let daemon = place.serve(model);
    let cache = place.attach(&daemon);
    let mut copied = 0;
    for (element, dtype) in TYPES {
        let (name, bytes) = (element.as_str(), values(element, 240));
        let vb = sharded(&cache, dtype);
        for (dim, size) in [(0, 2), (0, 4), (1, 3), (1, 2)] {
            for rank in 0..size {
                let hint = hint(dim, rank, size);
                let wanted = cut(&bytes, dtype, &shape, hint);
                let slice = vb.get_with_hints((), name, hint);
                // In one piece, it is a view where the memory can be read in place.
                if dim > 0 || !place.serves_in_place() {
                    copied += bytes.len() as u64 / size as u64;
                }
                let what = format!("{name} {hint:?}");
                assert_eq!(cache.report().copied_bytes, copied, "{what}");
                if (dim, dtype) == (0, DType::F32) && place.serves_in_place() {
                    let slice = slice.as_ref().unwrap();
                    assert_eq!(address(slice), place.mapped_address(&cache, name));
                    let start = slice.layout().start_offset();
                    assert_eq!(start, rank * 240 / size);
                }
                check(slice, &wanted, &what);
            }
        }
        let whole = vb.get(&shape, name).unwrap();
        copied += place.copied(element, bytes.len());
        assert_eq!(stored_bytes(&whole), bytes);
    }
    let vb = sharded(&cache, DType::F32);
    let refused = |hint| bare(vb.get_with_hints((), "F32", hint).unwrap_err());
    assert!(matches!(
        refused(hint(0, 0, 3)),
        Error::ShapeMismatchSplit {
            dim: 0,
            n_parts: 3,
            ..
        }
    ));
    for (wrong, said) in [
        (hint(2, 0, 2), "dimensions != 0 or 1"),
        (hint(3, 0, 2), "no dimension 3"),
        (hint(0, 2, 2), "no rank 2/2"),
        (hint(0, 0, 0), "no rank 0/0"),
    ] {
        let error = refused(wrong).to_string();
        assert!(error.contains(said), "{error}");
    }
    // The shape is looked at where all of the tensor is asked for, as in candle.
    assert!(matches!(
        bare(vb.get((), "F32").unwrap_err()),
        Error::UnexpectedShape { .. }
    ));
    assert!(vb.get_unchecked("F32").is_err());
    assert!(vb.contains_tensor("F32") && !vb.contains_tensor("F33"));
    let missing = vb.get_with_hints((), "F33", hint(0, 0, 2)).unwrap_err();
    assert!(missing.to_string().contains("F32"), "{missing}");
}

pub(crate) fn a_rank_serves_its_own_slices_and_names_both_ranks_to_others(place: &Place) {
    let whole = values(ElementType::F32, 48);
    let of_rank = |rank: usize| {
        let mut model = Model::new("m");
        model.shard = ShardId::tensor_parallel(rank as u16, 2);
        model.cuts = vec![("rows".into(), 0), ("columns".into(), 1)];
        for (name, dim, shape) in [("rows", 0, [4, 6]), ("columns", 1, [8, 3])] {
            let mine = cut(&whole, DType::F32, &[8, 6], hint(dim, rank, 2));
            model = model.tensor(name, ElementType::F32, &shape, stored_bytes(&mine));
        }
        model.tensor("norm", ElementType::F32, &[8, 6], whole.clone())
    };
    for rank in 0..2 {
        let daemon = place.serve(of_rank(rank));
        let config = daemon.config("m").tensor_parallel(rank as u16, 2);
        let cache = place.attach_as(&config).unwrap();
        let vb = sharded(&cache, DType::F32);
        for (name, dim) in [("rows", 0), ("columns", 1), ("norm", 0), ("norm", 1)] {
            let mine = hint(dim, rank, 2);
            let wanted = cut(&whole, DType::F32, &[8, 6], mine);
            check(vb.get_with_hints((), name, mine), &wanted, name);
        }
        // What every rank has whole is there for any.
        let quarter = hint(0, 3, 4);
        let wanted = cut(&whole, DType::F32, &[8, 6], quarter);
        check(vb.get_with_hints((), "norm", quarter), &wanted, "norm");
        assert!(vb.get((8, 6), "norm").is_ok());
        for wrong in [
            hint(0, 1 - rank, 2),
            hint(0, rank, 4),
            hint(1, rank, 2),
            hint(0, 0, 1),
        ] {
            let error = vb.get_with_hints((8, 6), "rows", wrong).unwrap_err();
            let error = error.to_string();
            for said in [
                format!("rank {rank}/2 along dimension 0"),
                format!(
                    "rank {}/{} along dimension {}",
                    wrong.rank, wrong.world_size, wrong.dim
                ),
            ] {
                assert!(error.contains(&said), "{error}");
            }
        }
        // Without hints the stored slice is a tensor like any other.
        let plain = cache.var_builder(DType::F32);
        assert!(plain.get((4, 6), "rows").is_ok() && plain.get((8, 6), "rows").is_err());

        let other = daemon.config("m").tensor_parallel(1 - rank as u16, 2);
        let error = place.attach_as(&other).unwrap_err().to_string();
        assert!(
            error.contains("tp 0/2") && error.contains("tp 1/2"),
            "{error}"
        );
    }
}

pub(crate) fn names_that_share_weights_share_their_slices(place: &Place) {
    let bytes = values(ElementType::F32, 32);
    let model = Model::new("m").tensor("embed", ElementType::F32, &[8, 4], bytes);
    let daemon = place.serve(model.alias("head", "embed"));
    let cache = place.attach(&daemon);
    let vb = sharded(&cache, DType::F32);
    let get = |name, dim| vb.get_with_hints((), name, hint(dim, 1, 2)).unwrap();
    for dim in 0..2 {
        assert_eq!(address(&get("embed", dim)), address(&get("head", dim)));
    }
    assert_eq!(get("head", 0).dims(), [4, 4]);
    assert_eq!(get("head", 1).dims(), [8, 2]);
}

pub(crate) fn copied_weights_and_dequantized_blocks_are_sliced_too(place: &Place) {
    use candle_core::quantized::GgmlDType;
    let plain = noise(64, 9);
    let blocks = blocks(GgmlDType::Q8_0, 4);
    let model = Model::new("m")
        .tensor("plain", ElementType::U8, &[8, 8], plain.clone())
        .tensor("blocks", ElementType::Q8_0, &[4, 512], blocks);
    let daemon = place.serve(model);
    let cache = place.attach_as(&daemon.config("m").copy(true)).unwrap();
    let before = cache.report().copied_bytes;
    let vb = sharded(&cache, DType::U8);
    for dim in 0..2 {
        let hint = hint(dim, 1, 2);
        let wanted = cut(&plain, DType::U8, &[8, 8], hint);
        check(vb.get_with_hints((), "plain", hint), &wanted, "plain");
    }
    // The slice along rows is a view of the copy, the other is one more copy.
    assert_eq!(cache.report().copied_bytes, before + 32);

    let refused = sharded(&cache, DType::F32).get_with_hints((), "blocks", hint(0, 0, 2));
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("dequantize"), "{refused}");
    let config = daemon.config("m").dequantize(true);
    let cache = place.attach_as(&config).unwrap();
    let whole = cache.var_builder(DType::F32).get((4, 512), "blocks");
    let whole = stored_bytes(&whole.unwrap());
    let vb = sharded(&cache, DType::F32);
    for hint in [hint(0, 1, 2), hint(1, 3, 4)] {
        let wanted = cut(&whole, DType::F32, &[4, 512], hint);
        check(vb.get_with_hints((), "blocks", hint), &wanted, "blocks");
    }
}
