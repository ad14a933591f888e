//! Quantized tensors by path, with the method names of candle-transformers' quantized `VarBuilder`,
//! which has no way to take tensors that are not read from a file.

use std::fmt;
use std::sync::Arc;

use candle_core::quantized::QTensor;
use candle_core::{Device, Result, Shape};

use super::Shared;
use super::asked::Way;

/// Hands out the cache's quantized tensors. Two requests for one tensor give the same one.
#[derive(Clone)]
pub struct QuantizedVarBuilder {
    shared: Arc<Shared>,
    path: Vec<String>,
}

impl fmt::Debug for QuantizedVarBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuantizedVarBuilder")
            .field("path", &self.path.join("."))
            .finish_non_exhaustive()
    }
}

impl QuantizedVarBuilder {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            path: Vec::new(),
        }
    }

    /// The same tensors, one prefix further down.
    pub fn pp<S: ToString>(&self, prefix: S) -> Self {
        let mut below = self.clone();
        below.path.push(prefix.to_string());
        below
    }

    /// The tensor `name` under this path, which must have this shape.
    ///
    /// A tensor of shape `(experts, out, in)`, the stacked matrices of a mixture of experts, comes as one `QTensor`
    /// of that shape: what `QTensor::indexed_moe_forward` takes (which candle has on CUDA alone, and panics elsewhere).
    ///
    /// # Errors
    /// When there is none (with the nearest names), its shape differs, or its type is none of GGML's.
    pub fn get<S: Into<Shape>>(&self, shape: S, name: &str) -> Result<Arc<QTensor>> {
        let path = self.path(name);
        let found = self.shared.locate(&path)?;
        let tensor = self.shared.weights.quantized(found.index)?;
        let held = tensor.shape().dims().to_vec();
        self.shared.check_shape(&path, &shape.into(), held)?;
        self.shared.asked.note(found.position, Way::Quantized);
        Ok(tensor)
    }

    /// The tensor `name` under this path, of whatever shape.
    ///
    /// # Errors
    /// As [`QuantizedVarBuilder::get`].
    pub fn get_no_shape(&self, name: &str) -> Result<Arc<QTensor>> {
        let found = self.shared.locate(&self.path(name))?;
        let tensor = self.shared.weights.quantized(found.index)?;
        let way = Way::QuantizedAnyShape;
        self.shared.asked.note(found.position, way);
        Ok(tensor)
    }

    /// The device that the tensors lie on.
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// Whether the cache holds a tensor of this whole name, this path not prepended: as in candle.
    pub fn contains_key(&self, key: &str) -> bool {
        self.shared.contains(key)
    }

    /// Whether the tensor `name` under this path is there and stored as GGML blocks.
    pub(super) fn holds_blocks(&self, name: &str) -> bool {
        let manifest = &self.shared.manifest;
        let index = manifest.find(&self.shared.naming.held(&self.path(name)));
        index.is_some_and(|index| manifest.tensors[index].element.is_quantized())
    }

    fn path(&self, name: &str) -> String {
        if self.path.is_empty() {
            name.to_string()
        } else {
            format!("{}.{name}", self.path.join("."))
        }
    }
}
