//! Plain tensors: equal to the checkpoint's, converted where that is asked for, refused by name.

use candle_core::{DType, Device, Error, Tensor};
use candle_ipc_cache::AttachError;
use candle_ipc_cache::manifest::ElementType;
use candle_ipc_cache::tensors::{TensorError, plain_dtype};

use super::{bare, noise, one_tensor, values};
use crate::place::{Place, address, stored_bytes};
use crate::stand_in::{Model, StandIn};

/// U16 values as the U32 that candle reads them as.
fn widened(bytes: &[u8]) -> Vec<u32> {
    bytes
        .chunks(2)
        .map(|b| u32::from(u16::from_le_bytes([b[0], b[1]])))
        .collect()
}

pub(crate) fn every_dtype_that_candle_has_is_served_with_equal_bytes(place: &Place) {
    let plain: Vec<_> = ElementType::ALL
        .iter()
        .copied()
        .filter(|e| plain_dtype(*e).is_some())
        .collect();
    let mut model = Model::new("m");
    model.per_slab = 4;
    for element in &plain {
        model = model.tensor(element.as_str(), *element, &[3, 8], values(*element, 24));
    }
    let daemon = place.serve(model);
    let cache = place.attach(&daemon);
    let mut copied = 0;
    for element in plain {
        let dtype = plain_dtype(element).expect("it was chosen for that");
        let stored = values(element, 24);
        let vb = cache.var_builder(dtype);
        let tensor = vb.get((3, 8), element.as_str()).expect("a tensor");
        copied += place.copied(element, stored.len());
        assert_eq!(cache.report().copied_bytes, copied, "{element}");
        assert!(tensor.device().same_device(&place.device));
        // Asked for on the CPU, it is a copy of the same bytes wherever they lie.
        let host = vb.set_device(Device::Cpu);
        let host = host.get((3, 8), element.as_str()).expect("a copy");
        copied += stored.len() as u64;
        assert_eq!(cache.report().copied_bytes, copied, "{element}");
        for tensor in [tensor, host] {
            assert_eq!((tensor.dtype(), tensor.dims()), (dtype, &[3, 8][..]));
            if element == ElementType::U16 {
                let values = tensor.flatten_all().and_then(|t| t.to_vec1::<u32>());
                assert_eq!(values.unwrap(), widened(&stored));
            } else {
                assert_eq!(stored_bytes(&tensor), stored, "{element}");
            }
        }
        place.check_raw(&cache, element.as_str(), &stored);
    }
}

pub(crate) fn tensors_equal_those_that_candle_loads_from_the_same_safetensors_bytes(place: &Place) {
    let types = [
        (ElementType::F32, safetensors::Dtype::F32),
        (ElementType::BF16, safetensors::Dtype::BF16),
        (ElementType::U16, safetensors::Dtype::U16),
        (ElementType::I64, safetensors::Dtype::I64),
        (ElementType::F4, safetensors::Dtype::F4),
    ];
    let data: Vec<_> = types.iter().map(|(e, _)| values(*e, 24)).collect();
    let views: Vec<_> = types
        .iter()
        .zip(&data)
        .map(|((e, d), bytes)| {
            let view = safetensors::tensor::TensorView::new(*d, vec![2, 12], bytes);
            (e.as_str(), view.unwrap())
        })
        .collect();
    let file = safetensors::serialize(views, None).unwrap();
    let theirs = candle_core::safetensors::load_buffer(&file, &place.device).unwrap();
    assert_eq!(theirs.len(), types.len());
    let mut model = Model::new("m");
    for ((element, _), bytes) in types.iter().zip(data) {
        model = model.tensor(element.as_str(), *element, &[2, 12], bytes);
    }
    let daemon = place.serve(model);
    let cache = place.attach(&daemon);
    for (name, theirs) in theirs {
        let ours = cache
            .var_builder(theirs.dtype())
            .get(theirs.shape(), &name)
            .unwrap();
        assert_eq!(stored_bytes(&ours), stored_bytes(&theirs), "{name}");
    }
}

