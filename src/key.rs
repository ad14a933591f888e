//! Identity: what must be equal for cached weights to be the right ones.
//! A receipt of a file can say "the same" or "unknown"; only digests of bytes say "other".

use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::shard::ShardId;

/// Most files that one entry may come from.
pub const MAX_SOURCES: usize = 1 << 16;
/// The selection of an entry that holds every tensor of its files, whole.
pub const ALL: &str = "all";

/// What an entry was made from, and how.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Key {
    /// Name that the entry was loaded under.
    pub model: String,
    /// Which part of the model the entry holds.
    pub shard: ShardId,
    /// Which tensors were taken, and how they were cut: [`ALL`], or counts and a digest over names and cuts.
    pub selection: String,
    /// Whether the experts of a layer lie one behind the other, as one tensor.
    pub stacked: bool,
    /// `stored`, or the dtype that float tensors were converted to (`bf16`, `f16`, `f32`).
    pub dtype: String,
    /// Quantization recipe in its canonical spelling; `none` where nothing was quantized.
    pub recipe: String,
    /// The manifest's format version.
    pub format: u32,
    /// The files that the tensors came from, in the order in which they were read.
    #[serde(deserialize_with = "crate::manifest::capped::<_, _, MAX_SOURCES>")]
    pub sources: Vec<Receipt>,
}

/// A field in which two keys differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The field.
    pub field: String,
    /// What the engine asked for.
    pub wanted: String,
    /// What the cache holds.
    pub held: String,
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{}: wanted {}, the cache holds {}",
            self.field, self.wanted, self.held
        )
    }
}

/// What a file looked like when it was read: a shortcut around hashing it again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Receipt {
    /// Absolute path, as the reader saw it.
    pub path: PathBuf,
    /// Device number.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Last change of the contents: seconds and nanoseconds since 1970.
    pub mtime: (i64, i64),
    /// Last change of the inode: seconds and nanoseconds since 1970.
    pub ctime: (i64, i64),
    /// When the receipt was taken: seconds and nanoseconds since 1970.
    pub taken: (i64, i64),
}

/// What comparing a receipt with the file of today says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freshness {
    /// The same file, untouched.
    Same,
    /// The receipt cannot tell: the bytes decide.
    Unknown,
    /// The file cannot be seen from here.
    Unseen,
}

impl Receipt {
    /// Takes the receipt of an open file that was found at `path`.
    ///
    /// # Errors
    /// When the file cannot be examined.
    pub fn of(file: &File, path: &Path) -> std::io::Result<Self> {
        Ok(Self::from_metadata(&file.metadata()?, path))
    }

    fn from_metadata(meta: &Metadata, path: &Path) -> Self {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        Self {
            path: path.to_path_buf(),
            device: meta.dev(),
            inode: meta.ino(),
            bytes: meta.len(),
            mtime: (meta.mtime(), meta.mtime_nsec()),
            ctime: (meta.ctime(), meta.ctime_nsec()),
            taken: (now.as_secs() as i64, i64::from(now.subsec_nanos())),
        }
    }

    /// Whether the file looked the same at both times.
    pub fn same_file(&self, other: &Self) -> bool {
        (self.device, self.inode, self.bytes, self.mtime, self.ctime)
            == (
                other.device,
                other.inode,
                other.bytes,
                other.mtime,
                other.ctime,
            )
    }

    /// Compares the receipt with what lies at its path today.
    pub fn freshness(&self) -> Freshness {
        self.freshness_at(&self.path)
    }

    /// Compares the receipt with what lies at `path` today.
    pub fn freshness_at(&self, path: &Path) -> Freshness {
        let Ok(meta) = std::fs::metadata(path) else {
            return Freshness::Unseen;
        };
        if self.settled() && self.same_file(&Self::from_metadata(&meta, path)) {
            Freshness::Same
        } else {
            Freshness::Unknown
        }
    }

    /// Whether a later write must show in the times: not when the file was written in the clock
    /// tick in which the receipt was taken. Kernels stamp files at up to 10 ms, and filesystems
    /// without nanoseconds at up to 2 s.
    fn settled(&self) -> bool {
        let coarse = self.mtime.1 == 0 && self.ctime.1 == 0;
        let margin: i128 = if coarse { 2_000_000_000 } else { 20_000_000 };
        let ns = |t: (i64, i64)| i128::from(t.0) * 1_000_000_000 + i128::from(t.1);
        ns(self.taken) - ns(self.mtime.max(self.ctime)) > margin
    }
}

impl Key {
    /// Whether the entry holds something of every tensor of its files: all of it, or a rank's slice.
    pub fn takes_all(&self) -> bool {
        self.selection == ALL || self.selection.starts_with(&format!("{ALL},"))
    }

    /// The fields, apart from the files, in which `wanted` differs from this key.
    pub fn differences(&self, wanted: &Self) -> Vec<Difference> {
        let mut out = Vec::new();
        let mut field = |name: &str, w: &str, h: &str| {
            if w != h {
                out.push(Difference {
                    field: name.into(),
                    wanted: w.into(),
                    held: h.into(),
                });
            }
        };
        field("model", &wanted.model, &self.model);
        field("shard", &wanted.shard.to_string(), &self.shard.to_string());
        field("selection", &wanted.selection, &self.selection);
        field(
            "stacked experts",
            &wanted.stacked.to_string(),
            &self.stacked.to_string(),
        );
        field("dtype", &wanted.dtype, &self.dtype);
        field("recipe", &wanted.recipe, &self.recipe);
        field(
            "format version",
            &wanted.format.to_string(),
            &self.format.to_string(),
        );
        out
    }
}
