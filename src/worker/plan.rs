//! Where each tensor will lie, decided from headers alone, before any memory is taken.
//! Tensors follow one another in the slabs as they do in the files, so that reading is sequential.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::checkpoint::Checkpoint;
use crate::key::Key;
use crate::manifest::{
    ALIGNMENT, Alias, Digest, ElementType, MAX_SLABS, Manifest, Stack, TensorEntry, stack_digest,
};
use crate::slab::{CHUNK, DeviceId};

use super::alias::Aliases;
use super::stack::Group;
use super::taken::{Becomes, Taken};
use super::{LoadOptions, WorkerError};

/// Slabs are this large unless the whole asks for more: 4 GiB.
const SLAB_BYTES: u64 = 4 << 30;
/// A slab is at least this fraction of the whole, which leaves some of [`MAX_SLABS`] for uneven filling.
const SLAB_FRACTION: u64 = 240;
/// CUDA memory comes in pages of 2 MiB.
const CUDA_PAGE: u64 = 2 << 20;
/// candle's CUDA kernels read up to this many elements past the end of a row of GGML blocks
/// (`MATRIX_ROW_PADDING` in candle-core's `quantized/cuda.rs`).
const CUDA_PADDING: u64 = 512;

/// The layout of one entry.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Length of each slab, in bytes.
    pub slabs: Vec<u64>,
    /// Tensors that get a place, in order of their names.
    pub tensors: Vec<Placed>,
    /// Second names, in order: index into [`Checkpoint::tensors`], index into [`Plan::tensors`].
    pub aliases: Vec<(usize, usize)>,
    /// Tensors that lie one behind the other, and are one tensor too: indices into [`Plan::tensors`].
    pub stacks: Vec<Group>,
    /// Quantize values that no block can hold into whatever comes out.
    pub allow_nonfinite: bool,
}

/// One tensor's place.
#[derive(Clone, Debug, PartialEq)]
pub struct Placed {
    /// Index into [`Checkpoint::tensors`].
    pub source: usize,
    /// The type that it is stored as.
    pub element: ElementType,
    /// Its length in the slab, in bytes.
    pub bytes: u64,
    /// Zeroed bytes behind it that belong to it.
    pub tail: u64,
    /// Index of its slab.
    pub slab: u32,
    /// Bytes from the slab's start.
    pub offset: u64,
    /// How much each column matters to quantization: see [`Assigned::importance`](crate::quantize::Assigned::importance).
    pub importance: Option<Arc<[f32]>>,
    /// A recipe says what it becomes.
    pub by_recipe: bool,
}

/// Digests of one tensor: in the checkpoint, and in the slab.
pub type Digests = (Digest, Digest);

