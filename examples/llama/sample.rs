//! Generation: feeds a prompt, picks one token after the other, and says how long it took.
//! Temperature 0 takes the likeliest token; above it candle's `LogitsProcessor` draws one.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use candle_core::{Device, Tensor};
use candle_transformers::generation::LogitsProcessor;

/// A language model with a key and value cache.
pub(crate) trait Model {
    /// Logits, shape `(1, vocabulary)`, after the last of `tokens`, shape `(1, length)`, which stand at `position`
    /// and on. Position 0 begins a new text.
    fn forward(&mut self, tokens: &Tensor, position: usize) -> candle_core::Result<Tensor>;
}

/// A model, what it has read so far, and how it picks tokens.
pub(crate) struct Generator {
    model: Box<dyn Model>,
    read: Vec<u32>,
    sampler: LogitsProcessor,
    context: usize,
    device: Device,
}

/// What a generation took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timing {
    /// Tokens that were fed before the first new one.
    pub(crate) prompt: usize,
    /// From the call to the first new token.
    pub(crate) first: Duration,
    /// New tokens, a stop token included.
    pub(crate) tokens: usize,
    /// From the first new token to the last.
    pub(crate) rest: Duration,
}

impl Timing {
    /// Tokens in each second after the first token; none when there was only one.
    pub(crate) fn rate(&self) -> Option<f64> {
        (self.tokens > 1).then(|| (self.tokens - 1) as f64 / self.rest.as_secs_f64())
    }
}

impl Generator {
    /// A generator that holds at most `context` positions.
    pub(crate) fn new(
        model: Box<dyn Model>,
        sampler: LogitsProcessor,
        context: usize,
        device: &Device,
    ) -> Self {
        Self {
            model,
            read: Vec::new(),
            sampler,
            context,
            device: device.clone(),
        }
    }

    /// Continues `prompt` by at most `limit` tokens. Each goes to `take`, which says whether to go on.
    pub(crate) fn run(
        &mut self,
        prompt: &[u32],
        limit: usize,
        mut take: impl FnMut(u32) -> Result<bool>,
    ) -> Result<Timing> {
        ensure!(
            !prompt.is_empty(),
            "the prompt is empty: there is nothing to continue"
        );
        ensure!(
            prompt.len() < self.context,
            "the conversation has {} tokens, the context holds {}: see --context",
            prompt.len(),
            self.context
        );
        // What the model has read stays read when the prompt goes on from it, as a next turn does.
        if prompt.len() <= self.read.len() || !prompt.starts_with(&self.read) {
            self.read.clear();
        }
        let started = Instant::now();
        let mut timing = Timing {
            prompt: prompt.len() - self.read.len(),
            first: Duration::ZERO,
            tokens: 0,
            rest: Duration::ZERO,
        };
        let mut next = prompt[self.read.len()..].to_vec();
        while timing.tokens < limit && self.read.len() + next.len() <= self.context {
            let token = self.step(&next)?;
            timing.tokens += 1;
            if timing.tokens == 1 {
                timing.first = started.elapsed();
            }
            timing.rest = started.elapsed() - timing.first;
            if !take(token)? {
                break;
            }
            next = vec![token];
        }
        Ok(timing)
    }

    fn step(&mut self, tokens: &[u32]) -> Result<u32> {
        let input = Tensor::new(tokens, &self.device)?.unsqueeze(0)?;
        let logits = self.model.forward(&input, self.read.len())?;
        self.read.extend_from_slice(tokens);
        Ok(self.sampler.sample(&logits.squeeze(0)?)?)
    }
}