pub(crate) fn large_tensors_arrive_whole_and_copies_are_counted(place: &Place) {
    // Not a whole number of the pieces that threads copy.
    let count = (2 << 20) + 13;
    let bytes = noise(count * 4, 1);
    let model = Model::new("m").tensor("big", ElementType::U32, &[count as u64], bytes.clone());
    let model = model.tensor(
        "wide",
        ElementType::U16,
        &[count as u64],
        bytes[..2 * count].to_vec(),
    );
    let daemon = place.serve(model);
    let cache = place.attach(&daemon);
    assert_eq!(cache.report().copied_bytes, 0);
    let vb = cache.var_builder(DType::U32);
    assert!(stored_bytes(&vb.get(count, "big").unwrap()) == bytes);
    let wide = vb.get(count, "wide").unwrap().to_vec1::<u32>().unwrap();
    assert!(wide == widened(&bytes[..2 * count]));
    assert_eq!(
        cache.report().copied_bytes,
        place.copied(ElementType::U32, 4 * count) + place.copied(ElementType::U16, 2 * count)
    );
}

pub(crate) fn scalars_and_empty_tensors_keep_their_shapes(place: &Place) {
    let model = Model::new("m")
        .floats("empty", &[0, 4], &[])
        .floats("scalar", &[], &[2.5])
        .floats("tail", &[3, 0], &[]);
    let daemon = place.serve(model);
    let vb = place.attach(&daemon).var_builder(DType::F32);
    assert_eq!(
        vb.get((), "scalar").unwrap().to_scalar::<f32>().unwrap(),
        2.5
    );
    assert_eq!(vb.get((0, 4), "empty").unwrap().elem_count(), 0);
    assert_eq!(vb.get_unchecked("tail").unwrap().dims(), &[3, 0]);
}

pub(crate) fn a_type_that_candle_lacks_is_refused_by_name_and_its_bytes_are_there(place: &Place) {
    let lacking = [
        ElementType::Bool,
        ElementType::I8,
        ElementType::U64,
        ElementType::F8E5M2,
        ElementType::C64,
    ];
    let mut model = Model::new("m").floats("good", &[1], &[1.]);
    for element in lacking {
        let name = format!("t.{}", element.as_str());
        model = model.tensor(&name, element, &[3], values(element, 3));
    }
    let daemon = place.serve(model);
    let cache = place.attach(&daemon);
    let vb = cache.var_builder(DType::F32);
    for element in lacking {
        let name = format!("t.{}", element.as_str());
        for error in [
            vb.get(3, &name).unwrap_err(),
            vb.get_unchecked(&name).unwrap_err(),
        ] {
            let text = error.to_string();
            assert!(
                text.contains(&name) && text.contains(element.as_str()) && text.contains("raw("),
                "{text}"
            );
        }
        assert!(vb.contains_tensor(&name));
        place.check_raw(&cache, &name, &values(element, 3));
    }
    assert_eq!(vb.get(1, "good").unwrap().to_vec1::<f32>().unwrap(), [1.]);
}

pub(crate) fn names_that_share_weights_share_one_storage_in_every_dtype(place: &Place) {
    let model = Model::new("m")
        .floats("embed.weight", &[2, 2], &[1., 2., 3., 4.])
        .floats("other", &[2], &[1., 2.])
        .alias("lm_head.weight", "embed.weight");
    let daemon = place.serve(model);
    let cache = place.attach(&daemon);
    for dtype in [DType::F32, DType::F64] {
        let vb = cache.var_builder(dtype);
        let one = vb.get((2, 2), "embed.weight").unwrap();
        let two = vb.pp("lm_head").get((2, 2), "weight").unwrap();
        assert_eq!(address(&one), address(&two));
        // What has one name is kept by nobody: each request makes its own, unless it lies in the shared memory.
        let (a, b) = (vb.get(2, "other").unwrap(), vb.get(2, "other").unwrap());
        let in_place = place.serves_in_place() && dtype == DType::F32;
        assert_eq!(address(&a) == address(&b), in_place, "{dtype:?}");
    }
    assert_eq!(cache.memory_bytes(), place.slab_bytes(256 + 8));
    assert_eq!(cache.report().tensors, 3);
}

