//! The llama example on a checkpoint with Hugging Face names whose matrices are GGML blocks, as it comes from the cache.
//! The model is a tiny one with made-up weights, so that every step can be compared with candle's own.

#[allow(dead_code, reason = "the example uses all of it")]
#[path = "../examples/llama/chat.rs"]
mod chat;
#[path = "../examples/llama/dense.rs"]
mod dense;
#[path = "../examples/llama/errors.rs"]
mod errors;
#[path = "../examples/llama/quantized.rs"]
mod quantized;
#[allow(dead_code, reason = "the example uses all of it")]
#[path = "../examples/llama/sample.rs"]
mod sample;
#[path = "common/stand_in.rs"]
mod stand_in;
#[allow(dead_code, reason = "the example uses all of it")]
#[path = "../examples/llama/tokenizer.rs"]
mod tokenizer;
#[allow(dead_code, reason = "the example uses all of it")]
#[path = "../examples/llama/weights.rs"]
mod weights;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use candle_core::quantized::{GgmlDType, QTensor, gguf_file};
use candle_core::{DType, Device, Tensor};
use candle_ipc_cache::manifest::ElementType;
use candle_ipc_cache::protocol::{Refusal, Reply};
use candle_ipc_cache::tensors::ggml_dtype;
use candle_ipc_cache::{IpcCache, IpcConfig};
use candle_nn::{VarBuilder, VarMap};
use candle_transformers::models::llama::{self, LlamaConfig};
use quantized::{Config, GgufFile, Llama};
use serde_json::{Value, json};
use stand_in::{Model, StandIn};
use weights::{Build, Weights};

const CONTEXT: usize = 64;

/// Tokens that are fed one after the other, as a prompt and as single tokens.
const TEXT: [&[u32]; 4] = [&[3, 50, 7, 7, 95, 0, 21, 8, 64], &[12], &[80], &[33]];

/// A Llama's `config.json`. Rotations are of all three kinds: kept, stretched, and between.
fn described(tied: bool) -> Value {
    json!({
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "attention_bias": false,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": tied,
    })
}

/// Numbers around zero without a pattern.
fn noise(shape: &[usize], name: &str) -> Result<Tensor> {
    let mut bytes = vec![0; shape.iter().product()];
    blake3::Hasher::new()
        .update(name.as_bytes())
        .finalize_xof()
        .fill(&mut bytes);
    let values: Vec<f32> = bytes.iter().map(|b| f32::from(*b) / 128. - 1.).collect();
    Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
}

/// Candle's Llama over `weights`.
fn dense_model(
    weights: VarBuilder<'_>,
    config: &Value,
) -> Result<impl FnMut(&Tensor, usize) -> candle_core::Result<Tensor> + use<>> {
    let config: LlamaConfig = serde_json::from_value(config.clone())?;
    let config = config.into_config(false);
    let mut cache = llama::Cache::new(true, DType::F32, &config, &Device::Cpu)?;
    let model = llama::Llama::load(weights, &config)?;
    Ok(move |tokens: &Tensor, position: usize| model.forward(tokens, position, &mut cache))
}

/// The weights of a Llama, under the names that candle's dense one asks for.
fn made_up(config: &Value) -> Result<BTreeMap<String, Tensor>> {
    let asked = VarMap::new();
    let weights = VarBuilder::from_varmap(&asked, DType::F32, &Device::Cpu);
    drop(dense_model(weights, config)?);
    let asked = asked.data().lock().expect("one thread");
    asked
        .iter()
        .map(|(name, var)| {
            let values = noise(var.dims(), name)?;
            let values = match var.rank() {
                // Every BF16 value is an F32 value: the model is the same in both.
                1 => (values / 4.)?.affine(1., 1.)?.to_dtype(DType::BF16)?,
                _ if name.contains("embed") => values,
                _ => (values / 4.)?,
            };
            Ok((name.clone(), values.to_dtype(DType::F32)?))
        })
        .collect()
}

fn from_tensors(tensors: &BTreeMap<String, Tensor>) -> VarBuilder<'static> {
    let tensors = tensors.clone().into_iter().collect();
    VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu)
}

