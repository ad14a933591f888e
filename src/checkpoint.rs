//! Where tensors come from: safetensors and GGUF, single, sharded or split, and the small files beside them.
//! Headers are parsed, with caps; tensor bytes are never parsed, only copied.

use std::collections::BTreeMap;
use std::path::Path;

use crate::key::Receipt;
use crate::manifest::{Digest, ElementType};
use crate::shard::{Cut, Runs};

mod error;
mod files;
mod folder;
mod gguf;
mod index;
mod safetensors;
mod slice;
mod source;

pub use error::{CheckpointError, UnknownType};
#[cfg(feature = "cli")]
pub(crate) use slice::SPAN;

use folder::{Listing, Model};

/// Most bytes of a tensor that [`Checkpoint::digest`] holds at once.
const DIGEST_STEP: u64 = 4 << 20;
/// Most strings that travel with the weights.
const MAX_ATTRIBUTES: usize = 256;
/// Most bytes of one of them, name included.
const MAX_ATTRIBUTE: usize = 64 << 10;

/// How to choose among what lies in a folder.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// File variant, for instance `fp16` for `model.fp16.safetensors`.
    pub variant: Option<String>,
}

/// One file that tensors are read from.
#[derive(Debug)]
pub struct SourceFile {
    /// The open file.
    pub file: std::fs::File,
    /// What it looked like when it was opened.
    pub receipt: Receipt,
}

/// One tensor's place in a checkpoint, or the place of one rank's slice of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceTensor {
    /// Its name.
    pub name: String,
    /// How its elements are stored.
    pub element: ElementType,
    /// Dimensions, outermost first; of a slice, the slice's own.
    pub shape: Vec<u64>,
    /// Index into [`Checkpoint::files`].
    pub file: usize,
    /// Bytes from the file's start to the tensor's, of which a slice may be any part.
    pub offset: u64,
    /// Length in bytes; of a slice, the slice's own.
    pub bytes: u64,
    /// The slice that is meant; `None`: all of the tensor.
    pub slice: Option<Slice>,
}

/// One rank's slice of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// How the tensor is cut.
    pub cut: Cut,
    /// Where the slice lies among the tensor's bytes.
    pub runs: Runs,
}

/// A checkpoint whose headers have been read and found whole.
#[derive(Debug)]
pub struct Checkpoint {
    /// Name for an entry that no name was given for: the file's stem or the folder's name.
    pub name: String,
    /// Files that tensors lie in.
    pub files: Vec<SourceFile>,
    /// Tensors, sorted by name, each name once.
    pub tensors: Vec<SourceTensor>,
    /// Small files that travel with the weights: name relative to the folder, bytes.
    pub small_files: Vec<(String, Vec<u8>)>,
    /// Strings that travel with the weights.
    pub attributes: Vec<(String, String)>,
}

