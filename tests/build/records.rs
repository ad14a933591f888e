//! What a model asked for: as a trace that travels, and in the report.

use candle_core::{DType, Device};
use candle_ipc_cache::manifest::ElementType;
use candle_ipc_cache::trace::Asked;
use candle_ipc_cache::{IpcCache, Trace};

use crate::checkpoint::Checkpoint;
use crate::models;
use crate::stand_in::{Model, StandIn};

fn asked(name: &str, shape: Option<&[u64]>, dtype: Option<ElementType>) -> Asked {
    Asked {
        name: name.into(),
        shape: shape.map(<[u64]>::to_vec),
        dtype,
        shard: None,
    }
}

#[test]
fn a_trace_is_what_a_model_asked_for_and_survives_a_file() {
    let mut checkpoint = Checkpoint::of(models::llama);
    let names: Vec<String> = checkpoint
        .0
        .keys()
        .map(|name| format!("t.{name}"))
        .collect();
    let extra = checkpoint.0["lm_head.weight"].clone();
    checkpoint.0.insert("lm_head.extra".into(), extra);
    let cache = checkpoint
        .rename(|name| format!("t.{name}"))
        .attach_with(|config| config.prefix("t."));
    assert_eq!(cache.trace(), Trace::default());
    cache.build(DType::BF16, |vb| models::llama(vb)).unwrap();
    let trace = cache.trace();
    assert_eq!(trace.names().collect::<Vec<_>>(), names);
    let shape = Some(&[40u64, 32][..]);
    let bf16 = Some(ElementType::BF16);
    assert_eq!(trace.tensors[0], asked("t.lm_head.weight", shape, bf16));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("llama.json");
    trace.write(&path).unwrap();
    assert_eq!(Trace::read(&path).unwrap(), trace);

    let report = cache.report();
    assert_eq!(report.unasked.names, ["t.lm_head.extra"]);
    assert_eq!(
        (report.unasked.tensors, report.unasked.bytes),
        (1, 40 * 32 * 4)
    );
    assert!(
        report
            .to_string()
            .contains("unasked   1 tensors of 5120 bytes: `t.lm_head.extra`")
    );
}

#[test]
fn every_way_of_asking_is_recorded_once() {
    let model = Model::new("m")
        .floats("a", &[2], &[1., 2.])
        .floats("b", &[2], &[1., 2.])
        .floats("c", &[1], &[1.])
        .tensor("q", ElementType::Q8_0, &[1, 32], vec![0; 34])
        .alias("tied", "b");
    let daemon = StandIn::serving(model.build());
    let cache = IpcCache::attach(&daemon.config("m"), &Device::Cpu).unwrap();
    let unasked = |cache: &IpcCache| cache.report().unasked;
    assert_eq!(unasked(&cache).names, ["a", "b", "c", "q"]);
    let vb = cache.var_builder(DType::F32);
    for _ in 0..2 {
        vb.get(2, "a").unwrap();
        vb.to_dtype(DType::F16).get(2, "a").unwrap();
        vb.get_unchecked("a").unwrap();
        vb.get(2, "tied").unwrap();
        cache.quantized().get((1, 32), "q").unwrap();
        cache.quantized().get_no_shape("q").unwrap();
        cache.raw("q").unwrap();
        // In vain, or only looked for.
        assert!(vb.get(3, "a").is_err() && vb.get(1, "none").is_err());
        assert!(vb.contains_tensor("c") && !vb.contains_tensor("other"));
        assert!(cache.raw("nothing").is_err());
    }
    let trace = cache.trace();
    let (f16, f32) = (Some(ElementType::F16), Some(ElementType::F32));
    let blocks = Some(ElementType::Q8_0);
    let expected = [
        asked("a", Some(&[2]), f16),
        asked("a", Some(&[2]), f32),
        asked("a", None, f32),
        asked("q", Some(&[1, 32]), blocks),
        asked("q", None, blocks),
        asked("q", None, None),
        asked("tied", Some(&[2]), f32),
    ];
    assert_eq!(trace.tensors, expected);
    assert_eq!(trace.lookups, ["c", "none", "nothing", "other"]);
    // Under its other name, `b` was asked for.
    assert_eq!(unasked(&cache).names, ["c"]);
    assert_eq!(unasked(&cache).bytes, 4);
}

#[test]
fn a_report_lists_some_unasked_names_and_counts_all() {
    let many = (0..40).fold(Model::new("m"), |model, i| {
        model.floats(&format!("t{i:02}"), &[1], &[0.])
    });
    let daemon = StandIn::serving(many.build());
    let cache = IpcCache::attach(&daemon.config("m"), &Device::Cpu).unwrap();
    let unasked = cache.report().unasked;
    assert_eq!(
        (unasked.tensors, unasked.bytes, unasked.names.len()),
        (40, 160, 16)
    );
    assert!(cache.report().to_string().ends_with("`t15`, ..."));
}
