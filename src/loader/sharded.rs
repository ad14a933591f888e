//! The weights as candle's tensor-parallel models ask for them: by name, and by the rank whose slice is wanted.
//! Answers and errors are those of candle's `ShardedSafeTensors`; an entry that holds one rank's slices serves that rank.

use std::fmt;
use std::sync::Arc;

use candle_core::{DType, Device, Error, Result, Shape, Tensor};
use candle_nn::var_builder::{Backend, Shard, VarBuilderArgs};

use super::Shared;
use super::asked::Way;
use super::error::GetError;
use crate::manifest::TensorEntry;
use crate::shard::{Cut, CutError, Part, slice};
use crate::tensors::{TensorPart, shape_of};
use crate::trace::ShardHint;

/// A `VarBuilder` whose hints are [`Shard`]s: see [`IpcCache::sharded`](super::IpcCache::sharded).
pub type ShardedVarBuilder<'a> = VarBuilderArgs<'a, ShardedWeights>;

/// The backend of a [`ShardedVarBuilder`].
pub struct ShardedWeights(pub(super) Arc<Shared>);

impl fmt::Debug for ShardedWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardedWeights")
            .field("entry", &self.0.report.entry)
            .finish_non_exhaustive()
    }
}

impl Backend for ShardedWeights {
    type Hints = Shard;

    /// The slice that the hint names; `wanted` is looked at only where the hint names all of the tensor, as in candle.
    fn get(
        &self,
        wanted: Shape,
        name: &str,
        hint: Shard,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let shared = &self.0;
        let found = shared.locate(name)?;
        let index = found.index;
        let entry = &shared.manifest.tensors[index];
        if let Some(dim) = entry.cut {
            let held = shared.manifest.key.shard.tp;
            let same = (hint.dim, hint.rank, hint.world_size)
                == (dim as usize, held.rank as usize, held.size as usize);
            if !same {
                return Err(Error::from(GetError::OtherRank {
                    name: name.into(),
                    dim: dim as usize,
                    held,
                    asked: hint,
                }));
            }
            let tensor = shared.plain(index, None, dtype, device)?;
            shared
                .asked
                .sharded(found.position, dtype, shard_hint(hint));
            return Ok(tensor);
        }
        if hint.world_size == 1 {
            shared.terms.plain_dtype(entry)?;
            shared.check_shape(name, &wanted, shape_of(entry)?)?;
            let tensor = shared.plain(index, None, dtype, device)?;
            shared.asked.note(found.position, Way::Plain(dtype));
            return Ok(tensor);
        }
        let part = part(name, entry, hint)?;
        let tensor = shared.plain(index, Some(&part), dtype, device)?;
        shared
            .asked
            .sharded(found.position, dtype, shard_hint(hint));
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        candle_core::bail!(
            "`get_unchecked` of `{name}` says for no rank: with shard hints, use `get`"
        )
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.contains(name)
    }
}

/// The hint as a trace writes it. One that was answered has numbers that fit.
fn shard_hint(hint: Shard) -> ShardHint {
    let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    ShardHint {
        dim: number(hint.dim),
        rank: number(hint.rank),
        size: number(hint.world_size),
    }
}

/// The part of a whole tensor that a hint names.
fn part(name: &str, entry: &TensorEntry, hint: Shard) -> Result<TensorPart> {
    let Shard {
        dim,
        rank,
        world_size,
    } = hint;
    let number = |n: usize| u16::try_from(n).unwrap_or(u16::MAX);
    let cut = Cut {
        dim,
        part: Part::new(number(rank), number(world_size)),
    };
    let refused = |source| {
        Error::from(GetError::Cut {
            name: name.into(),
            source,
        })
    };
    match slice(entry.element, &entry.shape, cut) {
        Err(CutError::Indivisible { .. }) => Err(Error::ShapeMismatchSplit {
            shape: shape_of(entry)?.into(),
            dim,
            n_parts: world_size,
        }),
        // candle slices along the first two dimensions, and no others.
        _ if dim > 1 && dim < entry.shape.len() => {
            candle_core::bail!("Get sharded on dimensions != 0 or 1")
        }
        Ok((shape, runs)) => Ok(TensorPart {
            cut,
            shape: shape.iter().map(|d| *d as usize).collect(),
            runs,
        }),
        Err(source) => Err(refused(source)),
    }
}
