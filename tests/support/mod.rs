//! What tests with a real model share: the files, a fixed prompt, and the tokens that stock candle answers.
//! The model is SmolLM2-135M, which scripts/fixtures.sh brings.
#![allow(dead_code, reason = "each test binary uses a part of this")]

pub(crate) mod dequantize;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Context, Result, anyhow, ensure};
use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama::{Cache, Llama, LlamaConfig};
use candle_transformers::models::quantized_llama::ModelWeights;

use crate::tokenizer;

/// How many tokens are compared.
pub(crate) const COUNT: usize = 64;

/// The text that they continue. The model is sure how, so that rounding activations, as quantized code does, changes no token.
pub(crate) const PROMPT: &str = "Count: 1, 2, 3, 4, 5, 6,";

/// The model's file.
pub(crate) fn gguf() -> Result<PathBuf> {
    let folder = std::env::var_os("CANDLE_CACHE_FIXTURES").unwrap_or("fixtures".into());
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join(folder)
        .join("smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");
    ensure!(
        path.is_file(),
        "{} is not there: run scripts/fixtures.sh",
        path.display()
    );
    Ok(path)
}

/// The header of the model's file.
pub(crate) fn header() -> Result<Content> {
    Ok(Content::read(&mut std::fs::File::open(gguf()?)?)?)
}

/// The example's program.
pub(crate) fn example() -> Result<PathBuf> {
    let mut path = std::env::current_exe()?;
    path.pop();
    path.pop();
    path.push("examples/llama");
    ensure!(
        path.is_file(),
        "{} is not there: run cargo build --example llama",
        path.display()
    );
    Ok(path)
}

/// Tokens, and the logits that each was taken from.
pub(crate) type Answer = (Vec<u32>, Vec<Vec<f32>>);

/// The fixed prompt in tokens.
pub(crate) fn prompt() -> Result<Vec<u32>> {
    let tokenizer = tokenizer::from_gguf(&header()?)?;
    tokenizer::encode(&tokenizer, PROMPT, true)
}

/// A model's `count` likeliest tokens after the fixed prompt.
pub(crate) fn greedy(
    count: usize,
    mut forward: impl FnMut(&Tensor, usize) -> candle_core::Result<Tensor>,
) -> Result<Answer> {
    let (mut tokens, mut logits) = (Vec::new(), Vec::new());
    let mut input = prompt()?;
    let mut position = 0;
    for _ in 0..count {
        let fed = Tensor::new(input.as_slice(), &Device::Cpu)?.unsqueeze(0)?;
        let answer = forward(&fed, position)?.squeeze(0)?;
        position += input.len();
        let token = answer.argmax(0)?.to_scalar()?;
        logits.push(answer.to_vec1()?);
        tokens.push(token);
        input = vec![token];
    }
    Ok((tokens, logits))
}

/// What stock `quantized_llama` answers from the file. Asked once in each test binary.
pub(crate) fn stock_quantized() -> Result<&'static Answer> {
    static ANSWER: OnceLock<Result<Answer, String>> = OnceLock::new();
    let ask = || {
        let mut file = std::fs::File::open(gguf()?)?;
        let content = Content::read(&mut file)?;
        let mut model = ModelWeights::from_gguf(content, &mut file, &Device::Cpu)?;
        greedy(COUNT, |tokens, position| model.forward(tokens, position))
    };
    let answer = ANSWER.get_or_init(|| ask().map_err(|error| format!("{error:#}")));
    answer
        .as_ref()
        .map_err(|error| anyhow!("stock quantized_llama: {error}"))
}

/// What stock `llama::Llama` answers over `weights`, configured by the folder's config.json.
pub(crate) fn stock_dense(weights: VarBuilder<'static>, folder: &Path) -> Result<Vec<u32>> {
    let config: LlamaConfig = serde_json::from_slice(&std::fs::read(folder.join("config.json"))?)?;
    let config = config.into_config(false);
    let mut cache = Cache::new(true, DType::F32, &config, &Device::Cpu)?;
    let llama = Llama::load(weights, &config)?;
    let (tokens, _) = greedy(COUNT, |tokens, position| {
        llama.forward(tokens, position, &mut cache)
    })?;
    Ok(tokens)
}

/// A folder with the model's dense, HF-named form. Written once in each run of a test binary.
pub(crate) fn dense_folder() -> Result<PathBuf> {
    static FOLDER: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("SmolLM2-135M-dense");
        let written = gguf().and_then(|gguf| dequantize::write(&gguf, &folder));
        written
            .map(|()| folder)
            .map_err(|error| format!("{error:#}"))
    });
    folder
        .clone()
        .map_err(anyhow::Error::msg)
        .context("the dense form of the model")
}
