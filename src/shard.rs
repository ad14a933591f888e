//! Which part of a model an entry holds, and which bytes of a tensor are one rank's. Pure: numbers only.
//! A slice is equal for every rank: the tensor's dimension divided by the number of ranks.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::manifest::ElementType;

/// Most ranks of one group.
pub const MAX_RANKS: u16 = 1 << 12;

/// One rank of a group; the default is the only one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Part {
    /// Which, from 0.
    pub rank: u16,
    /// How many there are.
    pub size: u16,
}

impl Default for Part {
    fn default() -> Self {
        Self { rank: 0, size: 1 }
    }
}

impl Part {
    /// Rank `rank` of `size`.
    pub fn new(rank: u16, size: u16) -> Self {
        Self { rank, size }
    }

    /// Whether there is no other rank.
    pub fn is_whole(self) -> bool {
        self == Self::default()
    }

    /// Whether there can be such a rank.
    pub fn is_possible(self) -> bool {
        self.rank < self.size && self.size <= MAX_RANKS
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.rank, self.size)
    }
}

/// A text that names no [`Part`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no rank: write `RANK/SIZE`, for instance `0/2`; ranks run from 0, and there are at most {MAX_RANKS}"
)]
pub struct NoSuchPart(pub String);

impl FromStr for Part {
    type Err = NoSuchPart;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let number = |t: &str| {
            let digits = !t.is_empty() && t.bytes().all(|b| b.is_ascii_digit());
            t.parse().ok().filter(|_| digits)
        };
        text.split_once('/')
            .and_then(|(rank, size)| Some(Self::new(number(rank)?, number(size)?)))
            .filter(|part| part.is_possible())
            .ok_or_else(|| NoSuchPart(text.to_string()))
    }
}

/// Which part of a model an entry holds, in each of the ways in which models are spread; the default is all of it.
///
/// Its text is `tp 0/2, pp 1/4`: what is whole is left out, and a whole model is `whole`.
#[derive(
    Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default, Serialize, Deserialize,
)]
pub struct ShardId {
    /// Tensor parallel: a slice of each matrix.
    pub tp: Part,
    /// Pipeline parallel: some of the layers.
    pub pp: Part,
    /// Data parallel: the same weights for other requests.
    pub dp: Part,
    /// Expert parallel: some of the experts.
    pub ep: Part,
}

impl ShardId {
    /// Rank `rank` of `size` of a tensor-parallel model.
    pub fn tensor_parallel(rank: u16, size: u16) -> Self {
        Self {
            tp: Part::new(rank, size),
            ..Self::default()
        }
    }

    /// Whether it is all of the model.
    pub fn is_whole(&self) -> bool {
        *self == Self::default()
    }

    /// Whether there can be such a part.
    pub fn is_possible(&self) -> bool {
        let parts = [self.tp, self.pp, self.dp, self.ep];
        parts.into_iter().all(Part::is_possible)
    }

    /// Each way of spreading, by the name that flags, options and texts give it.
    pub fn parts(&self) -> [(&'static str, Part); 4] {
        [
            ("tp", self.tp),
            ("pp", self.pp),
            ("dp", self.dp),
            ("ep", self.ep),
        ]
    }
}

impl fmt::Display for ShardId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut comma = "";
        for (name, part) in self.parts().iter().filter(|(_, part)| !part.is_whole()) {
            write!(f, "{comma}{name} {part}")?;
            comma = ", ";
        }
        if comma.is_empty() {
            f.write_str("whole")?;
        }
        Ok(())
    }
}

/// A cut of a tensor: one rank's slice along a dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cut {
    /// The dimension, outermost first.
    pub dim: usize,
    /// Whose slice.
    pub part: Part,
}

/// Why a tensor cannot be cut.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CutError {
    /// It has no such dimension.
    #[error("there is no dimension {dim} in its shape {shape:?}")]
    NoDimension {
        /// The dimension asked for.
        dim: usize,
        /// The tensor's shape.
        shape: Vec<u64>,
    },
    /// There is no such rank.
    #[error("there is no rank {part}")]
    NoRank {
        /// The rank asked for.
        part: Part,
    },
    /// The ranks' slices would not be equal.
    #[error("dimension {dim} of its shape {shape:?} is not divisible by {size}")]
    Indivisible {
        /// The dimension.
        dim: usize,
        /// The tensor's shape.
        shape: Vec<u64>,
        /// How many ranks.
        size: u16,
    },
    /// A slice would begin or end inside a block.
    #[error(
        "a slice along dimension {dim} has runs of {run} elements, which are no whole {element} blocks of {block}"
    )]
    Blocks {
        /// The dimension.
        dim: usize,
        /// Elements of the slice that follow one another in the tensor.
        run: u64,
        /// The tensor's type.
        element: ElementType,
        /// Elements of a block.
        block: u64,
    },
}

/// Where a slice lies among its tensor's bytes: equal runs at equal distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Runs {
    /// How many runs.
    pub count: u64,
    /// Bytes from the tensor's start to the first.
    pub start: u64,
    /// Bytes of a run.
    pub run: u64,
    /// Bytes from one run's start to the next one's.
    pub stride: u64,
}

impl Runs {
    /// Bytes of the slice.
    pub fn bytes(&self) -> u64 {
        self.count * self.run
    }

    /// Where byte `at` of the slice lies in the tensor, and how many bytes of its run begin there. The slice must not
    /// be empty.
    pub fn locate(&self, at: u64) -> (u64, u64) {
        let (row, column) = (at / self.run, at % self.run);
        (self.start + row * self.stride + column, self.run - column)
    }