/// Candle's own `QTensor`s: matrices as `dtype`, norms as BF16.
fn quantize(
    tensors: &BTreeMap<String, Tensor>,
    dtype: GgmlDType,
) -> Result<BTreeMap<String, QTensor>> {
    tensors
        .iter()
        .map(|(name, tensor)| {
            let dtype = match tensor.rank() {
                1 => GgmlDType::BF16,
                _ => dtype,
            };
            Ok((name.clone(), QTensor::quantize(tensor, dtype)?))
        })
        .collect()
}

/// Writes them to a file, and opens it.
fn on_disk(tensors: &BTreeMap<String, QTensor>, folder: &Path) -> Result<GgufFile> {
    let path = folder.join("model.gguf");
    let tensors: Vec<_> = tensors.iter().map(|(name, t)| (name.as_str(), t)).collect();
    gguf_file::write(&mut std::fs::File::create(&path)?, &[], &tensors)?;
    Ok(GgufFile::open(&path, &Device::Cpu)?)
}

/// The entry that a worker would make of them.
fn entry(tensors: &BTreeMap<String, QTensor>, config: Option<&Value>) -> Result<Model> {
    let mut model = Model::new("tiny");
    for (name, tensor) in tensors {
        let mut elements = ElementType::ALL.iter();
        let element = elements.find(|e| ggml_dtype(**e) == Some(tensor.dtype()));
        let element = element.context("every GGML type is one of the cache's")?;
        let dims = tensor.shape().dims().iter();
        let shape: Vec<u64> = dims.map(|d| *d as u64).collect();
        model = model.tensor(name, *element, &shape, tensor.data()?.to_vec());
    }
    let config = config.map(|config| ("config.json".into(), config.to_string().into_bytes()));
    model.files.extend(config);
    Ok(model)
}

/// The logits after each part of the text.
fn logits(
    mut forward: impl FnMut(&Tensor, usize) -> candle_core::Result<Tensor>,
) -> Result<Vec<Vec<f32>>> {
    let mut position = 0;
    let mut all = Vec::new();
    for part in TEXT {
        let tokens = Tensor::new(part, &Device::Cpu)?.unsqueeze(0)?;
        all.push(forward(&tokens, position)?.squeeze(0)?.to_vec1()?);
        position += part.len();
    }
    Ok(all)
}

/// The largest difference, in parts of the largest value of `theirs`.
fn difference(ours: &[Vec<f32>], theirs: &[Vec<f32>]) -> f32 {
    let (ours, theirs) = (ours.concat(), theirs.concat());
    assert_eq!(ours.len(), theirs.len());
    let largest = |values: &mut dyn Iterator<Item = f32>| values.map(f32::abs).fold(0., f32::max);
    let error = largest(&mut ours.iter().zip(&theirs).map(|(a, b)| a - b));
    error / largest(&mut theirs.iter().copied())
}

fn attach(daemon: &StandIn) -> IpcConfig {
    daemon.config("tiny").trust_name(true)
}

const BUILD: Build = Build {
    context: CONTEXT,
    dtype: DType::F32,
    device: &Device::Cpu,
};

#[test]
fn a_quantized_checkpoint_from_the_cache_answers_as_candles_own_tensors_from_disk() -> Result<()> {
    for tied in [false, true] {
        let config = described(tied);
        let dense = made_up(&config)?;
        assert_eq!(dense.contains_key("lm_head.weight"), !tied);
        let own = quantize(&dense, GgmlDType::Q8_0)?;
        let daemon = StandIn::serving(entry(&own, Some(&config))?.build());

        let weights = Weights::attach(&attach(&daemon), None, &Device::Cpu)?;
        let (mut model, context) = weights.build(&BUILD)?;
        assert_eq!(context, CONTEXT);
        let ours = logits(|tokens, position| model.forward(tokens, position))?;
        let again = logits(|tokens, position| model.forward(tokens, position))?;
        assert!(ours == again, "the first text was not forgotten");

        let folder = tempfile::tempdir()?;
        let file = on_disk(&own, folder.path())?;
        let read = Config::from_json(config.to_string().as_bytes())?;
        let mut model = Llama::load(&file, &read, CONTEXT, &Device::Cpu)?;
        let theirs = logits(|tokens, position| model.forward(tokens, position))?;
        assert!(ours == theirs, "logits differ in some bit");

        // Nothing is left out or exchanged: the dense model says nearly the same.
        let stock = logits(dense_model(from_tensors(&dense), &config)?)?;
        let error = difference(&ours, &stock);
        assert!(error > 0. && error < 0.05, "tied: {tied}, {error}");
    }
    Ok(())
}

