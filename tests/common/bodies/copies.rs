//! Weights that an engine copies into memory of its own: equal to what is mapped, and held by nobody else.

use std::sync::Arc;

use candle_core::quantized::QMatMul;
use candle_core::{DType, Device, Error, Module, Tensor};
use candle_ipc_cache::manifest::ElementType;
use candle_ipc_cache::protocol::Request;
use candle_ipc_cache::tensors::{ggml_dtype, plain_dtype};
use candle_ipc_cache::{AttachError, IpcCache};

use super::quantized::same;
use super::{blocks, ggml_types, one_tensor, values};
use crate::place::{Place, address, stored_bytes};
use crate::stand_in::{Model, StandIn};

/// A model with a tensor of every type, some of odd shapes, and a tied name.
fn everything() -> Model {
    let mut model = Model::new("m")
        .floats("empty", &[0, 4], &[])
        .floats("scalar", &[], &[2.5])
        .alias("tied", "F32");
    model.per_slab = 5;
    for element in ElementType::ALL.iter().copied() {
        if element.is_quantized() {
            let dtype = ggml_dtype(element).expect("every quantized type is one of GGML's");
            model = model.tensor(element.as_str(), element, &[4, 512], blocks(dtype, 4));
        } else {
            model = model.tensor(element.as_str(), element, &[3, 8], values(element, 24));
        }
    }
    model
}

pub(crate) fn attach_copy(place: &Place, daemon: &StandIn) -> IpcCache {
    let config = daemon.config("m").copy(true);
    place.attach_as(&config).expect("an attach")
}

pub(crate) fn a_copy_says_goodbye_at_attach_and_outlives_the_daemon(place: &Place) {
    let daemon = place.serve(everything());
    let cache = attach_copy(place, &daemon);
    daemon.next();
    assert_eq!(daemon.next(), Some(Request::Received));
    assert_eq!(daemon.next(), Some(Request::Goodbye));
    drop(daemon);
    assert!(!cache.daemon_lost());
    let scalar = cache.var_builder(DType::F32).get((), "scalar").unwrap();
    assert_eq!(scalar.to_scalar::<f32>().unwrap(), 2.5);
    let detached = cache.detach().unwrap();
    assert_eq!((detached.tensors, detached.bytes), (0, 0));
}

pub(crate) fn copied_tensors_equal_mapped_ones_in_every_type(place: &Place) {
    let model = everything();
    let has_a_type = |e: ElementType| plain_dtype(e).is_some() || ggml_dtype(e).is_some();
    let copied = model
        .tensors
        .iter()
        .filter(|t| has_a_type(t.1) || place.copies_bytes_without_a_type());
    let copied: usize = copied.map(|t| t.3.len()).sum();
    let daemon = place.serve(model);
    let (mapped, copy) = (place.attach(&daemon), attach_copy(place, &daemon));
    assert_eq!(copy.report().copied_bytes, copied as u64);
    assert!(copy.report().copy && !mapped.report().copy);
    for entry in &mapped.manifest().tensors {
        let (name, element) = (&entry.name, entry.element);
        if let Some(dtype) = plain_dtype(element) {
            let ours = copy.var_builder(dtype).get_unchecked(name).unwrap();
            let theirs = mapped.var_builder(dtype).get_unchecked(name).unwrap();
            assert_eq!(ours.dims(), theirs.dims());
            assert_eq!(stored_bytes(&ours), stored_bytes(&theirs), "{name}");
        }
        let ours = copy.quantized().get_no_shape(name);
        let theirs = mapped.quantized().get_no_shape(name);
        match (ours, theirs) {
            (Ok(ours), Ok(theirs)) => {
                assert_eq!(
                    (ours.dtype(), ours.shape()),
                    (theirs.dtype(), theirs.shape())
                );
                assert_eq!(ours.data().unwrap(), theirs.data().unwrap(), "{name}");
            }
            (Err(ours), Err(theirs)) => {
                let first_line = |e: Error| e.to_string().lines().next().map(String::from);
                // candle takes no scalar as a QTensor: it says so, but for one in a GPU's mapped memory, which is
                // refused before candle sees it.
                assert_eq!(
                    first_line(ours) == first_line(theirs),
                    place.is_host() || name != "scalar",
                    "{name}"
                );
            }
            (ours, theirs) => panic!("{name}: {ours:?}, {theirs:?}"),
        }
        match copy.raw(name) {
            Ok(raw) if entry.bytes == 0 => assert!(raw.is_empty(), "{name}"),
            Ok(raw) => assert_eq!(raw, mapped.raw(name).unwrap(), "{name}"),
            Err(e) => assert!(e.to_string().contains("ask for the tensor"), "{e}"),
        }
        if !has_a_type(element) {
            let there = copy.raw(name).is_ok();
            assert_eq!(there, place.copies_bytes_without_a_type(), "{name}");
        }
    }
}

pub(crate) fn a_copied_quantized_tensor_computes_exactly_as_the_mapped_one(place: &Place) {
    let daemon = place.serve(everything());
    let (mapped, copy) = (place.attach(&daemon), attach_copy(place, &daemon));
    let x = Tensor::rand(-1f32, 1., (3, 512), &Device::Cpu).unwrap();
    let x = x.to_device(&place.device).unwrap();
    for (element, dtype) in
        ggml_types().filter(|(e, _)| e.is_quantized() && *e != ElementType::Q8_1)
    {
        let product = |cache: &IpcCache| {
            let weight = cache.quantized().get((4, 512), element.as_str()).unwrap();
            QMatMul::from_arc(weight).unwrap().forward(&x)
        };
        assert_eq!(
            same(element.as_str(), product(&mapped), product(&copy)),
            place.multiplies(dtype),
            "{element}"
        );
    }
}

pub(crate) fn each_copied_tensor_is_copied_once_and_every_later_copy_is_counted(place: &Place) {
    let model = Model::new("m")
        .floats("a", &[1, 32], &[1.; 32])
        .alias("tied", "a");
    let daemon = place.serve(model);
    let cache = attach_copy(place, &daemon);
    let vb = cache.var_builder(DType::F32);
    let one = vb.get((1, 32), "a").unwrap();
    for name in ["a", "tied"] {
        assert_eq!(address(&vb.get((1, 32), name).unwrap()), address(&one));
    }
    assert_eq!(cache.report().copied_bytes, 128);
    let quantized = cache.quantized();
    let one = quantized.get((1, 32), "a").unwrap();
    assert!(Arc::ptr_eq(&one, &quantized.get((1, 32), "tied").unwrap()));
    assert_eq!(cache.report().copied_bytes, 256);
}

pub(crate) fn a_copy_of_damaged_memory_is_refused_where_verifying_was_asked_for(place: &Place) {
    let mut entry = place.build(one_tensor());
    entry.slabs = place.build(Model::new("m").floats("a", &[1], &[2.])).slabs;
    let daemon = StandIn::serving(entry);
    let error = place
        .attach_as(&daemon.config("m").copy(true).verify(true))
        .unwrap_err();
    assert!(matches!(error, AttachError::Tensor(_)), "{error}");
}