    /// The slice, taken out of its tensor's bytes.
    pub fn gather(&self, tensor: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.bytes() as usize);
        for row in 0..self.count {
            let from = (self.start + row * self.stride) as usize;
            out.extend_from_slice(&tensor[from..from + self.run as usize]);
        }
        out
    }
}

/// A slice's shape, and where it lies among the bytes of a tensor of this type and shape.
///
/// # Errors
/// When the tensor cannot be cut so.
pub fn slice(element: ElementType, shape: &[u64], cut: Cut) -> Result<(Vec<u64>, Runs), CutError> {
    let Cut { dim, part } = cut;
    let shape_of = || shape.to_vec();
    let Some(all) = shape.get(dim).copied() else {
        return Err(CutError::NoDimension {
            dim,
            shape: shape_of(),
        });
    };
    let (size, rank) = (u64::from(part.size), u64::from(part.rank));
    if size > 0 && !all.is_multiple_of(size) {
        return Err(CutError::Indivisible {
            dim,
            shape: shape_of(),
            size: part.size,
        });
    }
    if !part.is_possible() {
        return Err(CutError::NoRank { part });
    }
    let mut sliced = shape_of();
    sliced[dim] = all / size;
    if shape.contains(&0) {
        let (count, start, run, stride) = (0, 0, 0, 0);
        return Ok((
            sliced,
            Runs {
                count,
                start,
                run,
                stride,
            },
        ));
    }
    // Without a zero among them, no product of dimensions is more than the tensor's own count of elements.
    let count: u64 = shape[..dim].iter().product();
    let inner: u64 = shape[dim + 1..].iter().product();
    let (run, block) = (sliced[dim] * inner, element.block_elements());
    if !run.is_multiple_of(block) {
        return Err(CutError::Blocks {
            dim,
            run,
            element,
            block,
        });
    }
    let bytes = |elements: u64| elements / block * element.block_bytes();
    let runs = Runs {
        count,
        start: rank * bytes(run),
        run: bytes(run),
        stride: bytes(all * inner),
    };
    Ok((sliced, runs))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(dim: usize, rank: u16, size: u16) -> Cut {
        Cut {
            dim,
            part: Part::new(rank, size),
        }
    }

    #[test]
    fn ranks_are_read_as_they_are_written_and_impossible_ones_are_not() {
        assert_eq!("1/2".parse(), Ok(Part::new(1, 2)));
        assert_eq!(Part::new(3, 8).to_string(), "3/8");
        for text in [
            "", "1", "2/2", "0/0", "-1/2", "+0/2", "0/2/3", "a/2", "0/4097",
        ] {
            let wrong = text.parse::<Part>().expect_err(text).to_string();
            assert!(wrong.contains(&format!("`{text}`")), "{wrong}");
        }
        assert_eq!(ShardId::default().to_string(), "whole");
        let shard = ShardId {
            pp: Part::new(1, 4),
            ..ShardId::tensor_parallel(0, 2)
        };
        assert_eq!(shard.to_string(), "tp 0/2, pp 1/4");
    }

    #[test]
    fn the_slices_of_all_ranks_make_up_the_tensor() {
        let shape = [4u64, 6, 10];
        let values: Vec<u8> = (0..240).collect();
        for dim in 0..3 {
            let mut seen = vec![0; 240];
            for rank in 0..2 {
                let (sliced, runs) =
                    slice(ElementType::U8, &shape, cut(dim, rank, 2)).expect("a slice");
                assert_eq!(sliced.iter().product::<u64>(), 120);
                let gathered = runs.gather(&values);
                for (at, value) in gathered.iter().enumerate() {
                    let (from, left) = runs.locate(at as u64);
                    assert_eq!(values[from as usize], *value);
                    assert!(left >= 1 && left <= runs.run);
                    seen[*value as usize] += 1;
                }
            }
            assert_eq!(seen, vec![1; 240], "dimension {dim}");
        }
    }

    #[test]
    fn blocks_are_never_cut_through() {
        let shape = [4u64, 512];
        let by = |element, dim, size| slice(element, &shape, cut(dim, 0, size));
        assert_eq!(by(ElementType::Q4K, 0, 4).map(|s| s.1.bytes()), Ok(288));
        let (sliced, runs) = by(ElementType::Q4K, 1, 2).expect("a block each");
        assert_eq!((sliced, runs.run, runs.stride), (vec![4, 256], 144, 288));
        let error = by(ElementType::Q4K, 1, 4).expect_err("half a block");
        assert!(error.to_string().contains("128 elements"), "{error}");
        assert!(matches!(
            slice(ElementType::F4, &[6], cut(0, 0, 2)),
            Err(CutError::Blocks { .. })
        ));
    }

    #[test]
    fn what_cannot_be_cut_says_why() {
        for (shape, cut, wanted) in [
            (&[4u64, 4][..], cut(2, 0, 2), "no dimension 2"),
            (&[], cut(0, 0, 2), "no dimension 0"),
            (&[4, 6], cut(1, 0, 4), "not divisible by 4"),
            (&[4, 4], cut(0, 2, 2), "no rank 2/2"),
            (&[4, 4], cut(0, 0, 0), "no rank 0/0"),
        ] {
            let error = slice(ElementType::F32, shape, cut).expect_err(wanted);
            assert!(error.to_string().contains(wanted), "{error}");
        }
        let empty = slice(ElementType::F32, &[0, u64::MAX, 4], cut(2, 1, 2)).expect("nothing");
        assert_eq!((empty.0, empty.1.bytes()), (vec![0, u64::MAX, 2], 0));
    }
}
