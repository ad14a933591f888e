//! Why a checkpoint cannot be used: one error type for files, headers, indexes and folders.
//! Every message names the file or the tensor, what was found and what was wanted, and the way out.

use std::io;
use std::path::{Path, PathBuf};

use super::gguf::types;

/// Most items that one message spells out; the rest is a count.
const LISTED: usize = 20;

/// A tensor of a GGML type that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownType {
    /// The tensor.
    pub tensor: String,
    /// Number of its type in the file.
    pub number: u32,
}

/// Why a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// Nothing lies at the path.
    #[error("{}: there is no such file or folder", path.display())]
    NoSuchPath {
        /// The path.
        path: PathBuf,
    },
    /// Nothing lies at the path, and it looks like the id of a hub model.
    #[error(
        "`{id}`: there is no such file or folder, and hub ids are not supported by this build: \
         download the model and give its folder"
    )]
    HubId {
        /// What was asked for.
        id: String,
    },
    /// A symbolic link leads nowhere.
    #[error(
        "{} is a link to {}, where nothing lies: fetch the file again{hint}",
        path.display(), target.display()
    )]
    Dangling {
        /// The link.
        path: PathBuf,
        /// Where it leads.
        target: PathBuf,
        /// What else was seen, for instance a download that was interrupted; may be empty.
        hint: String,
    },
    /// The system refused access.
    #[error("{}: permission denied: {why}", path.display())]
    Denied {
        /// The file or folder.
        path: PathBuf,
        /// Whose it is, its mode, and who asked.
        why: String,
    },
    /// The process has no file descriptor left.
    #[error(
        "{}: no file descriptor left to open it, the limit is {limit}: raise it (ulimit -n)",
        path.display()
    )]
    Descriptors {
        /// The file.
        path: PathBuf,
        /// Descriptors that the process may have; `u64::MAX` for no limit of its own.
        limit: u64,
    },
    /// Another fault of the system.
    #[error("{}: {doing}: {source}", path.display())]
    System {
        /// The file or folder.
        path: PathBuf,
        /// What was being done.
        doing: String,
        /// The fault.
        source: io::Error,
    },
    /// The path leads to something that is not a regular file.
    #[error("{} is {kind}: weights are read from regular files only", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
        /// What it is.
        kind: &'static str,
    },
    /// The file is of no kind that holds weights.
    #[error(
        "{}: not a checkpoint: {what}; give a folder, a .safetensors file, a .safetensors.index.json or a \
         .gguf file",
        path.display()
    )]
    NotACheckpoint {
        /// The file.
        path: PathBuf,
        /// What it looks like.
        what: String,
    },
    /// A Git LFS pointer lies where the weights should.
    #[error(
        "{} is a Git LFS pointer, not the weights{}: run `git lfs pull` in its folder",
        path.display(),
        size.map(|s| format!(": it stands for a file of {s} bytes")).unwrap_or_default()
    )]
    LfsPointer {
        /// The file.
        path: PathBuf,
        /// Bytes of the file that it stands for, where it says so.
        size: Option<u64>,
    },
    /// The file ends too early.
    #[error(
        "{}: truncated: {what} needs {wanted} bytes, the file has {found} ({} are missing): fetch it again",
        path.display(), wanted.saturating_sub(*found)
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// What needs more bytes.
        what: String,
        /// Length of the file in bytes.
        found: u64,
        /// Bytes that it must have at least.
        wanted: u64,
    },
    /// The file goes on after its last tensor.
    #[error(
        "{}: {} trailing bytes after the last tensor: the file has {found} bytes, its header describes \
         {wanted}: fetch it again",
        path.display(), found.saturating_sub(*wanted)
    )]
    Trailing {
        /// The file.
        path: PathBuf,
        /// Length of the file in bytes.
        found: u64,
        /// Bytes that the header describes.
        wanted: u64,
    },
    /// The header or the index does not hold together.
    #[error("{}: broken header: {what}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What does not hold.
        what: String,
    },
    /// A number exceeds its limit.
    #[error("{}: {found} {what}, the limit is {limit}", path.display())]
    Limit {
        /// The file or folder.
        path: PathBuf,
        /// What is counted.
        what: String,
        /// The count.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// A GGUF of a version or a byte order that this build does not read.
    #[error("{}: {what}", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// The version found, and those that work.
        what: String,
    },
    /// What the header says of one tensor does not hold.
    #[error("{}: tensor `{tensor}`: {what}", path.display())]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What does not hold.
        what: String,
    },
    /// Two tensors lie in one place.
    #[error(
        "{}: tensors `{first}` and `{second}` share bytes {start} to {end} of the data: two names point at \
         the same bytes; tie tensors by leaving one name out",
        path.display()
    )]
    SharedRange {
        /// The file.
        path: PathBuf,
        /// One tensor.
        first: String,
        /// The other.
        second: String,
        /// Where the range starts, in bytes from the data's start.
        start: u64,
        /// Where it ends.
        end: u64,
    },
    /// A name stands more than once.
    #[error("{}: duplicate {what}: it stands more than once", path.display())]
    Duplicate {
        /// The file, or the second of two files.
        path: PathBuf,
        /// The name, and what it names.
        what: String,
    },
    /// There are no weights in it.
    #[error("{}: it holds no tensors{what}", path.display())]
    NoTensors {
        /// The file.
        path: PathBuf,
        /// What it holds instead; may be empty.
        what: String,
    },
    /// Tensors have GGML types that candle cannot compute with.
    #[error(
        "{}: {} of GGML types that cannot be used: {}; take a file in one of the types that \
         work: {}",
        path.display(),
        count(tensors.len(), "tensor"),
        listed(tensors.iter().map(|t| format!("`{}` is {} ({})", t.tensor, types::name(t.number), t.number))),
        types::working()
    )]
    UnknownTypes {
        /// The file, or the first part.
        path: PathBuf,
        /// Every such tensor.
        tensors: Vec<UnknownType>,
    },
    /// Files that belong to the model are not there.
    #[error(
        "{}: {} of the model missing: {}; fetch what is missing{hint}",
        path.display(), count(missing.len(), "file"), listed(missing.iter())
    )]
    MissingFiles {
        /// The index, or the part that names the set.
        path: PathBuf,
        /// Every file that is not there.
        missing: Vec<String>,
        /// What else was seen, for instance a download that was interrupted; may be empty.
        hint: String,
    },
    /// An index names a file outside its folder.
    #[error(
        "{}: it names the shard `{shard}`, which would lie outside the index's folder: absolute names and \
         `..` are refused",
        path.display()
    )]
    Outside {
        /// The index.
        path: PathBuf,
        /// The name.
        shard: String,
    },
    /// The index names tensors that are not in the shards it names for them.
    #[error(
        "{}: {} missing from the shard that the index names: {}: index and shards are not of one model",
        path.display(),
        count(tensors.len(), "tensor"),
        listed(tensors.iter().map(|(t, s)| format!("`{t}` (in {s})")))
    )]
    NotInShard {
        /// The index.
        path: PathBuf,
        /// Tensor and shard of each.
        tensors: Vec<(String, String)>,
    },
    /// Several models lie in one folder.
    #[error("{}: {what}: {}; name one of them", path.display(), listed(candidates.iter()))]
    Ambiguous {
        /// The folder.
        path: PathBuf,
        /// What makes it ambiguous.
        what: &'static str,
        /// What there is to choose from.
        candidates: Vec<String>,
    },
    /// The folder is a pipeline of several models.
    #[error(
        "{}: a pipeline of several models (model_index.json): name the folder of one component: {}",
        path.display(), listed(components.iter())
    )]
    Components {
        /// The folder.
        path: PathBuf,
        /// Components that hold weights.
        components: Vec<String>,
    },
    /// The variant that was asked for is not there, or none was asked for and only variants are.
    #[error(
        "{}: {}; there {}",
        path.display(),
        variant.as_ref().map_or_else(
            || "it holds weights of variants only, and none was asked for".to_string(),
            |v| format!("no weights of variant `{v}`"),
        ),
        if found.is_empty() { "are no variants".to_string() } else { format!("are: {}", listed(found.iter())) }
    )]
    NoVariant {
        /// The folder.
        path: PathBuf,
        /// The variant asked for.
        variant: Option<String>,
        /// Variants that are there.
        found: Vec<String>,
    },
    /// A variant was asked for, and a file was named.
    #[error(
        "{}: it is a file, and the variant `{variant}` chooses among the files of a folder: leave one out",
        path.display()
    )]
    VariantOfFile {
        /// The file.
        path: PathBuf,
        /// The variant asked for.
        variant: String,
    },
    /// Weights are spread over shards, and the index that says how is missing.
    #[error(
        "{}: shards without their index ({}): fetch the *.safetensors.index.json that belongs to them",
        path.display(), listed(shards.iter())
    )]
    NoIndex {
        /// The folder.
        path: PathBuf,
        /// The shards.
        shards: Vec<String>,
    },
    /// The folder holds no weights.
    #[error(
        "{}: no weights there: looked for *.safetensors.index.json, model.safetensors, another single \
         .safetensors file, and .gguf files{hint}",
        path.display()
    )]
    NothingThere {
        /// The folder.
        path: PathBuf,
        /// What lies there instead; may be empty.
        hint: String,
    },
    /// Parts of a split GGUF do not belong together.
    #[error("{}: split GGUF: {what}", path.display())]
    Split {
        /// The part.
        path: PathBuf,
        /// What does not hold.
        what: String,
    },
    /// The file became shorter after its header was read.
    #[error(
        "{}: the file became shorter while it was read: tensor `{tensor}` needs {wanted} bytes of file, it \
         has {found} now: load it again when nobody writes to it",
        path.display()
    )]
    Shrunk {
        /// The file.
        path: PathBuf,
        /// The tensor that was being read.
        tensor: String,
        /// Length of the file now, in bytes.
        found: u64,
        /// Where the tensor ends, in bytes from the file's start.
        wanted: u64,
    },
    /// The file is not what it was when its header was read.
    #[error(
        "{}: the file changed while it was read: {what}: load it again when nobody writes to it",
        path.display()
    )]
    Changed {
        /// The file.
        path: PathBuf,
        /// What differs, both values.
        what: String,
    },
    /// More was asked for than the tensor has. A fault of the caller.
    #[error("tensor `{tensor}` has {length} bytes: asked for {bytes} from byte {at} on")]
    OutOfRange {
        /// The tensor.
        tensor: String,
        /// First byte asked for.
        at: u64,
        /// Bytes asked for.
        bytes: u64,
        /// Bytes that the tensor has.
        length: u64,
    },
}