#[test]
fn over_weights_that_are_not_rounded_the_quantized_code_is_candles_dense_llama() -> Result<()> {
    for tied in [false, true] {
        for scaled in [false, true] {
            let mut config = described(tied);
            if !scaled {
                config["rope_scaling"] = Value::Null;
            }
            let dense = made_up(&config)?;
            let folder = tempfile::tempdir()?;
            let file = on_disk(&quantize(&dense, GgmlDType::F32)?, folder.path())?;
            let read = Config::from_json(config.to_string().as_bytes())?;
            let mut model = Llama::load(&file, &read, CONTEXT, &Device::Cpu)?;
            let ours = logits(|tokens, position| model.forward(tokens, position))?;
            let stock = logits(dense_model(from_tensors(&dense), &config)?)?;
            let error = difference(&ours, &stock);
            assert!(error < 1e-5, "tied: {tied}, scaled: {scaled}, {error}");
        }
    }
    Ok(())
}

#[test]
fn a_head_is_used_where_it_is_there_unless_the_config_ties_it() -> Result<()> {
    let dense = made_up(&described(false))?;
    let own = quantize(&dense, GgmlDType::Q8_0)?;
    let mut headless = quantize(&dense, GgmlDType::Q8_0)?;
    headless.remove("lm_head.weight");
    let answer = |tensors: &BTreeMap<String, QTensor>, tied| {
        let daemon = StandIn::serving(entry(tensors, Some(&described(tied)))?.build());
        let weights = Weights::attach(&attach(&daemon), None, &Device::Cpu)?;
        let (mut model, _) = weights.build(&BUILD)?;
        logits(|tokens, position| model.forward(tokens, position))
    };
    let tied = answer(&headless, true)?;
    assert!(answer(&headless, false)? == tied);
    assert!(answer(&own, true)? == tied);
    assert!(answer(&own, false)? != tied);
    Ok(())
}

#[test]
fn a_dense_entry_is_still_candles_own_llama() -> Result<()> {
    let config = described(true);
    let dense = made_up(&config)?;
    let own = quantize(&dense, GgmlDType::F32)?;
    let daemon = StandIn::serving(entry(&own, Some(&config))?.build());
    let weights = Weights::attach(&attach(&daemon), None, &Device::Cpu)?;
    let (mut model, _) = weights.build(&BUILD)?;
    let ours = logits(|tokens, position| model.forward(tokens, position))?;
    let stock = logits(dense_model(from_tensors(&dense), &config)?)?;
    assert!(ours == stock, "logits differ in some bit");
    Ok(())
}

#[test]
fn dequantized_at_the_cache_the_entry_is_a_dense_llama() -> Result<()> {
    let config = described(false);
    let own = quantize(&made_up(&config)?, GgmlDType::Q8_0)?;
    let daemon = StandIn::serving(entry(&own, Some(&config))?.build());
    let cache = IpcCache::attach(&attach(&daemon).dequantize(true), &Device::Cpu)?;
    let ours = logits(dense_model(cache.var_builder(DType::F32), &config)?)?;
    let dense = own
        .iter()
        .map(|(name, tensor)| Ok((name.clone(), tensor.dequantize(&Device::Cpu)?)))
        .collect::<Result<_>>()?;
    let theirs = logits(dense_model(from_tensors(&dense), &config)?)?;
    assert!(ours == theirs, "logits differ in some bit");
    Ok(())
}

