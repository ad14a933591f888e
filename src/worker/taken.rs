//! A checkpoint as one load sees it: the tensors that it takes, cut for its rank, and what each is stored as.
//! To the rest of the worker a slice is a tensor like any other.

use std::borrow::Cow;
use std::sync::Arc;

use crate::checkpoint::{Checkpoint, CheckpointError, SourceFile, SourceTensor};
use crate::key::{self, Key};
use crate::manifest::{self, Digest, ElementType};
use crate::quantize::{self, Assigned};
use crate::shard::Cut;

use super::select::{Pick, SelectError};
use super::stack::{self, Group, StackError};
use super::{LoadOptions, WorkerError};

/// What a load takes of a checkpoint.
#[derive(Debug)]
pub struct Taken<'a> {
    whole: &'a Checkpoint,
    /// The taken tensors, where they are not simply all.
    part: Option<Checkpoint>,
    pub(super) becomes: Vec<Becomes>,
    pub(super) stacks: Vec<Group>,
    selection: String,
}

/// What one tensor is stored as.
#[derive(Clone, Debug)]
pub(super) struct Becomes {
    pub(super) element: ElementType,
    pub(super) importance: Option<Arc<[f32]>>,
    /// A recipe says so.
    pub(super) by_recipe: bool,
}

impl<'a> Taken<'a> {
    /// Takes what `options` say, for the rank that they say.
    ///
    /// # Errors
    /// When the selection or the recipe does not fit the checkpoint. No tensor's byte is read.
    pub fn of(checkpoint: &'a Checkpoint, options: &LoadOptions) -> Result<Self, WorkerError> {
        let tp = options.shard.tp;
        let tensors = &checkpoint.tensors;
        let selection = &options.selection;
        let picks = selection.resolve(tensors, tp, options.stack_experts)?;
        // Rules are about the model, not about one rank's or one stage's part of it.
        let becomes = becomes(checkpoint, options)?;
        let all = picks.len() == checkpoint.tensors.len();
        if all && picks.iter().all(|pick| pick.dim.is_none()) {
            return Ok(Self {
                whole: checkpoint,
                part: None,
                stacks: stacks(options, &checkpoint.tensors, &becomes)?,
                becomes,
                selection: key::ALL.into(),
            });
        }
        let mut tensors = Vec::with_capacity(picks.len());
        let mut taken = Vec::with_capacity(picks.len());
        for pick in &picks {
            let (tensor, becomes) = (&checkpoint.tensors[pick.index], &becomes[pick.index]);
            let Some(dim) = pick.dim else {
                tensors.push(tensor.clone());
                taken.push(becomes.clone());
                continue;
            };
            let cut = Cut {
                dim: dim as usize,
                part: tp,
            };
            let slice = tensor.sliced(cut).map_err(|source| SelectError::Cut {
                why: options.selection.why(&tensor.name),
                tensor: tensor.name.clone(),
                size: tp.size,
                source,
            })?;
            taken.push(becomes.of_slice(tensor, &slice, cut)?);
            tensors.push(slice);
        }
        let stacks = stacks(options, &tensors, &taken)?;
        Ok(Self {
            whole: checkpoint,
            stacks,
            part: Some(Checkpoint {
                name: checkpoint.name.clone(),
                files: checkpoint
                    .files
                    .iter()
                    .map(duplicate)
                    .collect::<Result<_, _>>()?,
                tensors,
                // Large, and the same for every rank: taken from the whole.
                small_files: Vec::new(),
                attributes: checkpoint.attributes.clone(),
            }),
            becomes: taken,
            selection: describe(checkpoint, &picks),
        })
    }

    /// The taken tensors, without small files.
    pub fn checkpoint(&self) -> &Checkpoint {
        self.part.as_ref().unwrap_or(self.whole)
    }

    /// The small files that travel with the weights.
    pub(super) fn small_files(&self) -> &[(String, Vec<u8>)] {
        &self.whole.small_files
    }

    /// What an entry that is made of this with `options` is made from, and how.
    pub fn key(&self, options: &LoadOptions) -> Key {
        let files = self.whole.files.iter();
        Key {
            model: options.entry_name(self.whole).to_string(),
            shard: options.shard,
            selection: self.selection.clone(),
            stacked: options.stack_experts,
            dtype: options.dtype.to_string(),
            recipe: match &options.quantize {
                Some(quantize) => quantize.canonical(),
                None => "none".to_string(),
            },
            format: manifest::FORMAT_VERSION,
            sources: files.map(|f| f.receipt.clone()).collect(),
        }
    }
}

fn stacks(
    options: &LoadOptions,
    tensors: &[SourceTensor],
    becomes: &[Becomes],
) -> Result<Vec<Group>, StackError> {
    if !options.stack_experts {
        return Ok(Vec::new());
    }
    stack::find(tensors, becomes)
}