impl Plan {
    /// Lays out the taken tensors that are no second names. Their indices are those of [`Taken::checkpoint`].
    ///
    /// # Errors
    /// [`WorkerError::TooLarge`] when the lengths add up to more than can be addressed.
    pub fn new(
        taken: &Taken<'_>,
        options: &LoadOptions,
        aliases: &Aliases,
    ) -> Result<Self, WorkerError> {
        let cuda = matches!(options.device, DeviceId::Cuda(_));
        let checkpoint = taken.checkpoint();
        let mut tensors = Vec::with_capacity(checkpoint.tensors.len());
        let mut seconds = Vec::new();
        // Equal tensors share a place where they become the same: by the first of them, the type, and what is important.
        let mut places: HashMap<(usize, ElementType, Option<*const f32>), usize> = HashMap::new();
        let mut total = 0u64;
        let stacked: HashSet<usize> = taken
            .stacks
            .iter()
            .flat_map(|s| &s.members)
            .copied()
            .collect();
        // Where each tensor stands among those that are placed.
        let mut at: HashMap<usize, usize> = HashMap::new();
        for (source, (t, becomes)) in checkpoint.tensors.iter().zip(&taken.becomes).enumerate() {
            let Becomes {
                element,
                ref importance,
                by_recipe,
            } = *becomes;
            let first = aliases.first_of(source).unwrap_or(source);
            let place = (first, element, importance.as_ref().map(|i| i.as_ptr()));
            // A stack's members each have their place in it.
            if !stacked.contains(&source)
                && let Some(place) = places.get(&place)
            {
                seconds.push((source, *place));
                continue;
            }
            let too_large = || WorkerError::TooLarge {
                dtype: options.dtype,
                name: t.name.clone(),
            };
            let bytes = if element == t.element {
                t.bytes
            } else {
                element.bytes(&t.shape).ok_or_else(too_large)?
            };
            let tail = if cuda && element.is_quantized() && bytes > 0 {
                CUDA_PADDING * element.block_bytes() / element.block_elements()
            } else {
                0
            };
            // Half of the range stays free: what follows adds up without overflow.
            total = bytes
                .checked_add(tail + ALIGNMENT)
                .and_then(|room| total.checked_add(room))
                .filter(|total| *total <= u64::MAX / 2)
                .ok_or_else(too_large)?;
            places.entry(place).or_insert(tensors.len());
            at.insert(source, tensors.len());
            tensors.push(Placed {
                source,
                element,
                bytes,
                tail,
                slab: 0,
                offset: 0,
                importance: importance.clone(),
                by_recipe,
            });
        }

        let stacks: Vec<Group> = taken
            .stacks
            .iter()
            .map(|group| Group {
                name: group.name.clone(),
                members: group.members.iter().map(|source| at[source]).collect(),
            })
            .collect();
        for stack in &stacks {
            // What is read past one is the next one; only behind the last there must be zeros.
            for member in &stack.members[..stack.members.len() - 1] {
                tensors[*member].tail = 0;
            }
        }
        let alone = (0..tensors.len())
            .filter(|i| tensors[*i].bytes > 0 && !stacked.contains(&tensors[*i].source))
            .map(|i| vec![i]);
        let mut order: Vec<Vec<usize>> = stacks
            .iter()
            .map(|stack| stack.members.clone())
            .chain(alone)
            .collect();
        order.sort_by_key(|members| {
            let t = &checkpoint.tensors[tensors[members[0]].source];
            (t.file, t.offset)
        });
        let page = if cuda { CUDA_PAGE } else { 1 };
        let slabs = pack(&mut tensors, &order, total, options.slab_bytes, page);

        Ok(Self {
            slabs,
            aliases: seconds,
            stacks,
            tensors,
            allow_nonfinite: options.quantize.as_ref().is_some_and(|q| q.allow_nonfinite),
        })
    }

    /// Bytes of all slabs.
    pub fn memory_bytes(&self) -> u64 {
        self.slabs.iter().sum()
    }

    /// Bytes that are read of `checkpoint`, which this is a plan of.
    pub(super) fn source_bytes(&self, checkpoint: &Checkpoint) -> u64 {
        let tensors = self.tensors.iter();
        tensors.map(|t| checkpoint.tensors[t.source].bytes).sum()
    }

    /// Bytes that each filling thread needs for its buffers.
    pub(super) fn buffer_bytes(&self, checkpoint: &Checkpoint) -> u64 {
        let buffers = |placed: &Placed| {
            let source = &checkpoint.tensors[placed.source];
            let one = source.bytes.max(placed.bytes).min(CHUNK as u64);
            // What was read, candle's copies before and after converting, and the lane's own. Pieces that are quantized
            // are small: see `convert::PIECE`.
            let gathered = u64::from(source.slice.is_some()) * crate::checkpoint::SPAN;
            if placed.element == source.element {
                one + gathered
            } else {
                4 * one + gathered
            }
        };
        self.tensors.iter().map(buffers).max().unwrap_or(0)
    }

