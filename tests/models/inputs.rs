//! Inputs of image and sound models, and passes of several outputs.

use anyhow::Result;
use candle_core::{Device, Tensor};
use candle_nn::VarBuilder;

use crate::harness::{Forward, noise};

/// A batch of one square RGB image: (1, 3, `side`, `side`).
pub(crate) fn image(side: usize, vb: &VarBuilder<'_>) -> candle_core::Result<Tensor> {
    noise((1, 3, side, side), vb)
}

/// A batch of one sequence of token ids: (1, n).
pub(crate) fn tokens(ids: &[u32], device: &Device) -> candle_core::Result<Tensor> {
    Tensor::new(ids, device)?.unsqueeze(0)
}

/// One number for a batch of one, (1), in the builder's dtype: a time or a guidance.
pub(crate) fn scalar(value: f32, vb: &VarBuilder<'_>) -> candle_core::Result<Tensor> {
    Tensor::new(&[value], vb.device())?.to_dtype(vb.dtype())
}

/// A forward pass with several outputs.
pub(crate) fn outputs(
    mut pass: impl FnMut() -> candle_core::Result<Vec<Tensor>> + 'static,
) -> Result<Forward> {
    Ok(Box::new(move || Ok(pass()?)))
}
