//! The mapped weights as candle's `VarBuilder` asks for them: by name, shape, dtype and device.
//! Exactly what the checkpoint holds is served; names that share weights share one storage.

use std::sync::Arc;

use candle_core::{DType, Device, Error, Result, Shape, Tensor};
use candle_nn::Init;
use candle_nn::var_builder::SimpleBackend;

use super::Shared;
use super::asked::Way;
use super::error::GetError;
use crate::manifest::{ElementType, TensorEntry};
use crate::shard::Cut;
use crate::tensors::{TensorPart, require_plain, shape_of};

/// What candle dequantizes blocks to.
const DEQUANTIZED: DType = DType::F32;

pub(super) struct Backend(pub(super) Arc<Shared>);

impl SimpleBackend for Backend {
    fn get(&self, s: Shape, name: &str, _: Init, dtype: DType, dev: &Device) -> Result<Tensor> {
        let found = self.0.locate(name)?;
        let entry = &self.0.manifest.tensors[found.index];
        self.0.terms.plain_dtype(entry)?;
        self.0.check_shape(name, &s, shape_of(entry)?)?;
        let tensor = self.0.plain(found.index, None, dtype, dev)?;
        self.0.asked.note(found.position, Way::Plain(dtype));
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, dev: &Device) -> Result<Tensor> {
        let found = self.0.locate(name)?;
        let tensor = self.0.plain(found.index, None, dtype, dev)?;
        self.0.asked.note(found.position, Way::AnyShape(dtype));
        Ok(tensor)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.contains(name)
    }
}

/// On which terms plain requests are answered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) strict: bool,
    pub(crate) dequantize: bool,
}

impl Terms {
    /// The dtype in which a plain request finds the entry, or the error that says how to get at it otherwise.
    pub(crate) fn plain_dtype(self, entry: &TensorEntry) -> Result<DType> {
        if self.dequantize && entry.element.is_quantized() {
            return Ok(DEQUANTIZED);
        }
        Ok(require_plain(entry)?)
    }

    /// Whether a plain request for this dtype needs a conversion, or the error where none is allowed.
    pub(crate) fn converts(self, entry: &TensorEntry, asked: DType) -> Result<bool> {
        let converts = self.plain_dtype(entry)? != asked || entry.element == ElementType::U16;
        if !converts || !self.strict {
            return Ok(converts);
        }
        let (name, stored) = (entry.name.clone(), entry.element);
        Err(Error::from(if stored.is_quantized() {
            GetError::StrictDequantized {
                name,
                stored,
                asked,
            }
        } else {
            GetError::Strict {
                name,
                stored,
                asked,
            }
        }))
    }
}

/// A name that the cache holds.
pub(super) struct Found {
    /// Where it stands among the manifest's names.
    pub(super) position: usize,
    /// The tensor that it stands for.
    pub(super) index: usize,
}

/// A tensor that several names stand for, kept so that they share it.
pub(super) struct Kept {
    cut: Option<Cut>,
    dtype: DType,
    device: Device,
    tensor: Tensor,
}

impl Shared {
    /// The tensor that `name` stands for, as a model calls it, or candle's own error with the nearest names.
    pub(super) fn locate(&self, name: &str) -> Result<Found> {
        let held = self.naming.held(name);
        let Some(position) = self.manifest.position(&held) else {
            self.asked.missed(&held);
            let path = name.to_string();
            let missing = Error::CannotFindTensor { path }.bt();
            return Err(missing.context(self.names.hint(&held, name)));
        };
        Ok(Found {
            position,
            index: self.manifest.tensor_at(position),
        })
    }

    /// Whether the cache holds `name`, as a model calls it.
    pub(super) fn contains(&self, name: &str) -> bool {
        let held = self.naming.held(name);
        match self.manifest.position(&held) {
            Some(position) => {
                self.asked.note(position, Way::Lookup);
                true
            }
            None => {
                self.asked.missed(&held);
                false
            }
        }
    }

    pub(super) fn check_shape(&self, name: &str, wanted: &Shape, held: Vec<usize>) -> Result<()> {
        if wanted.dims() == held {
            return Ok(());
        }
        let stored = self.naming.held(name);
        let called = if stored == name {
            String::new()
        } else {
            format!(" (`{stored}` in the cache)")
        };
        Err(Error::UnexpectedShape {
            msg: format!("shape mismatch for {name}{called}"),
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
        let cast = self.terms.converts(entry, asked)?;
        if stored.is_quantized() {
            let tensor = self.dequantized(index, asked, device)?;
            return part.map_or(Ok(tensor.clone()), |part| part.of(&tensor));
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
}
