//! What has been asked of a handle so far, kept in one word for each name, so that keeping it costs a request nothing
//! that can be measured. [`IpcCache::trace`] reads it out.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::DType;

use super::IpcCache;
use super::report::Unasked;
use crate::manifest::{ElementType, Manifest};
use crate::trace::{Asked as Request, ShardHint, Trace};

/// Most names that the cache does not hold of which it is known that they were asked for.
const MAX_MISSES: usize = 1 << 16;
/// Names of tensors nobody asked for that a report lists.
const LISTED: usize = 16;

/// candle's dtypes, each of which has a bit, and what the checkpoint calls them.
const DTYPES: [(DType, ElementType); 14] = [
    (DType::U8, ElementType::U8),
    (DType::U32, ElementType::U32),
    (DType::I16, ElementType::I16),
    (DType::I32, ElementType::I32),
    (DType::I64, ElementType::I64),
    (DType::BF16, ElementType::BF16),
    (DType::F16, ElementType::F16),
    (DType::F32, ElementType::F32),
    (DType::F64, ElementType::F64),
    (DType::F8E4M3, ElementType::F8E4M3),
    (DType::F6E2M3, ElementType::F6E2M3),
    (DType::F6E3M2, ElementType::F6E3M2),
    (DType::F4, ElementType::F4),
    (DType::F8E8M0, ElementType::F8E8M0),
];

/// How a name was asked for, where the cache holds it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Way {
    /// As a plain tensor of its own shape.
    Plain(DType),
    /// As a plain tensor of whatever shape.
    AnyShape(DType),
    /// As a quantized tensor of its own shape.
    Quantized,
    /// As a quantized tensor of whatever shape.
    QuantizedAnyShape,
    /// For its bytes.
    Raw,
    /// Whether it is there.
    Lookup,
}

impl Way {
    const QUANTIZED: u64 = 1 << 32;
    const QUANTIZED_ANY_SHAPE: u64 = 1 << 33;
    const RAW: u64 = 1 << 34;
    const LOOKUP: u64 = 1 << 35;

    fn bit(self) -> u64 {
        match self {
            Self::Plain(dtype) => u64::from(dtype_bit(dtype)),
            Self::AnyShape(dtype) => u64::from(dtype_bit(dtype)) << 16,
            Self::Quantized => Self::QUANTIZED,
            Self::QuantizedAnyShape => Self::QUANTIZED_ANY_SHAPE,
            Self::Raw => Self::RAW,
            Self::Lookup => Self::LOOKUP,
        }
    }
}

/// The bit of a dtype; one that this crate does not know has the last.
fn dtype_bit(dtype: DType) -> u16 {
    let at = DTYPES.iter().position(|(known, _)| *known == dtype);
    1 << at.unwrap_or(15)
}

/// The dtypes whose bits are set; `None` for one that is not known.
fn dtypes(bits: u16) -> impl Iterator<Item = Option<ElementType>> {
    (0..16usize)
        .filter(move |bit| bits & (1 << bit) != 0)
        .map(|bit| DTYPES.get(bit).map(|(_, element)| *element))
}

/// The record.
#[derive(Debug)]
pub(super) struct Asked {
    /// A word for each of [`Manifest::names`].
    names: Vec<AtomicU64>,
    /// Names that the cache does not hold.
    misses: Mutex<HashSet<String>>,
    /// Shards by name, with the bits of the dtypes.
    shards: Mutex<HashMap<(usize, ShardHint), u16>>,
}

impl Asked {
    pub(super) fn new(manifest: &Manifest) -> Self {
        let count = manifest.tensors.len() + manifest.aliases.len();
        Self {
            names: (0..count).map(|_| AtomicU64::new(0)).collect(),
            misses: Mutex::default(),
            shards: Mutex::default(),
        }
    }

    /// Notes a request for the name at this position.
    pub(super) fn note(&self, position: usize, way: Way) {
        let (word, bit) = (&self.names[position], way.bit());
        // Reading is cheaper than writing where several threads build one model.
        if word.load(Ordering::Relaxed) & bit == 0 {
            word.fetch_or(bit, Ordering::Relaxed);
        }
    }

    /// Notes that a name was asked for which the cache does not hold.
    pub(super) fn missed(&self, name: &str) {
        let mut misses = lock(&self.misses);
        if misses.len() < MAX_MISSES && !misses.contains(name) {
            misses.insert(name.to_string());
        }
    }

    /// Notes a request for a shard of the name at this position.
    pub(super) fn sharded(&self, position: usize, dtype: DType, hint: ShardHint) {
        *lock(&self.shards).entry((position, hint)).or_default() |= dtype_bit(dtype);
    }