    /// The manifest of this layout, not yet encoded: without root and files. `digests` go with
    /// [`Plan::tensors`]; where there are none yet, they are zero.
    pub fn manifest(&self, checkpoint: &Checkpoint, key: Key, digests: &[Digests]) -> Manifest {
        let digests = digests
            .iter()
            .copied()
            .chain(std::iter::repeat(Digests::default()));
        let entry = |(placed, (source, stored)): (&Placed, Digests)| {
            let t = &checkpoint.tensors[placed.source];
            TensorEntry {
                name: t.name.clone(),
                element: placed.element,
                shape: t.shape.clone(),
                cut: t.slice.map(|slice| slice.cut.dim as u32),
                slab: placed.slab,
                offset: placed.offset,
                bytes: placed.bytes,
                source,
                stored,
            }
        };
        let mut tensors: Vec<TensorEntry> = self.tensors.iter().zip(digests).map(entry).collect();
        let stacks = self.stacks.iter().map(|stack| stacked(stack, &tensors));
        let stacks: Vec<TensorEntry> = stacks.collect();
        tensors.extend(stacks);
        // By name: where each of them stands then.
        let mut order: Vec<usize> = (0..tensors.len()).collect();
        order.sort_by(|a, b| tensors[*a].name.cmp(&tensors[*b].name));
        let mut place = vec![0u32; order.len()];
        for (new, old) in order.iter().enumerate() {
            place[*old] = new as u32;
        }
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        let alias = |(source, tensor): &(usize, usize)| Alias {
            name: checkpoint.tensors[*source].name.clone(),
            tensor: place[*tensor],
        };
        let stack = |(i, stack): (usize, &Group)| Stack {
            tensor: place[self.tensors.len() + i],
            members: stack.members.iter().map(|member| place[*member]).collect(),
        };
        let mut stacks: Vec<Stack> = self.stacks.iter().enumerate().map(stack).collect();
        stacks.sort_by_key(|stack| stack.tensor);
        Manifest {
            key,
            root: Digest::default(),
            slabs: self.slabs.clone(),
            aliases: self.aliases.iter().map(alias).collect(),
            tensors,
            stacks,
            attributes: checkpoint.attributes.clone(),
            files: Vec::new(),
        }
    }
}

/// All members of a stack as one tensor.
fn stacked(stack: &Group, tensors: &[TensorEntry]) -> TensorEntry {
    let members = || stack.members.iter().map(|i| &tensors[*i]);
    let first = &tensors[stack.members[0]];
    TensorEntry {
        name: stack.name.clone(),
        element: first.element,
        shape: [&[stack.members.len() as u64], first.shape.as_slice()].concat(),
        cut: first.cut.map(|dim| dim + 1),
        slab: first.slab,
        offset: first.offset,
        bytes: members().map(|t| t.bytes).sum(),
        source: stack_digest(members().map(|t| t.source)),
        stored: stack_digest(members().map(|t| t.stored)),
    }
}

/// Places the tensors in `order`, those of one list one behind the other, and returns the slabs' lengths: multiples of `page`, at most [`MAX_SLABS`].
fn pack(
    tensors: &mut [Placed],
    order: &[Vec<usize>],
    total: u64,
    slab_bytes: Option<u64>,
    page: u64,
) -> Vec<u64> {
    let wanted = slab_bytes.unwrap_or_else(|| SLAB_BYTES.max(total / SLAB_FRACTION));
    let mut limit = wanted.min(total);
    loop {
        let slabs = pack_into(tensors, order, limit.next_multiple_of(page), page);
        if slabs.len() <= MAX_SLABS {
            return slabs;
        }
        // Two neighbours fill more than one slab, so twice the fair share is always enough.
        limit = (limit + limit / 4 + ALIGNMENT).max(total / MAX_SLABS as u64);
    }
}

/// Fills slab after slab up to `limit` bytes. What is larger has one of its own.
fn pack_into(tensors: &mut [Placed], order: &[Vec<usize>], limit: u64, page: u64) -> Vec<u64> {
    let mut slabs: Vec<u64> = Vec::new();
    for members in order {
        let room = members.iter().map(|i| tensors[*i].bytes + tensors[*i].tail);
        let room: u64 = room.sum();
        let start = slabs.last().map(|end| end.next_multiple_of(ALIGNMENT));
        let start = start.filter(|start| start + room <= limit);
        let mut offset = start.unwrap_or(0);
        match slabs.last_mut() {
            Some(end) if start.is_some() => *end = offset + room,
            _ => slabs.push(room),
        }
        for i in members {
            let t = &mut tensors[*i];
            (t.offset, t.slab) = (offset, (slabs.len() - 1) as u32);
            offset += t.bytes + t.tail;
        }
    }
    for end in &mut slabs {
        *end = end.next_multiple_of(page);
    }
    slabs
}
