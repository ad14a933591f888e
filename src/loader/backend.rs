//! The mapped weights as candle's `VarBuilder` asks for them: by name, shape, dtype and device.
//! Exactly what the checkpoint holds is served; names that share weights share one storage.

use std::sync::Arc;

use candle_core::{DType, Device, Error, Result, Shape, Tensor};
use candle_nn::Init;
use candle_nn::var_builder::SimpleBackend;

use super::Shared;
use super::error::GetError;
use crate::manifest::{ElementType, TensorEntry};
use crate::shard::Cut;
use crate::tensors::{TensorPart, require_plain, shape_of};

/// What candle dequantizes blocks to.
const DEQUANTIZED: DType = DType::F32;

pub(super) struct Backend(pub(super) Arc<Shared>);

impl SimpleBackend for Backend {
    fn get(&self, s: Shape, name: &str, _: Init, dtype: DType, dev: &Device) -> Result<Tensor> {
        let index = self.0.find(name)?;
        let entry = &self.0.manifest.tensors[index];
        self.0.plain_dtype(entry)?;
        self.0.check_shape(name, &s, shape_of(entry)?)?;
        self.0.plain(index, None, dtype, dev)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, dev: &Device) -> Result<Tensor> {
        let index = self.0.find(name)?;
        self.0.plain(index, None, dtype, dev)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.manifest.find(name).is_some()
    }
}

/// A tensor that several names stand for, kept so that they share it.
pub(super) struct Kept {
    cut: Option<Cut>,
    dtype: DType,
    device: Device,
    tensor: Tensor,
}

impl Shared {
    /// The index of the tensor that `name` stands for, or candle's own error with the nearest names.
    pub(super) fn find(&self, name: &str) -> Result<usize> {
        self.manifest.find(name).ok_or_else(|| {
            let path = name.to_string();
            let missing = Error::CannotFindTensor { path }.bt();
            missing.context(self.names.hint(name))
        })
    }

    pub(super) fn check_shape(&self, name: &str, wanted: &Shape, held: Vec<usize>) -> Result<()> {
        if wanted.dims() == held {
            return Ok(());
        }
        Err(Error::UnexpectedShape {
            msg: format!("shape mismatch for {name}"),
            expected: wanted.clone(),
            got: held.into(),
        }
        .bt())
    }

    /// The entry, or a part of it, as a plain tensor.
    pub(super) fn plain(
        &self,
        index: usize,
        part: Option<&TensorPart>,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        if !self.aliased.contains(&index) {
            return self.make(index, part, dtype, device);
        }
        let cut = part.map(|part| part.cut);
        // Held while the tensor is made: two threads that ask for two names must get one storage.
        let mut kept = self.kept();
        let kept = kept.entry(index).or_default();
        let same = |k: &&Kept| (k.cut, k.dtype) == (cut, dtype) && k.device.same_device(device);
        if let Some(k) = kept.iter().find(same) {
            return Ok(k.tensor.clone());
        }
        let tensor = self.make(index, part, dtype, device)?;
        kept.push(Kept {
            cut,
            dtype,
            device: device.clone(),
            tensor: tensor.clone(),
        });
        Ok(tensor)
    }

    fn make(
        &self,
        index: usize,
        part: Option<&TensorPart>,
        asked: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let entry = &self.manifest.tensors[index];
        let (name, stored) = (&entry.name, entry.element);
        let cast = self.plain_dtype(entry)? != asked || stored == ElementType::U16;
        if stored.is_quantized() {
            let tensor = self.dequantized(index, asked, device)?;
            return part.map_or(Ok(tensor.clone()), |part| part.of(&tensor));
        }
        if cast && self.strict {
            return Err(Error::from(GetError::Strict {
                name: name.clone(),
                stored,
                asked,
            }));
        }
        let plain = match part {
            Some(part) => self.weights.part(index, part, device)?,
            None => self.weights.plain(index, device)?,
        };
        let bytes = part.map_or(entry.bytes, |part| part.runs.bytes());
        self.tally.copied(plain.copied);
        let tensor = plain.tensor.to_dtype(asked).map_err(|source| {
            Error::from(GetError::Cast {
                name: name.clone(),
                stored,
                asked,
                source,
            })
        })?;
        if cast {
            self.tally.cast(stored, asked, bytes);
        }
        Ok(tensor)
    }

    /// The entry's blocks through candle's own dequantization, in the dtype asked for.
    fn dequantized(&self, index: usize, asked: DType, device: &Device) -> Result<Tensor> {
        let entry = &self.manifest.tensors[index];
        let (name, stored) = (&entry.name, entry.element);
        if self.strict && asked != DEQUANTIZED {
            return Err(Error::from(GetError::StrictDequantized {
                name: name.clone(),
                stored,
                asked,
            }));
        }
        let blocks = self.weights.quantized(index)?;
        let tensor = blocks
            .dequantize(device)
            .and_then(|tensor| tensor.to_dtype(asked))
            .map_err(|source| {
                Error::from(GetError::Cast {
                    name: name.clone(),
                    stored,
                    asked,
                    source,
                })
            })?;
        let made = tensor.elem_count() * asked.size_in_bytes();
        self.tally.dequantized(entry.bytes, made as u64);
        Ok(tensor)
    }

    /// The dtype in which a plain request finds the entry, or the error that says how to get at it otherwise.
    pub(super) fn plain_dtype(&self, entry: &TensorEntry) -> Result<DType> {
        if self.dequantize && entry.element.is_quantized() {
            return Ok(DEQUANTIZED);
        }
        Ok(require_plain(entry)?)
    }
}