impl Checkpoint {
    /// Opens a folder, a `.safetensors` file, an index file, or a `.gguf` file, and reads its headers.
    ///
    /// No tensor byte is read. Every file stays open, so that a path that is replaced later changes
    /// nothing. Nothing waits: pipes and devices are refused.
    ///
    /// # Errors
    /// Names the file or tensor that is wrong, and the way out.
    pub fn open(path: &Path, options: &Options) -> Result<Self, CheckpointError> {
        let meta = std::fs::metadata(path).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound if looks_like_hub_id(path) => CheckpointError::HubId {
                id: path.display().to_string(),
            },
            _ => source::system(path, "looking at it", e),
        })?;
        let chosen = if meta.is_dir() {
            let listing = Listing::read(path)?;
            let model = folder::choose(path, &listing, options)?;
            tracing::debug!(?model, "chosen in {}", path.display());
            Chosen {
                model,
                folder: path,
                listing: Some(listing),
                name: folder_name(path),
            }
        } else if let Some(variant) = &options.variant {
            return Err(CheckpointError::VariantOfFile {
                path: path.to_path_buf(),
                variant: variant.clone(),
            });
        } else {
            of_file(path)?
        };
        let mut out = Self {
            name: chosen.name,
            files: Vec::new(),
            tensors: Vec::new(),
            small_files: Vec::new(),
            attributes: Vec::new(),
        };
        let strings = match chosen.model {
            Model::Single(path) => {
                let source = source::open(&path)?;
                let header = safetensors::read_header(&source, &path, 0)?;
                out.files.push(source);
                out.tensors = header.tensors;
                header.metadata
            }
            Model::Index(path) => {
                let sharded = index::read(&path)?;
                out.files = sharded.files;
                out.tensors = sharded.tensors;
                sharded.metadata
            }
            Model::Gguf(path) => {
                let set = gguf::read(&path)?;
                out.files = set.files;
                out.tensors = set.tensors;
                out.small_files.push((gguf::HEADER_NAME.into(), set.header));
                set.general
            }
        };
        out.tensors.sort_by(|a, b| a.name.cmp(&b.name));
        out.attributes = attributes(strings);
        out.small_files.extend(match &chosen.listing {
            Some(listing) => files::of_folder(chosen.folder, listing),
            None => files::beside(chosen.folder),
        });
        out.small_files.sort();
        Ok(out)
    }

    /// Fills `buffer` with the tensor's bytes from `at` on. A slice is read as if its bytes followed one another.
    ///
    /// # Errors
    /// When the file cannot be read, or has become shorter.
    pub fn read_at(
        &self,
        tensor: &SourceTensor,
        at: u64,
        buffer: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let bytes = buffer.len() as u64;
        if at.checked_add(bytes).is_none_or(|end| end > tensor.bytes) {
            return Err(out_of_range(tensor, at, bytes));
        }
        match &tensor.slice {
            Some(slice) => slice::read(slice, at, buffer, |at, buffer| {
                self.read_range(tensor, at, buffer)
            }),
            None => self.read_range(tensor, at, buffer),
        }
    }

    /// Fills `buffer` with the file's bytes from `at` bytes behind the tensor's start on.
    fn read_range(
        &self,
        tensor: &SourceTensor,
        at: u64,
        buffer: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let bytes = buffer.len() as u64;
        let Some(source) = self.files.get(tensor.file) else {
            return Err(out_of_range(tensor, at, bytes));
        };
        let path = &source.receipt.path;
        let doing = || format!("reading tensor `{}`", error::shown(&tensor.name));
        let got = source::read_at(&source.file, buffer, tensor.offset.saturating_add(at))
            .map_err(|e| source::system(path, &doing(), e))?;
        if (got as u64) < bytes {
            let now = source.file.metadata().map_or(0, |m| m.len());
            return Err(CheckpointError::Shrunk {
                path: path.clone(),
                tensor: error::shown(&tensor.name),
                found: now,
                wanted: tensor.end(),
            });
        }
        Ok(())
    }

    /// Checks that no file has changed since its header was read.
    ///
    /// The open files are looked at, not their paths: a path that now leads to another file does not
    /// matter to the bytes that were read.
    ///
    /// # Errors
    /// Names the file that did.
    pub fn check_unchanged(&self) -> Result<(), CheckpointError> {
        self.files.iter().try_for_each(source::check_unchanged)
    }

    /// The digest of a tensor's bytes.
    ///
    /// # Errors
    /// As [`Checkpoint::read_at`].
    pub fn digest(&self, tensor: &SourceTensor) -> Result<Digest, CheckpointError> {
        let mut hasher = blake3::Hasher::new();
        let mut buffer = vec![0; tensor.bytes.min(DIGEST_STEP) as usize];
        let mut at = 0;
        while at < tensor.bytes {
            let step = (tensor.bytes - at).min(DIGEST_STEP);
            let part = &mut buffer[..step as usize];
            self.read_at(tensor, at, part)?;
            hasher.update_rayon(part);
            at += step;
        }
        Ok(hasher.finalize().into())
    }
}

fn out_of_range(tensor: &SourceTensor, at: u64, bytes: u64) -> CheckpointError {
    CheckpointError::OutOfRange {
        tensor: tensor.name.clone(),
        at,
        bytes,
        length: tensor.bytes,
    }
}

