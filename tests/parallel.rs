//! The example's Llama spread over several ranks, here threads, against candle's own Llama on all of it.
#![allow(missing_docs, clippy::unwrap_used)]

#[allow(dead_code, reason = "the example uses all of it")]
#[path = "../examples/llama/parallel.rs"]
mod parallel;
#[allow(dead_code, reason = "the example uses all of it")]
#[path = "../examples/llama/quantized.rs"]
mod quantized;

use std::path::Path;
use std::rc::Rc;
use std::sync::{Arc, Condvar, Mutex};

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::var_builder::ShardedSafeTensors;
use candle_nn::{VarBuilder, VarMap};
use candle_transformers::models::llama::{Cache, Llama, LlamaConfig};
use parallel::{Group, Parallel};
use quantized::Config;
use serde_json::json;

/// One sum under way: what has come, and the result until all have taken it.
#[derive(Default)]
struct Round {
    parts: Vec<Option<Tensor>>,
    sum: Option<Tensor>,
    taken: usize,
}

/// Ranks that are threads of this process.
struct Threads {
    rank: usize,
    round: Arc<(Mutex<Round>, Condvar)>,
    size: usize,
}

impl Group for Threads {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn sum(&self, part: &Tensor) -> Result<Tensor> {
        let (round, changed) = &*self.round;
        let mut round = changed
            .wait_while(round.lock().unwrap(), |r| r.sum.is_some())
            .unwrap();
        round.parts[self.rank] = Some(part.clone());
        if round.parts.iter().all(Option::is_some) {
            let mut parts = round.parts.iter_mut().map(|p| p.take().unwrap());
            let first = parts.next().unwrap();
            round.sum = Some(parts.try_fold(first, |sum, part| sum + part)?);
            changed.notify_all();
        }
        let mut round = changed.wait_while(round, |r| r.sum.is_none()).unwrap();
        let sum = round.sum.clone().unwrap();
        round.taken += 1;
        if round.taken == self.size {
            round.taken = 0;
            round.sum = None;
            changed.notify_all();
        }
        Ok(sum)
    }
}

const VOCABULARY: usize = 96;

fn describe(tied: bool) -> serde_json::Value {
    json!({
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": VOCABULARY,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "max_position_embeddings": 64, "tie_word_embeddings": tied,
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32, "rope_type": "llama3"}
    })
}

/// A prompt and two further tokens, and the logits after each.
fn texts() -> [Vec<u32>; 3] {
    [vec![3, 50, 95, 0, 47, 48], vec![71], vec![12]]
}

fn logits(mut forward: impl FnMut(&Tensor, usize) -> Result<Tensor>) -> Vec<Vec<f32>> {
    let mut at = 0;
    let mut out = Vec::new();
    // Twice: the second time begins a new text.
    for tokens in texts().iter().chain(&texts()) {
        if tokens.len() > 1 {
            at = 0;
        }
        let input = Tensor::new(tokens.as_slice(), &Device::Cpu)
            .unwrap()
            .unsqueeze(0)
            .unwrap();
        let logits = forward(&input, at).unwrap().squeeze(0).unwrap();
        out.push(logits.to_dtype(DType::F32).unwrap().to_vec1().unwrap());
        at += tokens.len();
    }
    out
}

fn stock(path: &Path, config: &serde_json::Value) -> Vec<Vec<f32>> {
    let config: LlamaConfig = serde_json::from_value(config.clone()).unwrap();
    let config = config.into_config(false);
    let tensors = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
    let model = Llama::load(vb, &config).unwrap();
    let new = || Cache::new(true, DType::F32, &config, &Device::Cpu).unwrap();
    let mut cache = new();
    logits(|tokens, at| {
        if at == 0 {
            cache = new();
        }
        model.forward(tokens, at, &mut cache)
    })
}

fn spread(path: &Path, config: &serde_json::Value, size: usize) -> Vec<Vec<f32>> {
    let round = Round {
        parts: vec![None; size],
        ..Round::default()
    };
    let round = Arc::new((Mutex::new(round), Condvar::new()));
    let config = Config::from_json(config.to_string().as_bytes()).unwrap();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..size)
            .map(|rank| {
                let (round, config) = (round.clone(), &config);
                scope.spawn(move || {
                    let group = Rc::new(Threads { rank, round, size });
                    // SAFETY: nobody writes to the file while it is mapped.
                    let vb = unsafe {
                        ShardedSafeTensors::var_builder(&[path], DType::F32, &Device::Cpu)
                    };
                    let mut model = Parallel::load(vb.unwrap(), config, 64, group).unwrap();
                    logits(|tokens, at| model.forward(tokens, at))
                })
            })
            .collect();
        let mut all: Vec<_> = ranks.into_iter().map(|r| r.join().unwrap()).collect();
        let first = all.remove(0);
        assert!(all.iter().all(|other| *other == first), "ranks disagree");
        first
    })
}

#[test]
fn a_llama_spread_over_ranks_computes_what_candles_own_does() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    for tied in [false, true] {
        let config = describe(tied);
        let map = VarMap::new();
        let vb = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
        let parsed: LlamaConfig = serde_json::from_value(config.clone()).unwrap();
        Llama::load(vb, &parsed.into_config(false)).unwrap();
        map.save(&path).unwrap();
        let wanted = stock(&path, &config);
        assert_eq!(wanted[..3], wanted[3..], "a new text begins from nothing");
        for size in [2, 4] {
            let found = spread(&path, &config, size);
            let largest = wanted.iter().flatten().fold(0f32, |m, x| m.max(x.abs()));
            for (a, b) in found.iter().flatten().zip(wanted.iter().flatten()) {
                // The order of a sum is all that differs.
                assert!((a - b).abs() <= 1e-5 * largest, "{size} ranks: {a} and {b}");
            }
        }
    }
}

#[test]
fn heads_that_cannot_be_spread_are_refused() {
    let config = Config::from_json(describe(false).to_string().as_bytes()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("empty.safetensors");
    let none: [(String, Tensor); 0] = [];
    candle_core::safetensors::save(&none.into(), &path).unwrap();
    // SAFETY: nobody writes to the file while it is mapped.
    let vb = unsafe { ShardedSafeTensors::var_builder(&[&path], DType::F32, &Device::Cpu) };
    let group = Rc::new(Threads {
        rank: 0,
        round: Arc::default(),
        size: 3,
    });
    let refused = Parallel::load(vb.unwrap(), &config, 64, group);
    let error = refused.err().unwrap().to_string();
    assert!(
        error.contains("8 heads") && error.contains("3 processes"),
        "{error}"
    );
}