// ---------------------------------------------------------------------------------------- messages

/// What the program says about an entry that it cannot build from.
fn refusal(model: Model) -> Result<String> {
    let daemon = StandIn::serving(model.build());
    let weights = Weights::attach(&attach(&daemon), None, &Device::Cpu)?;
    let error = weights.build(&BUILD).err().context("no Llama")?;
    Ok(errors::told(&error))
}

#[track_caller]
fn assert_says(text: &str, parts: &[&str]) {
    for part in parts {
        let times = text.matches(part).count();
        assert_eq!(times, 1, "`{part}` stands there {times} times: {text}");
    }
}

#[test]
fn an_entry_that_is_no_llama_is_told_apart_and_named() -> Result<()> {
    let unknown = Model::new("tiny").floats("encoder.weight", &[1], &[1.]);
    let text = refusal(unknown)?;
    assert_says(&text, &["entry `tiny` on host", "config.json"]);
    assert_says(&text, &["`encoder.weight`", "`candle-cache load`"]);

    let own = quantize(&made_up(&described(true))?, GgmlDType::Q8_0)?;
    for (key, value, parts) in [
        ("model_type", json!("bert"), &["\"bert\"", "\"llama\""]),
        ("model_type", json!(null), &["no model_type", "\"llama\""]),
        ("mlp_bias", json!(true), &["mlp_bias", "without biases"]),
        (
            "rope_parameters",
            json!({"rope_theta": 500000.0}),
            &["rope_parameters", "rope_theta"],
        ),
        ("head_dim", json!(32), &["4 heads of 32", "width of 64"]),
        ("hidden_size", json!("x"), &["config.json: ", "expected"]),
        ("num_key_value_heads", json!(3), &["4 heads", "3 key heads"]),
        (
            "num_attention_heads",
            json!(0),
            &["entry `tiny`", "0 heads"],
        ),
    ] {
        let mut config = described(true);
        if key != "head_dim" {
            config["head_dim"] = Value::Null;
        }
        if key == "rope_parameters" {
            let base = config.as_object_mut().context("an object")?;
            base.remove("rope_theta");
        }
        config[key] = value;
        assert_says(&refusal(entry(&own, Some(&config))?)?, parts);
    }
    Ok(())
}

#[test]
fn a_missing_entry_is_told_with_the_command_that_loads_it() -> Result<()> {
    let daemon = StandIn::answering(Box::new(|connection, _| {
        let no = Reply::Refused {
            code: Refusal::NoEntry,
            reason: "there is none".into(),
        };
        let sent = connection.send(&no, &[], Duration::from_secs(20));
        sent.expect("an engine that waits for the answer");
    }));
    let config = attach(&daemon);
    for (path, load) in [
        (None, "`candle-cache load MODEL --name tiny --device host`"),
        (
            Some(Path::new("models/x")),
            "`candle-cache load models/x --name tiny --device host`",
        ),
    ] {
        let error = Weights::attach(&config, path, &Device::Cpu);
        let text = errors::told(&error.err().context("there is no entry")?);
        assert_says(&text, &["there is none", load]);
    }
    Ok(())
}

#[test]
fn a_cause_that_is_part_of_its_error_is_told_once() -> Result<()> {
    let folder = tempfile::tempdir()?;
    std::fs::write(folder.path().join("model.safetensors"), b"not a checkpoint")?;
    let own = quantize(&made_up(&described(true))?, GgmlDType::Q8_0)?;
    let daemon = StandIn::serving(entry(&own, None)?.build());
    let config = daemon.config("tiny").checkpoint(folder.path());
    let error = Weights::attach(&config, None, &Device::Cpu);
    let error = error.err().context("no checkpoint to compare with")?;
    assert!(error.chain().count() > 1, "{error:?}");
    let cause = error.root_cause().to_string();
    assert_says(&errors::told(&error), &[&cause, "model.safetensors"]);
    let wrapped = error.context("while attaching");
    assert_says(&errors::told(&wrapped), &["while attaching: ", &cause]);
    Ok(())
}