    fn trace(&self, manifest: &Manifest) -> Trace {
        let (mut tensors, mut lookups) = (Vec::new(), Vec::new());
        let mut shards: HashMap<usize, Vec<(ShardHint, u16)>> = HashMap::new();
        for ((position, hint), bits) in lock(&self.shards).iter() {
            shards.entry(*position).or_default().push((*hint, *bits));
        }
        for position in in_order(manifest) {
            let bits = self.names[position].load(Ordering::Relaxed);
            let shards = shards.remove(&position);
            if bits == 0 && shards.is_none() {
                continue;
            }
            let name = manifest.name_at(position);
            if bits == Way::LOOKUP && shards.is_none() {
                lookups.push(name.to_string());
                continue;
            }
            let entry = &manifest.tensors[manifest.tensor_at(position)];
            let mut add = |shape: Option<Vec<u64>>, dtype, shard| {
                let name = name.to_string();
                tensors.push(Request {
                    name,
                    shape,
                    dtype,
                    shard,
                });
            };
            for dtype in dtypes(bits as u16) {
                add(Some(entry.shape.clone()), dtype, None);
            }
            for dtype in dtypes((bits >> 16) as u16) {
                add(None, dtype, None);
            }
            if bits & Way::QUANTIZED != 0 {
                add(Some(entry.shape.clone()), Some(entry.element), None);
            }
            if bits & Way::QUANTIZED_ANY_SHAPE != 0 {
                add(None, Some(entry.element), None);
            }
            if bits & Way::RAW != 0 {
                add(None, None, None);
            }
            let mut shards = shards.unwrap_or_default();
            shards.sort_by_key(|(hint, _)| (hint.dim, hint.size, hint.rank));
            for (hint, bits) in shards {
                for dtype in dtypes(bits) {
                    add(None, dtype, Some(hint));
                }
            }
        }
        let mut misses: Vec<String> = lock(&self.misses).iter().cloned().collect();
        misses.sort_unstable();
        lookups.extend(misses);
        Trace::new(tensors, lookups)
    }

    /// The tensors that were asked for under no name.
    pub(super) fn unasked(&self, manifest: &Manifest) -> Unasked {
        let mut asked = vec![false; manifest.tensors.len()];
        for (position, word) in self.names.iter().enumerate() {
            let bits = word.load(Ordering::Relaxed) & !Way::LOOKUP;
            asked[manifest.tensor_at(position)] |= bits != 0;
        }
        for (position, _) in lock(&self.shards).keys() {
            asked[manifest.tensor_at(*position)] = true;
        }
        for stack in &manifest.stacks {
            // The same bytes: who asked for the whole asked for each, and the whole is never counted itself.
            let whole = std::mem::replace(&mut asked[stack.tensor as usize], true);
            for member in &stack.members {
                asked[*member as usize] |= whole;
            }
        }
        let mut unasked = Unasked::default();
        for (entry, asked) in manifest.tensors.iter().zip(asked) {
            if asked {
                continue;
            }
            unasked.tensors += 1;
            unasked.bytes += entry.bytes;
            if unasked.names.len() < LISTED {
                unasked.names.push(entry.name.clone());
            }
        }
        unasked
    }
}

/// The positions of all names, sorted by name.
fn in_order(manifest: &Manifest) -> Vec<usize> {
    let mut order: Vec<usize> = (0..manifest.tensors.len() + manifest.aliases.len()).collect();
    if !manifest.aliases.is_empty() {
        order.sort_unstable_by_key(|at| manifest.name_at(*at));
    }
    order
}

fn lock<T>(record: &Mutex<T>) -> MutexGuard<'_, T> {
    record.lock().unwrap_or_else(PoisonError::into_inner)
}

impl IpcCache {
    /// What has been asked of this handle and its builders so far, sorted by name, in the checkpoint's names.
    ///
    /// Tensors that were given are its requests. Names that were looked for are its lookups, and so are names that
    /// were asked for in vain, in which case a model that was built went on without them; of those that the cache
    /// does not hold, the first 65,536.
    pub fn trace(&self) -> Trace {
        self.shared.asked.trace(&self.shared.manifest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shard_is_recorded_with_its_dtype_and_counts_as_asked() {
        let shapes: [(&str, ElementType, &[u64]); 3] = [
            ("a", ElementType::BF16, &[4, 2]),
            ("b", ElementType::BF16, &[4, 2]),
            ("c", ElementType::BF16, &[4, 2]),
        ];
        let manifest = Manifest::of_shapes(&shapes);
        let asked = Asked::new(&manifest);
        let hint = |dim, rank| ShardHint { dim, rank, size: 2 };
        for _ in 0..2 {
            asked.sharded(0, DType::F32, hint(1, 0));
            asked.sharded(0, DType::F32, hint(0, 1));
            asked.note(1, Way::Plain(DType::BF16));
            asked.note(0, Way::Lookup);
        }
        let request = |name: &str, shape: Option<&[u64]>, dtype, shard| Request {
            name: name.into(),
            shape: shape.map(<[u64]>::to_vec),
            dtype: Some(dtype),
            shard,
        };
        let trace = asked.trace(&manifest);
        let expected = [
            request("a", None, ElementType::F32, Some(hint(0, 1))),
            request("a", None, ElementType::F32, Some(hint(1, 0))),
            request("b", Some(&[4, 2]), ElementType::BF16, None),
        ];
        assert_eq!(trace.tensors, expected);
        assert!(trace.lookups.is_empty());
        assert_eq!(asked.unasked(&manifest).names, ["c"]);
    }

    #[test]
    fn misses_are_kept_up_to_a_limit() {
        let manifest = Manifest::of_shapes(&[("a", ElementType::F32, &[1])]);
        let asked = Asked::new(&manifest);
        for i in 0..MAX_MISSES + 10 {
            asked.missed(&format!("n{i}"));
        }
        assert_eq!(asked.trace(&manifest).lookups.len(), MAX_MISSES);
    }

    #[test]
    fn every_dtype_has_a_bit_of_its_own() {
        let bits = DTYPES.iter().fold(0, |bits, (dtype, element)| {
            let bit = dtype_bit(*dtype);
            assert_eq!(bits & bit, 0);
            assert_eq!(dtypes(bit).collect::<Vec<_>>(), [Some(*element)]);
            bits | bit
        });
        assert_eq!(bits.count_ones(), 14);
        assert_eq!(dtypes(1 << 15).collect::<Vec<_>>(), [None]);
    }
}
