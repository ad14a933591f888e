//! The flags that say how to quantize, shared by the commands that take them.

use std::path::PathBuf;
use std::sync::Arc;

use candle_ipc_cache::quantize::{Imatrix, Quantize, Recipe};
use clap::builder::FalseyValueParser;

/// How to quantize.
#[derive(clap::Args, Debug, Default)]
pub struct QuantizeArgs {
    /// Quantize while loading: a type (`q4k`, `q8_0`, ...), rules by tensor name (`default=q4k,lm_head=q6k,*norm*=stored`),
    /// or a `.toml` file of such rules. A rule may name what to fall back to: `*.down_proj=q5k/q8_0`
    #[arg(long, value_name = "RECIPE", env = "CANDLE_CACHE_QUANTIZE")]
    pub quantize: Option<String>,
    /// Importance matrix that q2k to q6k are made with, as llama.cpp's `imatrix` program writes it
    #[arg(
        long,
        value_name = "FILE",
        env = "CANDLE_CACHE_IMATRIX",
        requires = "quantize"
    )]
    pub imatrix: Option<PathBuf>,
    /// Quantize NaN, infinities and values beyond a block scale's range into whatever comes out
    #[arg(long, env = "CANDLE_CACHE_ALLOW_NONFINITE", value_parser = FalseyValueParser::new())]
    pub allow_nonfinite: bool,
    /// Quantize tensors again that are quantized already
    #[arg(long, env = "CANDLE_CACHE_REQUANTIZE", value_parser = FalseyValueParser::new())]
    pub requantize: bool,
}

impl QuantizeArgs {
    /// Reads the recipe, and the files that it takes.
    pub fn read(&self) -> anyhow::Result<Option<Quantize>> {
        let Some(text) = &self.quantize else {
            let others = [
                (self.imatrix.is_some(), "--imatrix"),
                (self.allow_nonfinite, "--allow-nonfinite"),
                (self.requantize, "--requantize"),
            ];
            for (_, flag) in others.iter().filter(|(given, _)| *given) {
                tracing::warn!("{flag}, or its variable, has no effect without --quantize");
            }
            return Ok(None);
        };
        let imatrix = self.imatrix.as_deref().map(Imatrix::read).transpose()?;
        Ok(Some(Quantize {
            imatrix: imatrix.map(Arc::new),
            allow_nonfinite: self.allow_nonfinite,
            requantize: self.requantize,
            ..Quantize::new(Recipe::from_argument(text)?)
        }))
    }
}