pub(crate) fn another_dtype_is_converted_as_candle_does_and_counted(place: &Place) {
    let values = [0.1f32, 1e30, -7.7, 65504.];
    let model = Model::new("m").floats("a", &[4], &values).tensor(
        "ids",
        ElementType::U16,
        &[2],
        [65535u16, 7].iter().flat_map(|v| v.to_le_bytes()).collect(),
    );
    let daemon = place.serve(model);
    let cache = place.attach(&daemon);
    let theirs = Tensor::new(&values, &place.device).unwrap();
    let theirs = theirs.to_dtype(DType::BF16).unwrap();
    let ours = cache.var_builder(DType::BF16).get(4, "a").unwrap();
    assert_eq!(stored_bytes(&ours), stored_bytes(&theirs));
    cache.var_builder(DType::F32).get(4, "a").unwrap();
    let ids = cache.var_builder(DType::U32).get(2, "ids").unwrap();
    assert_eq!(ids.to_vec1::<u32>().unwrap(), [65535, 7]);
    let casts = cache.report().casts;
    let casts: Vec<_> = casts
        .iter()
        .map(|c| (c.stored, c.asked, c.tensors, c.bytes))
        .collect();
    assert_eq!(
        casts,
        [
            (ElementType::F32, DType::BF16, 1, 16),
            (ElementType::U16, DType::U32, 1, 4)
        ]
    );
}

pub(crate) fn strict_serves_stored_dtypes_and_converts_nothing(place: &Place) {
    let daemon = place.serve(one_tensor());
    let cache = place.attach_as(&daemon.config("m").strict(true)).unwrap();
    assert!(cache.var_builder(DType::F32).get(1, "a").is_ok());
    let text = cache
        .var_builder(DType::BF16)
        .get(1, "a")
        .unwrap_err()
        .to_string();
    assert!(
        text.contains("`a`") && text.contains("F32") && text.contains("BF16"),
        "{text}"
    );
    assert!(cache.report().casts.is_empty());
}

pub(crate) fn a_conversion_that_candle_lacks_names_the_tensor(place: &Place) {
    let model = Model::new("m").tensor("packed", ElementType::F4, &[4], vec![1, 2]);
    let daemon = place.serve(model);
    let vb = place.attach(&daemon).var_builder(DType::F32);
    let text = vb.get(4, "packed").unwrap_err().to_string();
    assert!(text.contains("`packed`") && text.contains("F4"), "{text}");
}

pub(crate) fn a_wrong_shape_is_candles_own_error_with_the_name(place: &Place) {
    let model = Model::new("m").floats("layer.weight", &[2, 3], &[0.; 6]);
    let daemon = place.serve(model);
    let vb = place.attach(&daemon).var_builder(DType::F32);
    match bare(vb.pp("layer").get((3, 2), "weight").unwrap_err()) {
        Error::UnexpectedShape { msg, expected, got } => {
            assert!(msg.contains("layer.weight"));
            assert_eq!((expected.dims(), got.dims()), (&[3, 2][..], &[2, 3][..]));
        }
        other => panic!("{other:?}"),
    }
}

pub(crate) fn verifying_names_the_tensor_whose_bytes_are_not_those_that_were_loaded(place: &Place) {
    let good = Model::new("m")
        .floats("a", &[2], &[1., 2.])
        .floats("b", &[1], &[3.]);
    let bad = Model::new("m")
        .floats("a", &[2], &[1., 2.])
        .floats("b", &[1], &[4.]);
    let (mut entry, mut other) = (place.build(good), place.build(bad));
    let honest = place.serve(one_tensor());
    let verified = place.attach_as(&honest.config("m").verify(true)).unwrap();
    assert!(verified.report().verified);
    std::mem::swap(&mut entry.slabs, &mut other.slabs);
    let daemon = StandIn::serving(entry);
    let error = place
        .attach_as(&daemon.config("m").verify(true))
        .unwrap_err();
    assert!(
        matches!(&error, AttachError::Tensor(e) if matches!(&**e, TensorError::Damaged { name, .. } if name == "b")),
        "{error}"
    );
}