impl CheckpointError {
    pub(super) fn header(path: &Path, what: impl Into<String>) -> Self {
        Self::Header {
            path: path.to_path_buf(),
            what: what.into(),
        }
    }

    pub(super) fn tensor(path: &Path, tensor: &str, what: impl Into<String>) -> Self {
        Self::Tensor {
            path: path.to_path_buf(),
            tensor: shown(tensor),
            what: what.into(),
        }
    }

    pub(super) fn limit(path: &Path, what: impl Into<String>, found: u64, limit: u64) -> Self {
        Self::Limit {
            path: path.to_path_buf(),
            what: what.into(),
            found,
            limit,
        }
    }
}

/// A name from outside, fit for a message: without control characters, and cut where it is long.
pub(super) fn shown(name: &str) -> String {
    const LONGEST: usize = 200;
    let mut out: String = name
        .chars()
        .take(LONGEST)
        .flat_map(|c| {
            let escaped = c.is_control().then(|| c.escape_default());
            let plain = escaped.is_none().then_some(c);
            escaped.into_iter().flatten().chain(plain)
        })
        .collect();
    if name.chars().nth(LONGEST).is_some() {
        out.push('…');
    }
    out
}

/// Joins items for a message; a long list is cut, with a count of the rest.
pub(super) fn listed<T: ToString>(items: impl ExactSizeIterator<Item = T>) -> String {
    let all = items.len();
    let mut text = items
        .take(LISTED)
        .map(|i| shown(&i.to_string()))
        .collect::<Vec<_>>()
        .join(", ");
    if all > LISTED {
        text.push_str(&format!(" and {} more", all - LISTED));
    }
    text
}

pub(super) fn count(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}
