//! New weights in a model that was built over a `VarMap`: all of them, or none.

use candle_core::{DType, Device, Tensor};
use candle_ipc_cache::IpcCache;
use candle_ipc_cache::manifest::ElementType;
use candle_nn::{VarBuilder, VarMap};
use candle_transformers::models::llama;

use crate::checkpoint::Checkpoint;
use crate::listing::names;
use crate::models;

/// A model over variables.
fn model(dtype: DType) -> (VarMap, llama::Llama) {
    let map = VarMap::new();
    let vb = VarBuilder::from_varmap(&map, dtype, &Device::Cpu);
    let model = models::llama(vb).unwrap();
    (map, model)
}

fn logits(model: &llama::Llama, dtype: DType) -> Vec<f32> {
    let config = models::llama_config();
    let mut cache = llama::Cache::new(false, dtype, &config, &Device::Cpu).unwrap();
    let ids = Tensor::new(&[[1u32, 5, 7]], &Device::Cpu).unwrap();
    let logits = model.forward(&ids, 0, &mut cache).unwrap();
    logits.flatten_all().unwrap().to_vec1().unwrap()
}

fn values(map: &VarMap) -> Checkpoint {
    Checkpoint::of_map(map)
}

#[test]
fn a_reloaded_model_computes_as_one_that_was_built_over_the_cache() {
    for dtype in [DType::F32, DType::BF16] {
        let cache = Checkpoint::of(models::llama).attach();
        let wanted = cache.build(dtype, |vb| models::llama(vb)).unwrap();
        let before = cache.report();
        let (map, model) = model(dtype);
        let other = logits(&model, dtype);
        cache.reload_into(&map).unwrap();
        let wanted = logits(&wanted, dtype);
        assert_ne!(other, wanted);
        assert_eq!(logits(&model, dtype), wanted);
        let after = cache.report();
        assert_eq!(after.copied_bytes, 2 * before.copied_bytes);
        let casts: u64 = after.casts.iter().map(|cast| cast.tensors).sum();
        let vars = map.all_vars().len() as u64;
        assert_eq!(casts, if dtype == DType::F32 { 0 } else { 2 * vars });
    }
}

#[track_caller]
fn refused(cache: &IpcCache, said: &[&str]) {
    let (map, _) = model(DType::F32);
    let before = values(&map);
    let error = cache.reload_into(&map).expect_err("a refusal");
    let found = error.unmet().expect("a list");
    let mut listed = names(found);
    listed.sort_unstable();
    assert_eq!(listed, said, "{error}");
    let text = error.to_string();
    assert!(said.iter().all(|name| text.contains(name)), "{text}");
    assert!(!text.contains("candle's first error"), "{text}");
    assert!(values(&map).0 == before.0);
    assert_eq!(cache.report().copied_bytes, 0);
}

#[test]
fn one_tensor_that_does_not_fit_leaves_every_variable_as_it_was() {
    let whole = Checkpoint::of(models::llama);
    let (head, norm) = ("lm_head.weight", "model.norm.weight");
    let down = "model.layers.0.mlp.down_proj.weight";
    refused(&whole.clone().drop(&[norm]).attach(), &[norm]);
    refused(&whole.clone().transpose(down).attach(), &[down]);
    refused(
        &whole.clone().retype(norm, ElementType::I8).attach(),
        &[norm],
    );
    let all = whole
        .drop(&[norm])
        .transpose(down)
        .retype(head, ElementType::Q8_0);
    refused(&all.attach(), &[head, down, norm]);
}

#[test]
fn variables_under_another_prefix_are_offered_it() {
    let moved = Checkpoint::of(models::llama).rename(|name| format!("text.{name}"));
    let (map, _) = model(DType::F32);
    let error = moved.clone().attach().reload_into(&map).unwrap_err();
    let found = error.unmet().expect("a list");
    assert_eq!(
        (found.fit[0].from.as_str(), found.fit[0].to.as_str()),
        ("", "text.")
    );
    assert_eq!(
        (names(found).len(), found.fitted.len()),
        (0, map.all_vars().len())
    );
    let cache = moved.attach_with(|config| config.prefix("text."));
    cache.reload_into(&map).unwrap();
}

#[test]
fn what_the_map_has_no_variable_for_is_left_out() {
    let mut checkpoint = Checkpoint::of(models::llama);
    let extra = checkpoint.0["lm_head.weight"].clone();
    checkpoint.0.insert("extra".into(), extra);
    let cache = checkpoint.attach();
    let (map, _) = model(DType::F32);
    cache.reload_into(&map).unwrap();
    assert!(!map.data().lock().unwrap().contains_key("extra"));
    cache.reload_into(&VarMap::new()).unwrap();
}