/// Another descriptor of the same open file.
fn duplicate(source: &SourceFile) -> Result<SourceFile, CheckpointError> {
    let file = source.file.try_clone();
    let file = file.map_err(|e| CheckpointError::System {
        path: source.receipt.path.clone(),
        doing: "duplicating its descriptor".into(),
        source: e,
    })?;
    Ok(SourceFile {
        file,
        receipt: source.receipt.clone(),
    })
}

/// Counts for people, and a digest over names and cuts for comparison.
fn describe(checkpoint: &Checkpoint, picks: &[Pick]) -> String {
    let mut hasher = blake3::Hasher::new_derive_key("candle-ipc-cache 1 selection of tensors");
    for pick in picks {
        let name = checkpoint.tensors[pick.index].name.as_bytes();
        hasher.update(&(name.len() as u64).to_le_bytes());
        hasher.update(name);
        hasher.update(&pick.dim.map_or(u64::MAX, u64::from).to_le_bytes());
    }
    let digest = Digest::from(hasher.finalize()).to_string();
    let cut = picks.iter().filter(|pick| pick.dim.is_some()).count();
    let (taken, all) = (picks.len(), checkpoint.tensors.len());
    let digest = &digest[..16];
    if taken == all {
        return format!("{}, {cut} of {taken} tensors cut, {digest}", key::ALL);
    }
    format!("{taken} of {all} tensors, {cut} of them cut, {digest}")
}

fn becomes(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<Vec<Becomes>, WorkerError> {
    let plain = |t: &SourceTensor| options.dtype.of(t.element);
    let tensors = &checkpoint.tensors;
    let Some(how) = &options.quantize else {
        return Ok(tensors
            .iter()
            .map(|t| Becomes {
                element: plain(t),
                importance: None,
                by_recipe: false,
            })
            .collect());
    };
    let assigned = quantize::assign(tensors, how)?;
    let becomes = |(t, assigned): (&SourceTensor, Assigned)| Becomes {
        element: assigned.target.unwrap_or_else(|| plain(t)),
        by_recipe: assigned.target.is_some(),
        importance: assigned.importance,
    };
    Ok(tensors.iter().zip(assigned).map(becomes).collect())
}

impl Becomes {
    /// What a slice is stored as: what the tensor would be, with the columns that the slice has.
    fn of_slice(
        &self,
        tensor: &SourceTensor,
        slice: &SourceTensor,
        cut: Cut,
    ) -> Result<Self, WorkerError> {
        let block = self.element.block_elements();
        let row = slice.shape.last().copied().unwrap_or(1);
        if self.element.is_quantized() && !row.is_multiple_of(block) {
            return Err(WorkerError::SliceRows {
                name: slice.name.clone(),
                dim: cut.dim,
                part: cut.part,
                row,
                to: self.element,
                block,
            });
        }
        let importance = self.importance.as_ref();
        Ok(Self {
            element: self.element,
            by_recipe: self.by_recipe,
            importance: importance.map(|all| match columns(all, &tensor.shape, cut) {
                Cow::Borrowed(_) => all.clone(),
                Cow::Owned(mine) => mine.into(),
            }),
        })
    }
}

/// The values for a slice's columns. There is one row of them for the whole tensor, or one for each expert.
fn columns<'a>(all: &'a [f32], shape: &[u64], cut: Cut) -> Cow<'a, [f32]> {
    let row = shape.last().copied().unwrap_or(1) as usize;
    let experts = all.len() / row.max(1);
    let (rank, size) = (cut.part.rank as usize, cut.part.size as usize);
    if cut.dim + 1 == shape.len() {
        let mine = row / size;
        let of = |values: &[f32]| values[rank * mine..][..mine].to_vec();
        return Cow::Owned(all.chunks(row.max(1)).flat_map(of).collect());
    }
    if cut.dim == 0 && experts > 1 {
        let mine = experts / size * row;
        return Cow::Owned(all[rank * mine..][..mine].to_vec());
    }
    Cow::Borrowed(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::Part;

    #[test]
    fn a_slice_keeps_the_importance_of_its_own_columns() {
        let cut = |dim| Cut {
            dim,
            part: Part::new(1, 2),
        };
        let one: Vec<f32> = vec![1., 2., 3., 4.];
        assert_eq!(*columns(&one, &[6, 4], cut(1)), [3., 4.]);
        assert_eq!(*columns(&one, &[6, 4], cut(0)), one);
        let two: Vec<f32> = vec![1., 2., 3., 4., 5., 6., 7., 8.];
        assert_eq!(*columns(&two, &[2, 6, 4], cut(2)), [3., 4., 7., 8.]);
        assert_eq!(*columns(&two, &[2, 6, 4], cut(1)), two);
        assert_eq!(*columns(&two, &[2, 6, 4], cut(0)), [5., 6., 7., 8.]);
        assert_eq!(*columns(&one, &[2, 6, 4], cut(0)), one);
    }
}