/// What to read, and what goes with it.
struct Chosen<'a> {
    model: Model,
    /// Where its small files lie.
    folder: &'a Path,
    /// What lies there, where all of it belongs to the model.
    listing: Option<Listing>,
    /// Name for its entry.
    name: String,
}

fn of_file(path: &Path) -> Result<Chosen<'_>, CheckpointError> {
    let folder = match path.parent() {
        Some(p) if !p.as_os_str().is_empty() => p,
        _ => Path::new("."),
    };
    let text = |part: Option<&std::ffi::OsStr>| {
        part.map(|n| n.to_string_lossy().into_owned())
            .unwrap_or_default()
    };
    let lower = text(path.file_name()).to_ascii_lowercase();
    if lower.ends_with(".json") && lower.contains(".safetensors.index.") {
        return Ok(Chosen {
            model: Model::Index(path.into()),
            folder,
            listing: Listing::read(folder)
                .inspect_err(|e| tracing::warn!("only usual small files travel along: {e}"))
                .ok(),
            name: folder_name(folder),
        });
    }
    let model = if lower.ends_with(".gguf") {
        Model::Gguf(path.into())
    } else if lower.ends_with(".safetensors") {
        Model::Single(path.into())
    } else {
        by_content(path)?
    };
    let stem = text(path.file_stem());
    let name = match (&model, gguf::part_name(&stem)) {
        (Model::Gguf(_), Some(part)) => part.base,
        (_, Some(part)) if part.of > 1 => {
            tracing::warn!(
                "{}: one shard of {}, loaded alone: name the folder or the index to load the model",
                path.display(),
                part.of
            );
            stem
        }
        _ => stem,
    };
    Ok(Chosen {
        model,
        folder,
        listing: None,
        name,
    })
}

/// Files without a telling name, as a hub cache keeps them.
fn by_content(path: &Path) -> Result<Model, CheckpointError> {
    let source = source::open(path)?;
    source::check_is_content(&source, path)?;
    let mut start = vec![0; source.receipt.bytes.min(64) as usize];
    let got = source::read_at(&source.file, &mut start, 0)
        .map_err(|e| source::system(path, "reading it", e))?;
    start.truncate(got);
    if start.starts_with(b"GGUF") {
        return Ok(Model::Gguf(path.into()));
    }
    if start.get(8) == Some(&b'{') {
        return Ok(Model::Single(path.into()));
    }
    Err(CheckpointError::NotACheckpoint {
        path: path.into(),
        what: match safetensors::looks_like(&start) {
            Some(what) => format!("it is {what}"),
            None => "neither its name nor its first bytes say that it holds weights".into(),
        },
    })
}

fn folder_name(path: &Path) -> String {
    let named = |p: &Path| p.file_name().map(|n| n.to_string_lossy().into_owned());
    named(path)
        .or_else(|| named(&std::fs::canonicalize(path).ok()?))
        .unwrap_or_else(|| "model".into())
}

/// `org/name`, as the hub spells its models.
fn looks_like_hub_id(path: &Path) -> bool {
    let word = |w: &str| {
        !w.is_empty()
            && !w.starts_with('.')
            && w.bytes()
                .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
    };
    let weights = ["safetensors", "gguf", "json"];
    let ending = path.extension().and_then(|e| e.to_str());
    let text = path.to_str().and_then(|t| t.split_once('/'));
    text.is_some_and(|(org, name)| word(org) && word(name))
        && !ending.is_some_and(|e| weights.contains(&e))
}

/// Sorted by name, each name once (the first file's), as far as the limits go.
fn attributes(strings: Vec<(String, String)>) -> Vec<(String, String)> {
    let mut out = BTreeMap::new();
    for (name, value) in strings {
        if name.len().saturating_add(value.len()) > MAX_ATTRIBUTE
            || (out.len() == MAX_ATTRIBUTES && !out.contains_key(&name))
        {
            tracing::warn!(
                "the string `{}` does not travel with the weights: too long, or too many",
                error::shown(&name)
            );
            continue;
        }
        out.entry(name).or_insert(value);
    }
    out.into_iter().collect()
}
